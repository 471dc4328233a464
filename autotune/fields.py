"""What the values of a study file may be: the kinds of numbers, and the base of its models."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_truth_value(value: object) -> object:
    """Refuses true and false, which pydantic would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


Float = Annotated[float, BeforeValidator(_no_truth_value)]
Int = Annotated[int, BeforeValidator(_no_truth_value)]
Rate = Annotated[Float, Field(gt=0, le=1e5)]
RateFactor = Annotated[Float, Field(gt=0.05, le=20)]
Seed = Annotated[Int, Field(ge=0, lt=2**31)]
Length = Annotated[Int, Field(ge=1, le=10_000_000)]


class Model(BaseModel):
    """A part of a study file: frozen, with the keys that it names and no others, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
