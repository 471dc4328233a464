"""What is written as JSON is JSON, and what is read is bounded."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from ppas_core.plain_json import MAX_DEPTH, dump_json, load_json, require_notes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


@given(VALUES)
def test_any_values_are_written_as_strict_json_and_come_back_with_null_for_what_is_not_finite(value: Any) -> None:
    found = json.loads(dump_json(value), parse_constant=_refuse)

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        return b is None if isinstance(a, float) and not math.isfinite(a) else bool(a == b)

    assert same(value, found)


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 5000, "{", ""], ids=["deep", "long number", "cut", "empty"])
def test_absurd_json_is_a_value_error_and_nothing_worse(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_json(text)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("notes", "word"),
    [
        ({"x": float("nan")}, "notes.x is nan"),
        ({"x": [1.0, float("-inf")]}, "notes.x is -inf"),
        ({"x": "\ud800"}, "half a character"),
        ({"\udc80": 1}, "half a character"),
        ({1: 2}, "has the key 1"),
        ({"x": 10**400}, "beyond 2\\*\\*64"),
        ({"x": object()}, "plain JSON values"),
        (_nested(MAX_DEPTH + 1), "nests deeper than 32 levels"),
        (_nested(100_000), "nests deeper"),
    ],
    ids=["nan", "inf", "surrogate", "surrogate key", "number as key", "long number", "object", "deep", "very deep"],
)
def test_notes_that_some_reader_would_choke_on_are_refused(notes: Any, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        require_notes(notes, "notes")


@given(VALUES)
def test_notes_that_are_accepted_can_be_written(notes: Any) -> None:
    try:
        require_notes({"notes": notes}, "notes")
    except InvalidInput:
        return
    assert load_json(dump_json({"notes": notes}).encode()) == {"notes": notes}


def test_notes_at_the_deepest_allowed_are_accepted() -> None:
    require_notes(_nested(MAX_DEPTH), "notes")
