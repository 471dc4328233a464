"""Ctrl-C that cannot get lost: an interrupt raised inside a library's callback may be swallowed there.

Python raises KeyboardInterrupt wherever it happens to be; in a finaliser or a weak reference's callback it is printed and
forgotten. Where a library catches errors of its own it may come out as another one. So the wish is remembered as well, and
long loops ask for it; what must not be torn apart holds it off for a moment. SIGTERM and SIGHUP are heeded in the same way, so
that a joined server gets its settings back; they are not forgiven, since who sends them waits for the end.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

_requested = threading.Event()
_for_good = threading.Event()
_LOOK_EVERY_S: Final = 0.2
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_holds = 0
"""How many contexts hold an interrupt off at present; the main thread's alone."""


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remembers SIGINT, SIGTERM and SIGHUP within the context; each raises KeyboardInterrupt. Off the main thread does nothing.

    SIGTERM and SIGHUP are for good, see `is_for_good`; where one is ignored, as SIGHUP is after nohup, it stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told, sys.unraisablehook = sys.unraisablehook, _not_ours(sys.unraisablehook)
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _on_ending) for number in heeded}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, _on_sigint)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = told
        _requested.clear()
        _for_good.clear()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Has an interrupt wait for the end of the context, which is to be short; a second Ctrl-C does not wait.

    What cannot be half done stays whole: a trial that is taken but nobody's, a transaction, a sampler in its sums. Within
    `remembered` and on the main thread; else does nothing.
    """
    global _holds
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _requested.is_set()
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        if _holds == 0 and _requested.is_set() and not before:
            raise KeyboardInterrupt


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Within `held`: has an interrupt not wait for the end of this context. Raises KeyboardInterrupt for one that waits."""
    global _holds
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    holds, _holds = _holds, 0
    try:
        check()
        yield
    finally:
        _holds = holds


@contextlib.contextmanager
def recognised(others: tuple[type[Exception], ...]) -> Iterator[None]:
    """Within `remembered`: an error that came after an interrupt was asked for is that interrupt, unless one of `others`.

    A library that catches errors in its own arithmetic makes another one of it (NumPy: TypeError).
    """
    try:
        yield
    except others:
        raise
    except Exception as error:
        if _requested.is_set():
            raise KeyboardInterrupt from error
        raise


def sleep(seconds: float) -> None:
    """Sleeps, until an interrupt is asked for that is held off at present."""
    end, before = time.monotonic() + seconds, _requested.is_set()
    while (left := end - time.monotonic()) > 0 and _requested.is_set() == before:
        time.sleep(min(left, _LOOK_EVERY_S))


def check() -> None:
    """Raises KeyboardInterrupt when one was asked for and got lost."""
    if _requested.is_set():
        raise KeyboardInterrupt


def is_asked() -> bool:
    """Whether an interrupt was asked for that nobody forgave."""
    return _requested.is_set()


def is_for_good() -> bool:
    """Whether the process is to end at once, and not to finish with what there is."""
    return _for_good.is_set()


def forgive() -> None:
    """Forgets an interrupt that was heeded; the next one counts anew. Raises KeyboardInterrupt where one is for good."""
    _requested.clear()
    if _for_good.is_set():
        _requested.set()
        raise KeyboardInterrupt


def _not_ours(told: Callable[[sys.UnraisableHookArgs], object]) -> Callable[[sys.UnraisableHookArgs], object]:
    """What tells of errors that nobody can catch as `told` does, but not of an interrupt, which is remembered."""

    def tell(lost: sys.UnraisableHookArgs) -> None:
        if not (isinstance(lost.exc_value, KeyboardInterrupt) and _requested.is_set()):
            told(lost)

    return tell


def _on_sigint(_number: int, _frame: FrameType | None) -> None:
    _ask()


def _on_ending(_number: int, _frame: FrameType | None) -> None:
    # Said twice it counts once: Slurm and systemd tell every process, and a parent tells its own again. The second one
    # is not to tear apart what the first one has brought about, such as the return of a trial.
    _for_good.set()
    if not _requested.is_set():
        _ask()


def _ask() -> None:
    again = _requested.is_set()
    _requested.set()
    if again or _holds == 0:
        raise KeyboardInterrupt
