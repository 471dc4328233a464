"""A storage that is away is waited for, within bounds, with words."""

from collections.abc import Callable

import pytest
from postgres import Postgres
from sqlalchemy.exc import OperationalError, ProgrammingError

from autotune.distributed.storage import Patience, open_storage
from autotune.distributed.url import StorageUrl
from ppas_core.errors import InvalidInput, NoResult

WHERE = StorageUrl.parse("postgresql://ppas:s3cret@db/studies")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)


def away() -> OperationalError:
    return OperationalError("SELECT", {}, Exception("connection refused"))


def patience(clock: Clock, said: list[str], outage_s: float = 900.0) -> Patience:
    return Patience(WHERE, said.append, outage_s, clock=clock, wait=clock.wait)


def failing_until(clock: Clock, time_s: float) -> Callable[[], str]:
    def call() -> str:
        if clock.now < time_s:
            raise away()
        return "answer"

    return call


def test_an_outage_of_a_minute_is_waited_for_with_longer_and_longer_pauses_up_to_ten_seconds() -> None:
    clock, said = Clock(), []
    assert patience(clock, said).through(failing_until(clock, 60.0)) == "answer"
    assert 60 <= clock.now < 75
    assert clock.waits[0] < 0.3
    assert max(clock.waits) <= 10
    assert len(said) == 3  # away, still away, back
    assert "is back after" in said[-1]
    assert not any("s3cret" in line for line in said)


def test_a_storage_that_stays_away_ends_the_worker_with_what_is_kept_and_then_nobody_waits_again() -> None:
    clock, said = Clock(), []
    waiting = patience(clock, said, outage_s=100.0)
    for _ in range(2):
        before = clock.now
        with pytest.raises(NoResult, match=r"away for 100 s .*what was measured is kept"):
            waiting.through(failing_until(clock, 1e9))
    assert clock.now == before


def test_an_error_that_waiting_does_not_cure_is_raised_at_once() -> None:
    clock, said = Clock(), []

    def broken() -> None:
        raise ProgrammingError("SELECT", {}, Exception("no such column"))

    with pytest.raises(ProgrammingError):
        patience(clock, said).through(broken)
    assert clock.waits == []


def test_a_refused_password_is_told_at_once(server: Postgres) -> None:
    where = StorageUrl.parse(f"postgresql://ppas:wr0ng-one@127.0.0.1:{server.port}/postgres")
    with pytest.raises(InvalidInput, match="authentication failed") as caught:
        open_storage(where, Patience(where, print))
    assert "wr0ng-one" not in str(caught.value)
