"""What a long job tells whoever watches it. Knows neither terminals nor files."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a job. Every call is cheap, and none may raise."""

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """A stage of `total` steps starts, `done` of which an earlier process finished."""
        ...

    def advance(self, note: str = "") -> None:
        """One more step is done; `note` says what is worth knowing now, such as the best so far."""
        ...

    def end(self) -> None:
        """The stage is over."""
        ...


class Silent:
    """Watches nothing."""

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Does nothing."""

    def advance(self, note: str = "") -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""


class Together:
    """Tells several watchers the same, in their order."""

    def __init__(self, *watchers: Progress) -> None:
        self._watchers = watchers

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Tells everyone."""
        for watcher in self._watchers:
            watcher.begin(stage, total, done)

    def advance(self, note: str = "") -> None:
        """Tells everyone."""
        for watcher in self._watchers:
            watcher.advance(note)

    def end(self) -> None:
        """Tells everyone."""
        for watcher in self._watchers:
            watcher.end()


class Pace:
    """How long the steps of one stage took in this process, and so how long the rest will take.

    clock: seconds that only grow.
    """

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.done = done
        self._clock = clock
        self._measured = 0
        self._began = self._last = clock()

    def step(self) -> None:
        """One more step is done."""
        self.done += 1
        self._measured += 1
        self._last = self._clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage began in this process."""
        return self._clock() - self._began

    @property
    def step_s(self) -> float | None:
        """Mean seconds per step; None before the first."""
        return (self._last - self._began) / self._measured if self._measured else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of the stage, less what the step under way has already used; None before the first step."""
        if self.step_s is None:
            return None
        left = self.total - self.done
        if left <= 0:
            return 0.0
        under_way = min(self._clock() - self._last, self.step_s)
        return max(0.0, left * self.step_s - under_way)
