"""How one value of a foreign row becomes a length, a time, a session or block ids, or is refused by name.

CSV gives text, JSON gives int, Decimal, bool, list, … The errors carry the column and the value; the caller adds the
file and the row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from ppas_core.errors import InvalidInput
from traces.format import BlockHashes

MAX_TOKENS: Final = 100_000_000
"""Longest believable prompt or output; far beyond any model's context."""
NS_PER_UNIT: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
DATE: Final = "date"
TIME_UNITS: Final = (*NS_PER_UNIT, DATE)
_MAX_NS: Final = 2**63 - 1
_WHOLE = re.compile(r"([0-9]{1,20})(?:\.0*)?")
_NUMBER = re.compile(r"[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?")
_DATE = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))? ?(Z|[+-][0-9]{2}:?[0-9]{2})?"
)


def shown(value: object) -> str:
    """`value` as an error message shows it: short, on one line."""
    text = str(value) if isinstance(value, Decimal) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def refused(name: str, value: object, allowed: str) -> InvalidInput:
    """The error for a value that cannot be used."""
    if value is None or value == "":
        return InvalidInput(f"{name} is empty; allowed: {allowed}. Fill it in or delete the row")
    return InvalidInput(f"{name} is {shown(value)}; allowed: {allowed}. Correct it or delete the row")


def tokens(name: str, value: object, least: int) -> int:
    """A length in tokens, `least` to MAX_TOKENS; 374.0 counts as whole, 374.5, true and "many" do not."""
    whole: int | None = None
    if type(value) is int:
        whole = value
    elif isinstance(value, str):
        if match := _WHOLE.fullmatch(value.strip()):
            whole = int(match[1])
    elif isinstance(value, Decimal) and value.is_finite() and -40 < value.adjusted() < 20 and value == int(value):
        whole = int(value)
    if whole is None or not least <= whole <= MAX_TOKENS:
        raise refused(name, value, f"a whole number of tokens, {least} to {MAX_TOKENS}")
    return whole


def block_ids(name: str, value: object) -> Sequence[int]:
    """Block ids, packed; none at all for an absent or empty list."""
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise refused(name, value, "a list of whole numbers")
    if set(map(type, value)) != {int}:
        place, wrong = next((place, item) for place, item in enumerate(value) if type(item) is not int)
        raise refused(f"{name}[{place}]", wrong, "a whole number")
    try:
        return BlockHashes(value)
    except OverflowError:
        return tuple(value)


def session_id(name: str, value: object) -> str | None:
    """A conversation's name; a number is one too. None when there is none."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise refused(name, value, "text or a whole number")


class TimeReader:
    """Reads the arrival times of one file, all in one unit, as whole nanoseconds.

    unit: one of TIME_UNITS; a date has a zone in every row or in none. Digits below a nanosecond are rounded away in
    numbers and refused in dates.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._scale = NS_PER_UNIT.get(unit, 0)
        self._zoned: bool | None = None

    def read_ns(self, name: str, value: object) -> int:
        """Nanoseconds from the file's zero, or from 1970 for a date. Raises InvalidInput."""
        if self.unit == DATE:
            return self._date_ns(name, value)
        time_ns = self._number_ns(name, value)
        if not 0 <= time_ns <= _MAX_NS:
            raise refused(name, value, f"0 to {_MAX_NS // self._scale} {self.unit} (--time-unit names another unit)")
        return time_ns

    def text(self, time_ns: int) -> str:
        """A time as the file would write it, without loss."""
        if self.unit == DATE:
            seconds, rest = divmod(time_ns, 10**9)
            moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
            return f"{moment}.{rest:09d}" + ("+00:00" if self._zoned else "")
        return f"{(Decimal(time_ns) / self._scale).normalize():f} {self.unit}"

    def _number_ns(self, name: str, value: object) -> int:
        if type(value) is int:
            return value * self._scale
        number: Decimal | None = None
        if isinstance(value, Decimal):
            number = value
        elif isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            number = Decimal(value.strip())
        if number is not None and number == 0:
            return 0  # before the digits are used: 0E+999999999 is a number, too
        if number is None or not number.is_finite() or not -40 < number.adjusted() < 20:
            raise refused(name, value, f"a finite number of {self.unit}, at least 0")
        return round(number * self._scale)

    def _date_ns(self, name: str, value: object) -> int:
        match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise refused(name, value, "a date such as 2023-11-16 18:15:46.6805900, with or without a zone")
        *parts, fraction, zone = match.groups()
        if fraction and len(fraction) > 9:
            raise refused(name, value, "at most nine digits after the seconds' point")
        if self._zoned is None:
            self._zoned = zone is not None
        if self._zoned != (zone is not None):
            expected = "a zone, as the rows above have one" if self._zoned else "no zone, as the rows above have none"
            raise refused(name, value, expected)
        try:
            moment = datetime(*(int(part) for part in parts), tzinfo=UTC)  # type: ignore[misc, arg-type]
        except ValueError:
            raise refused(name, value, "a date that the calendar has") from None
        time_ns = (int(moment.timestamp()) - _zone_s(zone)) * 10**9 + int((fraction or "0").ljust(9, "0"))
        if not 0 <= time_ns <= _MAX_NS:
            raise refused(name, value, "a date from 1970 to 2262")
        return time_ns


def _zone_s(zone: str | None) -> int:
    """Seconds that `zone` is ahead of UTC."""
    if zone is None or zone == "Z":
        return 0
    digits = zone.replace(":", "")
    seconds = int(digits[1:3]) * 3600 + int(digits[3:5]) * 60
    return -seconds if digits[0] == "-" else seconds
