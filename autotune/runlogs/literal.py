"""How a Python dict literal from a log is read without running any of it."""

from __future__ import annotations

import ast
import math
import warnings
from typing import Final

from ppas_core.errors import InvalidInput

MAX_CHARACTERS: Final = 2**16
"""Longest dict literal; one of a published run has about a thousand characters."""
_MAX_DIGITS: Final = 30
_SHOWN: Final = 60

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
"""What a literal may hold; a tuple is read as a list."""

_WORDS: Final[dict[str, Value]] = {
    "nan": math.nan, "NaN": math.nan, "inf": math.inf, "Infinity": math.inf, "true": True, "false": False, "null": None,
}  # fmt: skip
_WRAPPERS: Final = frozenset({"float64", "float32", "float16", "int64", "int32", "float", "int"})
"""Names of number types that a printed number may stand in, as in `np.float64(0.5)`."""


def parse_dict(text: str, where: str) -> dict[str, Value]:
    """The dict that `text` writes as a Python (or JSON) literal: text keys; numbers, text, words, lists, dicts.

    Nothing is evaluated. Raises InvalidInput, beginning with `where`, for anything else.
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(f"{where}: the result has {len(text)} characters; allowed: at most {MAX_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in a text
            tree = ast.parse(text, mode="eval")
        found = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        reason = str(error).partition("(<unknown>")[0].strip() or "it nests too deeply"
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        raise InvalidInput(f"{where}: is no dict of plain values ({reason}): {shown}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{where}: is a {type(found).__name__}; a result is a dict")
    return found


def _value(node: ast.expr) -> Value:
    """The value of one node. Raises ValueError with the reason for a node that is no plain value."""
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.Dict):
        return _dict(node)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part) for part in node.elts]
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _signed(node)
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        inner = _value(node.args[0])
        if name in _WRAPPERS and isinstance(inner, int | float) and not isinstance(inner, bool):
            return inner
    raise ValueError(f"{type(node).__name__} is not allowed")


def _constant(value: object) -> Value:
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and abs(value) < 10**_MAX_DIGITS:
        return value
    shown = f"a whole number of more than {_MAX_DIGITS} digits" if isinstance(value, int) else type(value).__name__
    raise ValueError(f"{shown} is not allowed")


def _dict(node: ast.Dict) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = _value(key) if key is not None else None
        if not isinstance(name, str):
            raise ValueError("a key that is no text is not allowed")
        if name in found:
            raise ValueError(f"the key {name[:_SHOWN]!r} stands twice")
        found[name] = _value(value)
    return found


def _signed(node: ast.UnaryOp) -> Value:
    operand = node.operand
    inner = _WORDS.get(operand.id) if isinstance(operand, ast.Name) else None
    inner = _constant(operand.value) if isinstance(operand, ast.Constant) else inner
    if not isinstance(inner, int | float) or isinstance(inner, bool):
        raise ValueError("a sign before something that is no number is not allowed")
    return -inner if isinstance(node.op, ast.USub) else inner
