"""What is said of a trace: worked examples, and laws that generated traffic must show."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.describe import describe
from traces.format import Trace, TraceRequest
from traces.generate import Phase, heterogeneous, rag_bursts
from traces.prompts import Vocabulary, prompt_ids
from traces.session import Thinking, to_sessions


def at(arrivals: list[float]) -> Trace:
    return Trace("t", tuple(TraceRequest(time_s, 10, 2) for time_s in arrivals))


def test_a_clock_has_no_burstiness_and_a_poisson_process_has_one_at_every_window() -> None:
    clock = describe(at([0.5 * place for place in range(400)]))
    assert clock["burstiness"] == pytest.approx(0.0)
    assert all(found["index"] < 0.1 for found in clock["dispersion"])
    poisson = describe(heterogeneous([Phase(20000.0, 2.0)], 1))
    assert poisson["burstiness"] == pytest.approx(1.0, abs=0.05)
    assert [found["window_s"] for found in poisson["dispersion"]] == [1.0, 10.0, 100.0, 1000.0]
    assert all(0.9 < found["index"] < 1.1 for found in poisson["dispersion"][:3])


def test_bursts_of_thirty_seconds_disperse_more_the_longer_the_window_is_up_to_about_their_length() -> None:
    bursty = describe(heterogeneous([Phase(30.0, rate) for _ in range(40) for rate in (0.1, 8.0)], 3))
    by_window = {found["window_s"]: found["index"] for found in bursty["dispersion"]}
    assert list(by_window) == [0.3, 3.0, 10.0, 100.0]
    assert 1 < by_window[0.3] < by_window[3.0] < by_window[10.0] > by_window[100.0]


def test_the_paper_s_bursts_are_told_in_windows_that_they_hold_eight_times() -> None:
    assert [found["window_s"] for found in describe(rag_bursts(1.2, 0))["dispersion"]] == [3.0]
    assert describe(at([1.0, 1.0]))["dispersion"] == []
    assert describe(at([1.0]))["burstiness"] is None


def test_lengths_have_percentiles_and_a_histogram_over_powers_of_two() -> None:
    lengths = [1, 2, 3, 4, 20, 20, 31]
    found = describe(Trace("t", tuple(TraceRequest(0.0, length, 7) for length in lengths)))
    assert found["prompt tokens"]["histogram"] == {"from": [1, 2, 4, 8, 16], "requests": [1, 2, 1, 0, 3]}
    assert found["prompt tokens"]["P50"] == 4
    assert found["prompt tokens"]["P95"] == pytest.approx(20 + 11 * 0.7)
    assert found["prompt tokens"]["P99"] == pytest.approx(20 + 11 * 0.94)
    assert found["output tokens"]["histogram"] == {"from": [4], "requests": [7]}
    assert found["output tokens"]["total"] == 49


def test_conversations_are_counted_with_their_turns_and_think_times() -> None:
    rows = [(0.0, "a"), (1.0, None), (4.0, "a"), (5.0, "b"), (9.0, "a")]
    recorded = Trace("t", tuple(TraceRequest(time_s, 10, 2, session=who) for time_s, who in rows))
    found = describe(recorded)
    assert found["sessions"] == 2
    assert found["conversations"] == {
        "requests in sessions": 4, "turns": {"mean": 2.0, "max": 3}, "waiting turns": 0, "think time, s": None,
    }  # fmt: skip
    waiting = describe(to_sessions(recorded, Thinking()))
    assert waiting["mode"] == "sessions"
    assert waiting["conversations"]["waiting turns"] == 2
    assert waiting["conversations"]["think time, s"] == {"median": 4.5, "max": 5.0}
    assert describe(at([0.0]))["conversations"] is None


BLOCKS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 8)), max_size=12)


@given(BLOCKS)
def test_shared_prefixes_are_counted_token_by_token_as_the_prompts_share_them(
    shapes: list[tuple[list[int], int]],
) -> None:
    size = 8
    requests = [TraceRequest(0.0, 5, 1)]
    requests += [TraceRequest(0.0, size * (len(ids) - 1) + last, 1, tuple(ids)) for ids, last in shapes]
    trace = Trace("t", tuple(requests), block_size=size)
    prompts = [
        prompt_ids(
            trace.digest, place, request.prompt_tokens, Vocabulary(10**6),
            block_hashes=request.block_hashes, block_size=size,
        )
        for place, request in enumerate(requests)
    ]  # fmt: skip

    def common(one: list[int], other: list[int]) -> int:
        return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    by_hand = sum(
        max((common(prompt, earlier) for earlier in prompts[1:place]), default=0)
        for place, prompt in enumerate(prompts)
        if place
    )
    found = describe(trace)
    assert found["prompt tokens in prefixes seen before"] == by_hand
    assert found["prefix sharing"] == by_hand / sum(map(len, prompts))


def test_the_load_has_every_request_in_a_bin() -> None:
    rng = random.Random(5)
    found = describe(at(sorted(rng.uniform(0, 777) for _ in range(500))))["load"]
    assert sum(found["requests"]) == 500
    assert len(found["requests"]) <= 51
    assert all(later > 0 for later, _ in pairwise(found["requests"]))
