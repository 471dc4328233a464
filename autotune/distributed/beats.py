"""Who is still alive: counters that workers raise, watched by the others without comparing clocks.

A worker raises a counter of the trial that it measures. Whoever looks remembers since when, by its own monotonic clock,
a counter has stood still: no clock of another machine is read, so none may be wrong or jump. An observer that could not
look for a while (the storage was away, it was stopped itself) starts counting anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

HEARTBEAT_S: Final = 15.0
"""Seconds between two beats, unless the study was begun with another number."""
_MISSED: Final = 4
"""Beats that must be missing before a trial counts as abandoned."""


class Watch:
    """Since when the beat of each running trial has stood still. Safe between threads."""

    def __init__(self, heartbeat_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[int, tuple[object, float]] = {}
        self._looked_s: float | None = None

    def look(self, beats: Mapping[int, object]) -> frozenset[int]:
        """Takes in the present beat of every running trial, and returns those that nobody measures any more."""
        now = self._clock()
        with self._lock:
            if self._looked_s is None or now - self._looked_s > 2 * self._heartbeat_s:
                self._since = {}
            self._looked_s = now
            before = self._since
            self._since = {
                number: before[number] if number in before and before[number][0] == beat else (beat, now)
                for number, beat in beats.items()
            }
            grace_s = _MISSED * self._heartbeat_s
            return frozenset(number for number, (_, since) in self._since.items() if now - since > grace_s)


class Beat:
    """Calls `beat` with 1, 2, 3 … every `heartbeat_s` seconds in a thread of its own while the context lasts.

    An error of `beat` ends the beating and nothing else: whoever measures learns of it when it writes its result.
    """

    def __init__(self, beat: Callable[[int], None], heartbeat_s: float) -> None:
        self._beat = beat
        self._heartbeat_s = heartbeat_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ppas-beat", daemon=True)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        # A beat that waits for a storage that is away must not hold up the one that measured.
        self._thread.join(timeout=self._heartbeat_s)

    def _run(self) -> None:
        count = 1
        while not self._over.wait(self._heartbeat_s):
            try:
                self._beat(count)
            except Exception:  # noqa: BLE001 - see above
                return
            count += 1
