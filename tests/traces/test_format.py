"""Trace files: what is written is read back, and what is wrong is named."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces.format import Trace, TraceRequest, read_trace, write_trace

LENGTHS = st.integers(1, 10**6)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    arrivals = sorted(draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=20)))
    requests = []
    for arrival_s in arrivals:
        prompt = draw(st.integers(1, 200))
        blocks = draw(st.booleans())
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                prompt_tokens=prompt,
                output_tokens=draw(LENGTHS),
                block_hashes=tuple(range(-(-prompt // 16))) if blocks else (),
                session=draw(st.none() | st.text(max_size=5)),
                phase=draw(st.none() | st.integers(0, 9)),
            )
        )
    return Trace(name=draw(st.text(max_size=9)), requests=tuple(requests), regime="λ=1", seed=3, block_size=16)


@given(traces(), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_a_trace_is_read_back_as_written_and_written_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, name: str
) -> None:
    first, second = (tmp_path_factory.mktemp("traces") / name for _ in range(2))
    write_trace(trace, first)
    write_trace(read_trace(first), second)
    assert read_trace(first) == trace
    assert first.read_bytes() == second.read_bytes()


def _file(tmp_path: Path, header: dict[str, object] | None = None, lines: list[str] | None = None) -> Path:
    """A good file of two requests, with parts of the header or the request lines replaced."""
    path = tmp_path / "trace.jsonl"
    write_trace(Trace(name="t", requests=(TraceRequest(0.0, 10, 2), TraceRequest(1.5, 20, 3))), path)
    first, *rest = path.read_text().splitlines()
    merged = {key: value for key, value in {**json.loads(first), **(header or {})}.items() if value != "absent"}
    path.write_text("\n".join([json.dumps(merged), *(rest if lines is None else lines)]))
    return path


GOOD = '{"arrival_s":0.0,"prompt_tokens":10,"output_tokens":2}'


@pytest.mark.parametrize(
    ("header", "lines", "word"),
    [
        ({"format": "other"}, None, "line 1 is not a trace header"),
        ({"version": 3}, None, "trace version 3; this release reads versions 1 to 2; a newer ppas wrote it: update"),
        ({"digest": "absent"}, None, "lacks 'digest'"),
        ({"extra": 1}, None, "unknown key 'extra'"),
        ({"seed": "x"}, None, "seed is 'x'"),
        ({"num_requests": True}, None, "num_requests is True"),
        ({"num_requests": 3}, None, "promises 3 requests, the file has 2; is it cut?"),
        ({"num_requests": 1}, [GOOD], "the file was changed"),
        ({}, ["nonsense"], "line 2: is not JSON: 'nonsense'"),
        ({}, ["[1]"], "line 2: is not a JSON object"),
        ({}, ['{"arrival_s":0}'], "line 2: 'prompt_tokens' is missing"),
        ({}, [GOOD[:-1] + ',"user":1}'], "line 2: unknown key 'user'"),
        ({}, [GOOD, GOOD.replace("10", "0")], "line 3: prompt_tokens is 0"),
        ({}, [GOOD.replace("10", "1.5")], "prompt_tokens is 1.5"),
        ({}, [GOOD.replace("10", "true")], "prompt_tokens is True"),
        ({}, [GOOD.replace("0.0", "NaN")], "arrival_s is nan"),
        ({}, [GOOD.replace("0.0", "Infinity")], "arrival_s is inf"),
        ({}, [GOOD.replace("0.0", "-1")], "arrival_s is -1"),
        ({}, [GOOD.replace("0.0", '"now"')], "arrival_s is 'now'"),
        ({}, [GOOD[:-1] + ',"block_hashes":7}'], "block_hashes is not a list"),
        ({}, [GOOD[:-1] + ',"block_hashes":["a"]}'], "other than whole numbers"),
        ({"num_requests": 1}, [GOOD[:-1] + ',"block_hashes":[1]}'], "block_size is None"),
        ({"num_requests": 1, "block_size": 4}, [GOOD[:-1] + ',"block_hashes":[1]}'], "blocks of 4 need 3"),
        ({"num_requests": 2}, [GOOD.replace("0.0", "2"), GOOD], "request 1: arrival_s 0.0 is before the previous 2"),
        ({"num_requests": 0}, [], "has no requests"),
        (
            {},
            [GOOD.replace("10", "10000001")],
            "prompt_tokens is 10000001; allowed: a whole number of at least 1, at most",
        ),
        ({}, [GOOD.replace("10", str(2**63))], "prompt_tokens is 9223372036854775808"),
        ({}, [GOOD.replace("10", "1" * 5000)], "line 2: is not JSON"),
        ({}, [GOOD.replace("0.0", "1e11")], "arrival_s is 100000000000.0"),
        ({}, [GOOD.replace("0.0", "1" + "0" * 400)], "arrival_s is 1000"),
        ({}, [GOOD[:-1] + ',"session":"\\ud800"}'], "session is '\\ud800'; it holds half a character"),
        ({}, [GOOD[:-1] + ',"phase":9999999999999999999999}'], "phase is 9999999999999999999999"),
        ({}, ["[" * 100_000], "line 2: is not JSON"),
        ({"name": "\ud800"}, None, "a trace's name is '\\ud800'"),
        ({"regime": "\udc80x"}, None, "regime is '\\udc80x'"),
        ({"seed": 10**40}, None, "seed is 1000"),
        ({"block_size": -(10**40)}, None, "block_size is -1000"),
        ({"provenance": {"x": [float("nan")]}}, None, "provenance.x is nan"),
        ({"provenance": json.loads('{"a":' * 40 + "1" + "}" * 40)}, None, "provenance nests deeper than 32 levels"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_the_value(
    tmp_path: Path, header: dict[str, object], lines: list[str] | None, word: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_trace(_file(tmp_path, header, lines))
    assert word in str(caught.value)
    assert "trace.jsonl" in str(caught.value)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b"x" * 1000)[:20])
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path, word in (
        (cut, "cannot be read"),
        (binary, "is not UTF-8"),
        (empty, "is empty"),
        (tmp_path / "no.jsonl", "no such file"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(InvalidInput, match=word):
            read_trace(path)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_trace(Trace(name="t", requests=(TraceRequest(0.0, 1, 1),)), tmp_path / "taken")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
