"""What the arrival times of a file say together: their order, whether the unit can be right, how coarse a clock is."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from ppas_core.errors import InvalidInput
from traces.importers.values import DATE, NS_PER_UNIT

_NS: Final = 10**9
_START_SHARE: Final = 0.05
"""A row this near to the file's start, in shares of the time passed, is back at the start …"""
_STAY_SHARE: Final = 0.75
"""… and when the next row has not come back this far, the clock began anew."""
_MIN_JUMP_NS: Final = _NS
_MIN_ROWS: Final = 10
_MAX_RATE_PER_S: Final = 1_000.0
_MAX_GAP_S: Final = 600.0
_EPOCH_S: Final = (1_420_000_000, 2_200_000_000)
"""2015 to 2039 in seconds since 1970."""
_COARSE_NS: Final = _NS // 10
_CROWD: Final = 1.5
"""Arrivals are quantised from this many requests per distinct time on, or when all times are multiples of 0.1 s."""


class OrderCheck:
    """Counts rows that come before a row above them, and notices a clock that begins anew in mid-file.

    A lone straggler is a late row; a row back at the start whose next row stays there is a second recording appended to
    the first, which no sorting mends. With `any_order` every order is taken as it is.
    """

    def __init__(self, any_order: bool) -> None:
        self.late_rows = 0
        self._any_order = any_order
        self._start_ns: int | None = None
        self._high_ns = 0
        self._suspect: tuple[int, str] | None = None

    def add(self, time_ns: int, row: int, text: str) -> None:
        """Takes the next row's time; text is the time as in the file. Raises InvalidInput when the clock began anew."""
        if self._start_ns is None:
            self._start_ns = self._high_ns = time_ns
        if self._suspect is not None:
            if time_ns < self._start_ns + _STAY_SHARE * (self._high_ns - self._start_ns):
                suspect_row, suspect_text = self._suspect
                raise InvalidInput(
                    f"row {suspect_row}: the clock jumps back to its start, {suspect_text}; allowed: one recording in "
                    "a file. Import the parts one by one, or say that the rows are in no order (--unsorted)"
                )
            self._suspect = None
        if time_ns < self._high_ns:
            self.late_rows += 1
            passed_ns = self._high_ns - self._start_ns
            back_at_start = time_ns <= self._start_ns + _START_SHARE * passed_ns
            if back_at_start and self._high_ns - time_ns >= _MIN_JUMP_NS and not self._any_order:
                self._suspect = (row, text)
        self._high_ns = max(self._high_ns, time_ns)
        self._start_ns = min(self._start_ns, time_ns)


def check_unit(sorted_ns: Sequence[int], unit: str) -> None:
    """Raises InvalidInput when times in `unit` cannot be a serving trace, with the unit that would fit, if one does.

    Refused: a first time that is a present-day Unix time in another unit; ten requests or more at over 1,000 a second;
    ten or more with over ten minutes from one to the next, on average. Whoever names the unit is believed.
    """
    if unit == DATE:
        return
    first = sorted_ns[0] // NS_PER_UNIT[unit]
    epochs = [other for other, scale in NS_PER_UNIT.items() if _EPOCH_S[0] <= first * scale // _NS <= _EPOCH_S[1]]
    if epochs and unit not in epochs:
        raise InvalidInput(
            _unit_message(f"the first time, {first}, is a date of our years in {epochs[0]}", unit, epochs[0])
        )
    if len(sorted_ns) < _MIN_ROWS or sorted_ns[-1] == sorted_ns[0]:
        return
    gap_s = (sorted_ns[-1] - sorted_ns[0]) / _NS / (len(sorted_ns) - 1)
    if gap_s * _MAX_RATE_PER_S < 1:
        raise InvalidInput(_unit_message(f"{1 / gap_s:,.0f} requests a second on average", unit, _fitting(gap_s, unit)))
    if gap_s > _MAX_GAP_S:
        raise InvalidInput(_unit_message(f"{gap_s:,.0f} s from one request to the next", unit, _fitting(gap_s, unit)))


def _fitting(gap_s: float, unit: str) -> str:
    """The unit in which the mean gap is nearest to a second: a guess for the message, no more."""
    return min(NS_PER_UNIT, key=lambda other: abs(math.log(gap_s * NS_PER_UNIT[other] / NS_PER_UNIT[unit])))


def _unit_message(fact: str, unit: str, other: str) -> str:
    return (
        f"the times cannot be in {unit}: {fact}; allowed: at most {_MAX_RATE_PER_S:,.0f} requests a second and "
        f"{_MAX_GAP_S:g} s between two. Name the unit: --time-unit {other}, or --time-unit {unit} if it is right"
    )


@dataclass(frozen=True, slots=True)
class Tick:
    """How coarse a clock is: tick_ns nanoseconds, requests_per_tick requests per distinct time."""

    tick_ns: int
    requests_per_tick: float


def find_tick(sorted_ns: Sequence[int]) -> Tick | None:
    """The tick of quantised arrivals, or None.

    With all times multiples of 0.1 s or more the tick is their greatest common divisor; with a jittering tick, as in
    Mooncake's 2,999 to 3,001 ms, it is the median gap between distinct times.
    """
    gaps = sorted(later - earlier for earlier, later in pairwise(sorted_ns) if later > earlier)
    if not gaps:
        return None
    crowd = len(sorted_ns) / (len(gaps) + 1)
    divisor = 0
    for gap in gaps:
        divisor = math.gcd(divisor, gap)
        if divisor < _COARSE_NS:
            break
    if divisor >= _COARSE_NS:
        return Tick(divisor, crowd) if len(gaps) >= _MIN_ROWS or crowd >= _CROWD else None
    return Tick(gaps[len(gaps) // 2], crowd) if crowd >= _CROWD else None


def spread(sorted_ns: Sequence[int], tick: Tick, seed: int) -> Iterator[int]:
    """The times with each group of equal ones spread at random over its tick, in order, never past the next group."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    groups = [(time_ns, sum(1 for _ in group)) for time_ns, group in groupby(sorted_ns)]
    for place, (time_ns, count) in enumerate(groups):
        room_ns = tick.tick_ns
        if place + 1 < len(groups):
            room_ns = min(room_ns, groups[place + 1][0] - time_ns)
        yield from sorted(time_ns + rng.randrange(room_ns) for _ in range(count))
