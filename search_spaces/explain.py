"""How a failed pydantic check reads for the person who wrote the file: one line a problem.

Knows any pydantic model; the search space and the study file both use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ppas_core.naming import did_you_mean

_ORDER = ("extra_forbidden", "missing")
"""Errors that are told first: a mistyped key also leaves the right one missing."""
_LONGEST_VALUE = 60


def explain(
    error: ValidationError, model: type[BaseModel], variants: Mapping[str, type[BaseModel]] | None = None
) -> list[str]:
    """Every problem that a check of `model` found, the most telling first: the key, the value, what is allowed.

    variants: the models of a tagged union by tag; pydantic puts the tag into the path of a problem, where no user wrote
    it.
    """
    details = sorted(_causes(error), key=_rank)
    return [_explain_one(dict(detail), model, variants or {}) for detail in details]


def _explain_one(detail: Mapping[str, Any], model: type[BaseModel], variants: Mapping[str, type[BaseModel]]) -> str:
    path = [str(part) for part in detail["loc"] if part not in variants]
    if detail["type"] == "extra_forbidden":
        known = _keys_at(model, detail["loc"][:-1], variants)
        where = f" in {'.'.join(path[:-1])}" if len(path) > 1 else ""
        return f"unknown key {path[-1]!r}{where}{did_you_mean(path[-1], known)}"
    if detail["type"] == "missing":
        return f"key {'.'.join(path)!r} is missing"
    if detail["type"] == "told":
        return f"{'.'.join(path)}: {detail['msg']}" if path else str(detail["msg"])
    if detail["type"] in ("union_tag_not_found", "union_tag_invalid"):
        given = detail["input"].get("family") if isinstance(detail["input"], dict) else None
        what = f"family is {given!r}" if given is not None else "family is missing"
        return f"{'.'.join(path)}: {what}; allowed: {', '.join(variants)}"
    message = _plain(str(detail["msg"]))
    if isinstance(detail["input"], dict | list | tuple | BaseModel):
        return f"{'.'.join(path)}: {message}" if path else message
    value = repr(detail["input"])
    value = value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"
    return f"{'.'.join(path) or 'the whole'} is {value}; {message[:1].lower()}{message[1:]}"


def _causes(error: ValidationError) -> list[Any]:
    """The problems, but for a list that is too short only because its entries were refused."""
    found = error.errors(include_url=False)
    refused = {detail["loc"][:-1] for detail in found if detail["loc"]}
    return [detail for detail in found if not (detail["type"] == "too_short" and detail["loc"] in refused)]


def _plain(message: str) -> str:
    """Pydantic's words for what a user of YAML would call otherwise."""
    message = message.removeprefix("Value error, ")
    message = message.replace("Input should be a valid tuple", "a list is wanted, as in [a, b]")
    message = message.replace("Input should be a valid dictionary", "a mapping is wanted, as in {key: value}")
    return message.replace("Tuple should have at least 1 item after validation, not 0", "give at least one")


def _rank(detail: Any) -> int:
    kind = detail["type"]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _keys_at(model: type[BaseModel], path: Sequence[str | int], variants: Mapping[str, type[BaseModel]]) -> list[str]:
    """The keys of the model that stands at `path` inside `model`."""
    here = model
    for part in path:
        field = here.model_fields.get(str(part))
        inner = variants.get(str(part)) or (_model_in(field.annotation) if field is not None else None)
        here = inner if inner is not None else here
    return [field.alias or name for name, field in here.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)
