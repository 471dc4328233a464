"""How a failed pydantic check reads as one line for the person who wrote the file.

Knows any pydantic model; the search space and the study file both use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ppas_core.naming import did_you_mean

_ORDER = ("extra_forbidden", "missing")
"""Errors that are told first: a mistyped key also leaves the right one missing."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The most telling failure of a check of `model`: the key, the value, what is allowed."""
    first = min(error.errors(include_url=False), key=_rank)
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known = _keys_at(model, first["loc"][:-1])
        where = f" in {'.'.join(path[:-1])}" if len(path) > 1 else ""
        return f"unknown key {path[-1]!r}{where}{did_you_mean(path[-1], known)}"
    if first["type"] == "missing":
        return f"key {'.'.join(path)!r} is missing"
    if first["type"] == "told":
        return f"{'.'.join(path)}: {first['msg']}" if path else first["msg"]
    message = first["msg"].removeprefix("Value error, ")
    if isinstance(first["input"], dict | list):
        return f"{'.'.join(path) or 'the whole'}: {message}"
    return f"{'.'.join(path) or 'the whole'} is {first['input']!r}; {message[:1].lower()}{message[1:]}"


def _rank(detail: Any) -> int:
    kind = detail["type"]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys of the model that stands at `path` inside `model`."""
    here = model
    for part in path:
        field = here.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field is not None else None
        here = inner if inner is not None else here
    return [field.alias or name for name, field in here.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)
