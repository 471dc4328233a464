"""Which requests are changed and how, and that a filtered stream is the stream without its usage event."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.record.requests import UsageFilter, ask_for_usage, recorded_path


def asked(**body: object) -> object:
    changed = ask_for_usage(json.dumps(body).encode())
    return None if changed is None else json.loads(changed)


def test_a_stream_is_asked_for_its_lengths_and_nothing_else_changes() -> None:
    body = {"model": "m", "prompt": "hi", "stream": True, "x": [1, {"y": None}]}
    assert asked(**body) == {**body, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi"},
        {"prompt": "hi", "stream": False},
        {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": 'a "stream": true, b', "stream": None},
        {"prompt": [1, 2, 3]},
        {"tools": [{"stream": True}]},
    ],
)
def test_a_request_that_needs_no_change_is_left_byte_for_byte(body: dict[str, object]) -> None:
    assert asked(**body) is None


def test_options_that_the_user_gave_keep_their_effect() -> None:
    changed = asked(stream=True, stream_options={"continuous_usage_stats": True, "x": 1})
    assert changed == {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False, "x": 1},
    }
    assert asked(stream=True, stream_options=None) == {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    }


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3]], ["]", "x"], '"prompt": [1', "", [], [1.5, 2]])
def test_every_kind_of_prompt_reaches_the_server_as_it_was(prompt: object) -> None:
    body = {"a": '\\"prompt\\":[1,2', "prompt": prompt, "stream": True}
    assert asked(**body) == {**body, "stream_options": {"include_usage": True}}


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_body_is_left_alone_or_stays_json(body: bytes) -> None:
    changed = ask_for_usage(body)
    assert changed is None or json.loads(changed)["stream_options"]["include_usage"] is True


EVENTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"choices": [{"text": text}], "usage": None}, st.text(max_size=8)),
        st.just({"choices": [], "prompt_filter_results": []}),
        st.just({"error": {"message": '"choices":[]'}}),
        st.just({"choices": [], "usage": {"prompt_tokens": 3}}),
    ),
    max_size=6,
)


@given(EVENTS, st.lists(st.integers(1, 40), max_size=30), st.sampled_from(["\n\n", "\r\n\r\n"]), st.booleans())
def test_the_filter_takes_out_the_usage_event_and_nothing_else_however_the_stream_is_cut(
    events: list[dict[str, object]], cuts: list[int], end: str, tight: bool
) -> None:
    separators = (",", ":") if tight else None
    lines = [f"data: {json.dumps(event, separators=separators)}{end}" for event in events]
    wanted = [line for line, event in zip(lines, events, strict=True) if not isinstance(event.get("usage"), dict)]
    stream, used, found = "".join([*lines, f": comment{end}data: [DONE]{end}data: cut"]).encode(), UsageFilter(), b""
    start = 0
    for cut in cuts:
        found += used.feed(stream[start : start + cut])
        start += cut
    found += used.feed(stream[start:]) + used.rest()
    assert found.decode() == "".join([*wanted, f": comment{end}data: [DONE]{end}data: cut"])


@given(st.lists(st.text(max_size=5), min_size=1, max_size=5))
def test_an_event_is_passed_on_in_the_piece_that_completes_it(texts: list[str]) -> None:
    used = UsageFilter()
    for text in texts:
        event = f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode()
        assert used.feed(event[:7]) == b""
        assert used.feed(event[7:]) == event


def test_paths_are_known_under_any_prefix_and_only_whole() -> None:
    assert recorded_path("/v1/completions") == recorded_path("/team/a/v1/completions") == "/v1/completions"
    assert recorded_path("/v1/chat/completions") == "/v1/chat/completions"
    assert recorded_path("/v1/models") is recorded_path("/v1/completions/render") is None
