"""Sessions: turns that wait for answers, what their prompts share, and how they keep through file and shape."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces import shape
from traces.format import OPEN_LOOP, SESSIONS, Trace, TraceRequest, read_trace, write_trace
from traces.prompts import Vocabulary, prompt_ids
from traces.session import Thinking, predecessors, to_open_loop, to_sessions

# (arrival, prompt, output, session)
CHAT = [(0.0, 100, 10, "a"), (1.0, 50, 5, None), (2.0, 700, 20, "b"), (10.0, 1200, 10, "a"), (11.0, 90, 3, "b"),
        (30.0, 1500, 10, "a")]  # fmt: skip


def make(rows: list[tuple[float, int, int, str | None]]) -> Trace:
    return Trace("chat", tuple(TraceRequest(time_s, prompt, out, session=who) for time_s, prompt, out, who in rows))


def prompt(trace: Trace, index: int) -> list[int]:
    request = trace.requests[index]
    return prompt_ids(
        trace.digest, index, request.prompt_tokens, Vocabulary(1000),
        block_hashes=request.block_hashes, block_size=trace.block_size,
    )  # fmt: skip


def test_a_turn_thinks_for_the_gap_less_what_the_answer_is_taken_to_have_lasted() -> None:
    found = to_sessions(make(CHAT), Thinking(first_token_s=1.0, token_s=0.5))
    assert [request.think_time_s for request in found.requests] == [None, None, None, 4.0, 0.0, 14.0]
    assert [request.arrival_s for request in found.requests] == [row[0] for row in CHAT]
    assert predecessors(found) == [None, None, None, 0, 2, 3]
    assert found.provenance["shape"][-1]["waiting_turns"] == 3
    assert found.provenance["shape"][-1]["gaps_shorter_than_the_answer"] == 1


def test_one_think_time_may_stand_for_all_and_open_loop_is_the_way_back() -> None:
    found = to_sessions(make(CHAT), Thinking(think_s=2.5))
    assert {request.think_time_s for request in found.requests} == {None, 2.5}
    assert (make(CHAT).mode, found.mode, to_open_loop(found).mode) == (OPEN_LOOP, SESSIONS, OPEN_LOOP)
    assert predecessors(to_open_loop(found)) == [None] * 6


def test_a_turn_begins_with_the_whole_prompt_of_the_turn_before_where_it_has_room_for_it_and_its_answer() -> None:
    found = to_sessions(make(CHAT), Thinking())
    prompts = [prompt(found, index) for index in range(len(CHAT))]
    assert [len(ids) for ids in prompts] == [row[1] for row in CHAT]
    assert prompts[3][:100] == prompts[0]
    assert prompts[5][:1200] == prompts[3]
    assert prompts[4][:20] != prompts[2][:20]  # too short to hold what was said: another text
    assert prompts[2][:20] != prompts[0][:20] != prompts[1][:20]


def test_recorded_block_ids_are_kept_as_they_are() -> None:
    trace = Trace(
        "hashed",
        (TraceRequest(0.0, 20, 2, (7, 8), "a"), TraceRequest(5.0, 40, 2, (7, 9, 10), "a")),
        block_size=16,
    )
    found = to_sessions(trace, Thinking())
    assert [request.block_hashes for request in found.requests] == [(7, 8), (7, 9, 10)]
    assert found.block_size == 16


@pytest.mark.parametrize(
    ("thinking", "words"),
    [
        ({"think_s": -1.0}, "think_s is -1.0; allowed: 0 to"),
        ({"token_s": float("nan")}, "token_s is nan; allowed: 0 to"),
        ({"think_s": 1.0, "token_s": 0.1}, "leave out one of the two"),
    ],
)
def test_a_think_time_out_of_range_is_refused(thinking: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Thinking(**thinking)


def test_a_trace_without_a_second_turn_cannot_wait_for_answers_nor_one_that_does_already() -> None:
    with pytest.raises(InvalidInput, match="no session with a second turn"):
        to_sessions(make(CHAT[:3]), Thinking())
    with pytest.raises(InvalidInput, match="in sessions already"):
        to_sessions(to_sessions(make(CHAT), Thinking()), Thinking())


def test_a_session_needs_a_think_time_for_every_turn_but_the_first() -> None:
    first, second = TraceRequest(0.0, 9, 1, session="a"), TraceRequest(1.0, 9, 1, session="a", think_time_s=2)
    with pytest.raises(InvalidInput, match="request 0: is the first turn and has a think_time_s in session 'a'"):
        Trace("t", (second,))
    with pytest.raises(InvalidInput, match="request 2: is a later turn and has no think_time_s in session 'a'"):
        Trace("t", (first, second, TraceRequest(2.0, 9, 1, session="a")))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-0.5, "think_time_s is -0.5; allowed: 0 to"),
        (float("nan"), "think_time_s is nan"),
        (True, "think_time_s is True"),
        ("1", "think_time_s is '1'; allowed: a number"),
    ],
)
def test_a_think_time_that_is_no_time_is_refused(value: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        TraceRequest(0.0, 9, 1, session="a", think_time_s=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="has no session"):
        TraceRequest(0.0, 9, 1, think_time_s=1.0)


def test_a_file_of_sessions_says_so_and_comes_back_and_an_open_loop_file_stays_version_1(tmp_path: Path) -> None:
    path, found = tmp_path / "t.jsonl", to_sessions(make(CHAT), Thinking())
    write_trace(found, path)
    header = json.loads(path.read_text().splitlines()[0])
    assert (header["version"], header["mode"]) == (2, "sessions")
    assert read_trace(path) == found
    write_trace(make(CHAT), path)
    header = json.loads(path.read_text().splitlines()[0])
    assert header["version"] == 1
    assert "mode" not in header


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"version":2', '"version":1', "unknown key 'mode'"),
        ('"version":2,"mode":"sessions"', '"version":1', "header says version 1, but the requests are in sessions"),
        ('"mode":"sessions"', '"mode":"closed"', "the header's mode is 'closed'"),
        (',"mode":"sessions"', "", "the header lacks 'mode'"),
        (',"think_time_s":9.0', ',"think_time_s":8.0', "the file was changed"),
    ],
)
def test_a_header_that_contradicts_its_requests_is_refused(tmp_path: Path, before: str, after: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(to_sessions(make(CHAT), Thinking(think_s=9.0)), path)
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(InvalidInput, match=words):
        read_trace(path)


def test_a_part_of_a_session_begins_at_its_recorded_arrival_and_waits_from_then_on() -> None:
    found = to_sessions(make(CHAT), Thinking(think_s=1.0))
    cut = shape.window(found, 5.0)
    assert [(r.arrival_s, r.think_time_s) for r in cut.requests] == [(5.0, None), (6.0, None), (25.0, 1.0)]
    slower = shape.scale_time(found, 2.0)
    assert [r.think_time_s for r in slower.requests] == [r.think_time_s for r in found.requests]


@given(st.integers(0, 50), st.floats(3.0, 30.0))
def test_a_resample_of_sessions_is_one_whatever_is_drawn(seed: int, window_s: float) -> None:
    found = to_sessions(make(CHAT), Thinking(think_s=1.0))
    drawn = shape.resample(found, seed, window_s, duration_s=200.0)
    for place, before in enumerate(predecessors(drawn)):
        if before is not None:
            assert drawn.requests[before].session == drawn.requests[place].session
            assert drawn.requests[before].arrival_s <= drawn.requests[place].arrival_s
