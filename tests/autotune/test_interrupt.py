"""An interrupt that a library swallowed is not lost, and one that is held off tears nothing apart."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autotune import interrupt


class Swallows:
    """Raises from a finaliser, where Python prints and forgets it, as libraries' callbacks do."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_got_lost_in_a_finaliser_is_raised_at_the_next_check_and_prints_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with interrupt.remembered():
        Swallows()
        assert printed == []
        Fails()
        assert len(printed) == 1, "what is no interrupt is still told"
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    interrupt.check()  # outside nothing is remembered
    assert signal.getsignal(signal.SIGINT) is not interrupt._on_sigint


class Fails:
    """Raises something else there."""

    def __del__(self) -> None:
        raise ValueError


@contextmanager
def ends_there() -> Iterator[None]:
    with pytest.raises(KeyboardInterrupt):
        yield


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_what_holds_it_off_and_a_second_one_does_not() -> None:
    done: list[str] = []
    with interrupt.remembered():
        with ends_there(), interrupt.held():
            with interrupt.held():
                ctrl_c()
                done.append("inner")
            done.append("outer")
        interrupt.forgive()
        with ends_there(), interrupt.held():
            ctrl_c()
            done.append("held off")
            ctrl_c()
            done.append("never")
    assert done == ["inner", "outer", "held off"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_that_is_asked_for_twice_tears_nothing_apart_and_a_ctrl_c_after_it_does(number: signal.Signals) -> None:
    done: list[str] = []
    with interrupt.remembered():
        with ends_there(), interrupt.held():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            done.append("held off")
        with ends_there():
            try:
                interrupt.check()
            finally:
                os.kill(os.getpid(), number)
                done.append("unwound")
        with ends_there(), interrupt.held():
            ctrl_c()
            done.append("never")
        with ends_there():  # as where a search would conclude
            interrupt.forgive()
        assert interrupt.is_for_good()
        assert interrupt.is_asked()
    assert done == ["held off", "unwound"]
    assert not interrupt.is_for_good()


def test_signals_are_heeded_within_a_command_alone_and_one_that_nohup_ignores_stays_ignored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with interrupt.remembered():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.is_asked()
            with ends_there():
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def test_what_ends_a_study_after_an_interrupt_may_hold_off_again_without_a_second_one() -> None:
    with interrupt.remembered():
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        with interrupt.held():
            pass  # the one that was raised already is not raised again
        assert interrupt.is_asked()


def test_a_measurement_within_is_interrupted_at_once_also_by_what_came_before_it() -> None:
    done: list[str] = []
    with interrupt.remembered():
        with ends_there(), interrupt.held(), interrupt.allowed():
            ctrl_c()
            done.append("never")
        interrupt.forgive()
        with ends_there(), interrupt.held():
            ctrl_c()
            done.append("held off")
            with interrupt.allowed():
                done.append("never")
    assert done == ["held off"]


def test_other_threads_hold_nothing_off() -> None:
    def elsewhere() -> None:
        with interrupt.held(), interrupt.allowed():
            inside.set()
            over.wait()

    inside, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    inside.wait()
    try:
        with interrupt.remembered(), pytest.raises(KeyboardInterrupt):
            ctrl_c()
    finally:
        over.set()
        thread.join()


def test_a_sleep_ends_with_an_interrupt_that_is_held_off() -> None:
    began = time.monotonic()
    with interrupt.remembered():
        timer = threading.Timer(0.1, ctrl_c)
        with ends_there(), interrupt.held():
            timer.start()
            interrupt.sleep(60)
        timer.join()
        again = time.monotonic()
        interrupt.sleep(0.3)  # it was told already: another try waits as long as it wants to
        assert time.monotonic() - again >= 0.3
    assert time.monotonic() - began < 30


def test_an_error_that_a_library_made_of_an_interrupt_is_told_as_one() -> None:
    def torn(asked: bool, error: Exception) -> None:
        with interrupt.remembered(), interrupt.recognised((OSError,)):
            try:
                if asked:
                    ctrl_c()
            except KeyboardInterrupt:
                pass
            raise error

    with pytest.raises(KeyboardInterrupt):
        torn(True, TypeError("cannot compare"))
    with pytest.raises(OSError, match="disk full"):
        torn(True, OSError("disk full"))
    with pytest.raises(TypeError):
        torn(False, TypeError("cannot compare"))
