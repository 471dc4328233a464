"""A shaped trace is the same traffic: lengths and prefixes untouched, arrivals as asked, every step on record."""

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces.format import Trace, TraceRequest
from traces.generate import rag_bursts
from traces.shape import resample, scale_rate, scale_time, split, window


def make(arrivals: list[float], sessions: list[str | None] | None = None) -> Trace:
    return Trace(
        name="t",
        block_size=1000,
        provenance={"source": "hand"},
        requests=tuple(
            TraceRequest(time_s, 11 + place, 1 + place, (place,), (sessions or [None] * len(arrivals))[place])
            for place, time_s in enumerate(arrivals)
        ),
    )


def shapes(trace: Trace) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(r.prompt_tokens, r.output_tokens, tuple(r.block_hashes)) for r in trace.requests]


TRACES = st.lists(st.floats(0, 1e5).map(lambda time_s: round(time_s, 3)), min_size=2, max_size=9).map(sorted).map(make)


def test_a_window_has_its_first_second_and_not_its_last_and_begins_at_zero() -> None:
    cut = window(make([0, 1, 2, 3, 4]), 1, 3)
    assert [request.arrival_s for request in cut.requests] == [0, 1]
    assert [request.prompt_tokens for request in cut.requests] == [12, 13]
    assert cut.provenance["source"] == "hand"
    assert cut.provenance["shape"] == [{"op": "window", "from_s": 1, "to_s": 3}]


def test_scaled_time_moves_arrivals_and_nothing_else() -> None:
    trace = make([0.5, 1, 3])
    assert [request.arrival_s for request in scale_time(trace, 2).requests] == [1, 2, 6]
    assert shapes(scale_time(trace, 2)) == shapes(trace)


@given(TRACES, st.floats(0.01, 100))
def test_a_scaled_rate_is_the_mean_rate_of_the_result(trace: Trace, rate: float) -> None:
    if trace.duration_s == 0:
        with pytest.raises(InvalidInput, match="no rate"):
            scale_rate(trace, rate)
        return
    scaled = scale_rate(trace, rate)
    assert (len(scaled.requests) - 1) / scaled.duration_s == pytest.approx(rate)
    assert shapes(scaled) == shapes(trace)


@given(TRACES, st.floats(0.05, 0.95), st.sampled_from([0.0, 1.0, 1e4]))
def test_the_parts_of_a_split_share_no_request_and_no_time(trace: Trace, share: float, gap_s: float) -> None:
    try:
        tuning, held_out = split(trace, share, gap_s)
    except InvalidInput as error:
        assert "would be empty" in str(error)  # noqa: PT017 - some draws are one-sided
        return
    step = held_out.provenance["shape"][-1]
    left_out = len(trace.requests) - len(tuning.requests) - len(held_out.requests)
    assert left_out == step["left_out_in_gap"]
    assert gap_s > 0 or left_out == 0
    assert shapes(tuning) + shapes(trace)[len(tuning.requests) :][:left_out] + shapes(held_out) == shapes(trace)
    last_s = trace.requests[len(tuning.requests) - 1].arrival_s
    first_s = trace.requests[-len(held_out.requests)].arrival_s
    assert last_s < step["cut_s"] <= first_s - gap_s + 1e-9 * first_s
    assert tuning.name != held_out.name
    assert tuning.digest != held_out.digest


def test_a_split_counts_the_sessions_on_both_sides() -> None:
    _, held_out = split(make([0, 1, 8, 9], ["a", "b", "b", "c"]))
    assert held_out.provenance["shape"][-1]["sessions_in_both"] == 1


def bursty() -> Trace:
    """Twenty bursts of ten requests 0.1 s apart, 30 s from burst to burst."""
    return make([30 * burst + place / 10 for burst in range(20) for place in range(10)])


def burstiness(trace: Trace) -> float:
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(trace.requests)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def test_a_resample_keeps_bursts_where_shuffled_gaps_would_not() -> None:
    trace = bursty()
    drawn = [resample(trace, seed, window_s=60) for seed in range(20)]
    assert statistics.fmean(len(one.requests) for one in drawn) == pytest.approx(len(trace.requests), rel=0.05)
    assert statistics.fmean(map(burstiness, drawn)) == pytest.approx(burstiness(trace), rel=0.1)
    for one in drawn:
        within = sum(later.arrival_s - earlier.arrival_s < 0.11 for earlier, later in pairwise(one.requests))
        assert within / len(one.requests) > 0.85  # 0.9 in the source, 0.04 in a Poisson process of the same rate


