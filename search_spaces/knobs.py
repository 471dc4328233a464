"""Which whole numbers a knob may take, and how an optimiser sees them: as a point on a log scale.

The encoding is log2 of the value with half a bin of room at either end, so that the end values are as likely as their
neighbours. Decoding takes the nearest allowed value on that scale. Knows nothing of what the knobs mean.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

LARGEST = 2**24
"""The largest value of any knob, in tokens or in requests."""


def refused(message: str) -> PydanticCustomError:
    """A failed check whose message already reads as it should."""
    return PydanticCustomError("told", "{message}", {"message": message})


class Interval(BaseModel):
    """All whole numbers from `low` to `high`. A single number in its place fixes the knob."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    low: int = Field(ge=1, le=LARGEST, description="Smallest value.")
    high: int = Field(ge=1, le=LARGEST, description="Largest value.")

    @model_validator(mode="before")
    @classmethod
    def _number_fixes(cls, data: Any) -> Any:
        if isinstance(data, int) and not isinstance(data, bool):
            return {"low": data, "high": data}
        if isinstance(data, Mapping):
            # YAML 1.1 reads the bare key `off` as the truth value false.
            return {"off" if key is False else key: value for key, value in data.items()}
        if isinstance(data, cls):
            return data
        raise refused(f"{data!r} is no range; allowed: a whole number, or low and high")

    @model_validator(mode="after")
    def _has_values(self) -> Self:
        if self.low > self.high:
            raise refused(f"low is {self.low}, above high, which is {self.high}; swap them")
        return self

    @property
    def values(self) -> Sequence[int]:
        """The allowed values, ascending; at least one."""
        return range(self.low, self.high + 1)

    @property
    def is_free(self) -> bool:
        """Whether there is a choice."""
        return len(self.values) > 1

    def plain(self) -> int | dict[str, Any]:
        """The knob as a person writes it."""
        if self.low == self.high:
            return self.low
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


class Range(Interval):
    """The whole numbers from `low` to `high` in steps, or the powers of two between them."""

    step: int = Field(default=1, ge=1, le=LARGEST, description="Distance between values, counted from low.")
    powers: bool = Field(default=False, description="true: only powers of two (instead of step).")

    @model_validator(mode="after")
    def _lands_on_high(self) -> Self:
        if self.powers:
            if "step" in self.model_fields_set:
                raise refused("powers and step exclude each other; keep one")
            if not self.values:
                raise refused(f"powers: there is no power of two from {self.low} to {self.high}; widen the range")
        elif past := (self.high - self.low) % self.step:
            raise refused(
                f"high is {self.high}, which steps of {self.step} from {self.low} do not reach; "
                f"allowed nearby: {self.high - past} or {self.high - past + self.step}"
            )
        return self

    @property
    def values(self) -> Sequence[int]:
        """The allowed values, ascending."""
        if self.powers:
            return tuple(2**e for e in range(LARGEST.bit_length()) if self.low <= 2**e <= self.high)
        return range(self.low, self.high + 1, self.step)


class ThresholdRange(Range):
    """A range that may also be off."""

    off: bool = Field(default=False, description="true: off (plain P-PAS) is among the choices.")

    @property
    def is_free(self) -> bool:
        """Whether there is a choice."""
        return self.off or super().is_free

    def plain(self) -> int | dict[str, Any]:
        """The knob as a person writes it."""
        return (
            {"low": self.low, "high": self.high, "off": True} if self.off and self.low == self.high else super().plain()
        )


def log_edges(values: Sequence[int]) -> tuple[float, float]:
    """The encoded interval of ascending `values`: half a bin beyond either end; a single value has one octave."""
    first, last = log2(values[0]), log2(values[-1])
    if len(values) == 1:
        return first - 0.5, last + 0.5
    return first - (log2(values[1]) - first) / 2, last + (last - log2(values[-2])) / 2


def nearest_on_log_scale(values: Sequence[int], encoded: float) -> int:
    """The one of ascending `values` whose log2 is nearest to `encoded`; the smaller one when two are equally near."""
    target = 2.0 ** min(max(encoded, 0.0), log2(LARGEST) + 1)
    at = bisect_left(values, target)
    around = values[max(at - 1, 0) : at + 1]
    return min(around, key=lambda value: abs(log2(value) - encoded))


def thin(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of ascending `values`, evenly on the log scale and with both ends; the middle one for 1."""
    if count >= len(values):
        return list(values)
    first, last = log2(values[0]), log2(values[-1])
    if count == 1:
        return [nearest_on_log_scale(values, (first + last) / 2)]
    marks = (first + (last - first) * i / (count - 1) for i in range(count))
    return sorted({nearest_on_log_scale(values, mark) for mark in marks})
