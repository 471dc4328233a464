"""How a named value of a record is taken: numbers, lengths and text under any of the names that a log may use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from autotune.runlogs.literal import Value
from autotune.runlogs.model import METRICS
from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean
from traces.format import MAX_TOKENS

LARGEST: Final = 1e9
"""Largest figure of a run, in seconds or requests."""
_SHOWN: Final = 60

METRIC_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(
        form
        for stat in (("avg", "mean") if name.startswith("mean") else ("p95",))
        for middle in (("latency", "e2e_latency", "e2e") if "latency" in name else (name.split("_")[1],))
        for form in (f"{stat}_{middle}", f"{middle}_{stat}")
    )
    if name != "makespan_s"
    else ("makespan",)
    for name in METRICS
}
"""Names of each figure in logs and tables, without the unit; see `Fields.seconds`."""


class Fields:
    """One record by name. Every error is an InvalidInput that begins with `where`."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        self.where = where
        self._values = {
            name.strip().lower().replace(" ", "_").replace("-", "_"): value for name, value in values.items()
        }

    def names(self) -> tuple[str, ...]:
        """The names of the record, in lower case with underscores."""
        return tuple(self._values)

    def has(self, *names: str) -> bool:
        """Whether any of `names` has a value."""
        return self._find(names) is not None

    def number(self, *names: str) -> float | None:
        """The number under the first of `names` that has one; None where none has, and for NaN."""
        found = self._find(names)
        if found is None:
            return None
        name, value = found
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self._error(name, value, "a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(name, value, "a number")
        if math.isnan(value):
            return None
        if not abs(value) <= LARGEST:
            raise self._error(name, value, f"a finite number of at most {LARGEST:g}")
        return float(value)

    def seconds(self, *names: str) -> float | None:
        """A time of at least 0 under one of `names`, bare or with `_s`, `_sec`, `_seconds`, or in `_ms`; None if absent."""
        for suffix, factor in (("", 1.0), ("_s", 1.0), ("_sec", 1.0), ("_seconds", 1.0), ("_ms", 1e-3)):
            value = self.number(*(name + suffix for name in names))
            if value is not None:
                if value < 0:
                    raise self._error(names[0], value, "at least 0 seconds")
                return value * factor
        return None

    def whole(self, *names: str, least: int = 0, most: int = 2**40) -> int | None:
        """The whole number under the first of `names` that has one; None where none has."""
        value = self.number(*names)
        if value is None:
            return None
        if value != int(value) or not least <= value <= most:
            raise self._error(names[0], value, f"a whole number from {least} to {most}")
        return int(value)

    def text(self, *names: str) -> str:
        """The text under the first of `names` that has one, numbers as written; "" where none has."""
        found = self._find(names)
        if found is None:
            return ""
        if isinstance(found[1], list | dict):
            raise self._error(found[0], found[1], "a text")
        return str(found[1]).strip()

    def lengths(self, *names: str) -> tuple[int, ...]:
        """Token counts: a number, a list of them, or numbers in a text; () where there are none or only words."""
        found = self._find(names)
        if found is None:
            return ()
        name, value = found
        parts = value if isinstance(value, list) else re.split(r"[,;\s]+", str(value).strip("[]() "))
        numbers = []
        for part in parts:
            try:
                number = float(part) if isinstance(part, int | float | str) else math.nan
            except ValueError:
                return ()  # a word, such as `mixed`
            if not (number == math.floor(number) and 1 <= number <= MAX_TOKENS):  # false for NaN as well
                raise self._error(name, value, f"token counts from 1 to {MAX_TOKENS}")
            numbers.append(int(number))
        return tuple(dict.fromkeys(numbers))

    def required_text(self, *names: str) -> str:
        """As `text`; raises InvalidInput where it is absent, with the nearest name that is there."""
        if text := self.text(*names):
            return text
        raise InvalidInput(f"{self.where}: has no {names[0]!r}{did_you_mean(names[0], self.names())[:400]}")

    def metrics(self) -> dict[str, float]:
        """The figures of a run that are there, in seconds, by name of METRICS."""
        found = {name: self.seconds(*aliases) for name, aliases in METRIC_NAMES.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _find(self, names: tuple[str, ...]) -> tuple[str, Value] | None:
        for name in names:
            value = self._values.get(name)
            if value is not None and value != "":
                return name, value
        return None

    def _error(self, name: str, value: object, allowed: str) -> InvalidInput:
        return InvalidInput(f"{self.where}: {name} is {shown(value)}; allowed: {allowed}")


def shown(value: object) -> str:
    """`value` as messages show it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
