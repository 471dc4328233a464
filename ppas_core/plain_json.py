"""How JSON is read and written so that any reader accepts it, and no file can harm: finite numbers, bounded depth."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from ppas_core.errors import InvalidInput

MAX_DEPTH: Final = 32
"""How deep notes (provenance and the like) may nest."""
_MAX_INT: Final = 2**64


def dump_json(data: Any, *, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """`data` as JSON; a number that is not finite becomes null, since JSON has no word for it.

    Raises ValueError and TypeError for what is no JSON.
    """
    try:
        return json.dumps(data, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        return json.dumps(finite(data), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def finite(data: Any) -> Any:
    """`data` with None for every float that is not finite; tuples become lists."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data


def load_json(text: str | bytes) -> Any:
    """Parsed JSON. Raises ValueError with the reason, also where nesting or a number is absurd."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def require_text(value: str, where: str) -> None:
    """Raises InvalidInput when `value` holds half of a character (a lone surrogate), which no file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{where} is {value!r}; it holds half a character (a lone surrogate): remove it") from None


def require_notes(notes: object, where: str) -> None:
    """Raises InvalidInput, naming the place, unless `notes` are plain JSON that every reader accepts.

    That is: texts, booleans, null, numbers that are finite (whole ones below 2**64), lists, and objects whose keys
    are text, nested at most MAX_DEPTH deep.
    """
    pending: list[tuple[object, str, int]] = [(notes, where, 0)]
    while pending:
        value, place, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{where} nests deeper than {MAX_DEPTH} levels; flatten it")
        if isinstance(value, str):
            require_text(value, place)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                if not isinstance(key, str):
                    raise InvalidInput(f"{place} has the key {key!r}; allowed: text")
                require_text(key, f"a key of {place}")
                pending.append((part, f"{place}.{key}"[:120], depth + 1))
        elif isinstance(value, list | tuple):
            pending += [(part, place, depth + 1) for part in value]
        elif isinstance(value, int):
            if abs(value) >= _MAX_INT:
                raise InvalidInput(f"{place} is a whole number beyond 2**64; give it as text")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise InvalidInput(f"{place} is {value!r}; allowed: a finite number, or null")
        elif value is not None:
            raise InvalidInput(f"{place} is {value!r}; allowed: plain JSON values")