@given(TRACES, st.integers(0, 99), st.floats(0.1, 1), st.floats(0.5, 3))
def test_a_resample_is_the_same_for_a_seed_and_holds_requests_of_the_source_only(
    trace: Trace, seed: int, share: float, longer: float
) -> None:
    circle_s = trace.duration_s * len(trace.requests) / (len(trace.requests) - 1)
    try:
        drawn = resample(trace, seed, share * circle_s, longer * circle_s)
    except InvalidInput as error:
        assert "no request" in str(error) or "no windows" in str(error) or "window is" in str(error)  # noqa: PT017
        return
    assert drawn == resample(trace, seed, share * circle_s, longer * circle_s)
    assert set(shapes(drawn)) <= set(shapes(trace))
    assert drawn.requests[-1].arrival_s <= longer * circle_s * (1 + 1e-9)
    step = drawn.provenance["shape"][-1]
    assert step["seed"] == drawn.seed == seed
    assert step["repeated_requests"] == len(drawn.requests) - len(set(shapes(drawn)))


def test_windows_of_a_resample_that_reach_the_end_go_on_at_the_beginning() -> None:
    trace = make([0.0, 1.0, 2.0, 3.0])
    for seed in range(50):
        places = [request.prompt_tokens - 11 for request in resample(trace, seed, window_s=4.0).requests]
        assert sorted(places) == [0, 1, 2, 3]  # one whole turn, wherever it begins
        assert all(later == (earlier + 1) % 4 for earlier, later in pairwise(places))


def test_a_session_drawn_twice_is_two_sessions() -> None:
    drawn = resample(make([0, 1, 2, 3], ["a", "a", "a", "a"]), 0, window_s=2, duration_s=100)
    for session in {request.session for request in drawn.requests}:
        times = [request.arrival_s for request in drawn.requests if request.session == session]
        assert max(times) - min(times) < 2


def test_steps_add_up_in_the_provenance_with_the_first_sources_digest() -> None:
    trace = rag_bursts(1.0, 0)
    shaped = window(scale_time(resample(trace, 3, 10.0), 0.5), 2, 20)
    assert [step["op"] for step in shaped.provenance["shape"]] == ["resample", "scale_time", "window"]
    assert shaped.provenance["shaped_from"] == trace.digest
    assert shaped.provenance["source"] == "generated"
    assert trace.provenance.get("shape") is None


TRACE = make([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: window(TRACE, 2, 1), "window is 2 to 1 s"),
        (lambda: window(TRACE, -1), "window is -1 to inf s"),
        (lambda: window(TRACE, math.nan), "window is nan"),
        (lambda: window(TRACE, 5, 9), "window 5 to 9 s of trace 't' holds no request; its arrivals run from 0 to 2 s"),
        (lambda: scale_time(TRACE, 0), "time factor is 0"),
        (lambda: scale_time(TRACE, math.inf), "time factor is inf"),
        (lambda: scale_time(make([0, 1e9]), 1e300), "last arrival to inf s, past 10000000000"),
        (lambda: scale_rate(TRACE, -1), "rate is -1"),
        (lambda: scale_rate(make([1, 1]), 2), "at one time"),
        (lambda: split(TRACE, 1.0), "tuning share is 1"),
        (lambda: split(TRACE, 0.5, -1), "gap is -1 s"),
        (lambda: split(TRACE, 0.5, 50), "the held-out part of trace 't' would be empty"),
        (lambda: split(make([1, 1])), "the tuning part of trace 't' would be empty"),
        (lambda: resample(TRACE, 0, 0), "window is 0 s; allowed: above 0, at most the trace's 3 s"),
        (lambda: resample(TRACE, 0, 4), "window is 4 s"),
        (lambda: resample(TRACE, 0, 1, math.inf), "duration is inf s"),
        (lambda: resample(make([5]), 0, 1), "no windows"),
        (lambda: resample(make([0, 1000]), 0, 0.001, 0.002), "seed 0 draws no request"),
    ],
)
def test_what_cannot_be_shaped_is_refused_with_its_value(call: object, word: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        call()  # type: ignore[operator]
    assert word in str(caught.value)
