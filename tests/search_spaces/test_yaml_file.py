"""YAML of a user is read into plain values, or refused with one clear message, whatever it holds."""

import contextlib
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.serve import check_config
from autotune.settings import parse_setting
from autotune.spec import load_spec
from ppas_core.errors import InvalidInput
from search_spaces.space import load_space
from search_spaces.yaml_file import MAX_BYTES, MAX_VALUES, parse_yaml, read_yaml

BOMB = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
REFUSED = {
    "double key": ("a: 1\nb: 2\na: 3", "line 3: the key 'a' stands there twice (first in line 1)"),
    "double key below": ("a:\n  b: 1\n  b: 1", "line 3: the key 'b'"),
    "double key in other words": ("1: x\n0x1: y", "line 2: the key '0x1'"),
    "alias bomb": (BOMB, f"holds more than {MAX_VALUES} values"),
    "merge bomb": (MERGE_BOMB, f"holds more than {MAX_VALUES} values"),
    "deep": ("[" * 3000 + "]" * 3000, "nests too deeply"),
    "rather deep": ("[" * 80 + "]" * 80, "nests deeper than 64 levels"),
    "deep by aliases": (
        "a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40,
        "nests deeper than 64 levels with its aliases",
    ),
    "holds itself": ("a: &a [*a]", "holds itself"),
    "long number": ("a: " + "1" * 5000, "line 1: a number of 5000 characters"),
    "long sexagesimal": ("a: 1" + ":59" * 5000, "line 1: a number of"),
    "bad date": ("b: 1\na: 2024-13-45", "line 2: month must be"),
    "half a character": ('a: "\\ud800"', "line 1: '\\ud800' holds half a character"),
    "zero byte": ("a: \0", "is not YAML"),
    "set": ("a: !!set {x, y}", "line 1: the tag 'tag:yaml.org,2002:set'"),
    "binary": ("a: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary'"),
    "binary as key": ("!!binary aGk=: 1", "the tag 'tag:yaml.org,2002:binary'"),
    "object": ("!!python/object:os.x {}", "is not YAML"),
    "list as key": ("? [1]\n: 2", "is not YAML"),
    "cut": ("a: [", "is not YAML"),
    "two documents": ("a: 1\n---\na: 2", "is not YAML"),
    "too many values": ("[" + "1," * (MAX_VALUES + 1) + "]", "holds more than"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_absurd_yaml_is_refused_with_the_place(name: str) -> None:
    text, word = REFUSED[name]
    with pytest.raises(InvalidInput) as found:
        parse_yaml(text, "x.yaml")
    assert str(found.value).startswith("x.yaml: ")
    assert word in str(found.value)
    assert len(str(found.value)) < 500


def test_aliases_and_merges_of_ordinary_size_are_read() -> None:
    text = "base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  b: 3\nagain: [*base, *base]\n"
    assert parse_yaml(text, "x") == {
        "base": {"a": 1, "b": 2}, "more": {"a": 1, "b": 3}, "again": [{"a": 1, "b": 2}] * 2,
    }  # fmt: skip


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were_written(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value), "x") == value


@given(st.text("ab01:-[]{}&*!<\"'#|>%@`,?\n \\ud", max_size=60))
def test_any_text_gives_values_or_a_refusal(text: str) -> None:
    with contextlib.suppress(InvalidInput):
        parse_yaml(text, "x")


@pytest.mark.parametrize("load", [load_spec, load_space, lambda path: parse_setting(str(path)), check_config])
@pytest.mark.parametrize(
    "content", [b"a: 1\na: 2", b"a: " + b"1" * 5000, b"[" * 3000, b"\xff\xfe", BOMB.encode(), b"a" * (MAX_BYTES + 1)]
)
def test_every_reader_of_yaml_refuses_it_by_name(tmp_path: Path, load: object, content: bytes) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"x\.yaml"):
        load(path)  # type: ignore[operator]


@pytest.mark.parametrize("load", [load_spec, load_space, lambda path: parse_setting(str(path)), check_config])
@pytest.mark.parametrize("name", ["a\0.yaml", "\ud800.yaml", "x" * 300 + ".yaml", "missing.yaml"])
def test_a_name_that_no_file_can_have_is_refused(load: object, name: str) -> None:
    with pytest.raises(InvalidInput):
        load(Path(name))  # type: ignore[operator]


def test_a_pipe_that_never_ends_is_not_read_to_the_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    if (writer := os.fork()) == 0:
        try:
            with pipe.open("wb") as file:
                while True:
                    file.write(b"#" * 65536)
        finally:
            os._exit(0)
    with pytest.raises(InvalidInput, match="larger than"):
        read_yaml(pipe)
    os.waitpid(writer, 0)
