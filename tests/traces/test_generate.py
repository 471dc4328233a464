"""The published workloads come out as published."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces.describe import describe
from traces.format import Trace, TraceRequest
from traces.generate import format_phases, heterogeneous, parse_phases, rag_bursts


@pytest.mark.parametrize(("rate", "seed", "requests"), [(0.6, 0, 15), (0.6, 1, 18), (1.2, 0, 25), (1.0, 0, 22)])
def test_rag_bursts_have_the_published_request_counts(rate: float, seed: int, requests: int) -> None:
    trace = rag_bursts(rate, seed)
    assert len(trace.requests) == requests
    assert {(r.prompt_tokens, r.output_tokens) for r in trace.requests} == {(25_000, 32)}


def test_heterogeneous_gives_the_published_example() -> None:
    trace = heterogeneous(parse_phases("20:0.05,10:0.1,20:0.05"), 0)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (40.91426291083185, 8192, 128),
        (46.90710915510813, 32768, 256),
    ]


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_every_shape_gets_an_equal_share(seed: int) -> None:
    trace = heterogeneous(parse_phases("100:0.5"), seed)
    shapes = [(r.prompt_tokens, r.output_tokens) for r in trace.requests]
    counts = [shapes.count(shape) for shape in {(p, o) for p, o in shapes}]
    assert max(counts) - min([*counts, 0] if len(counts) < 20 else counts) <= 1


@given(st.floats(0.1, 5), st.integers(0, 10**6))
def test_the_same_seed_gives_the_same_trace_and_arrivals_stay_within_their_phase(rate: float, seed: int) -> None:
    trace = rag_bursts(rate, seed, idle_rate_per_s=2.0)  # 60 requests expected in the idle phases: never empty
    assert trace == rag_bursts(rate, seed, idle_rate_per_s=2.0)
    assert all(r.phase is not None and 10 * r.phase <= r.arrival_s < 10 * (r.phase + 1) for r in trace.requests)


def test_the_digest_of_a_published_trace_never_changes() -> None:
    digest = "sha256:dac50faec40eccaebf15ba18a9394d0f0a0266549e7d7ad6910763139a773260"
    assert heterogeneous(parse_phases("20:0.05,10:0.1,20:0.05"), 0).digest == digest


def test_phases_are_written_as_they_are_read() -> None:
    assert format_phases(parse_phases("20:0.05,10:1,20:0.05")) == "20:0.05,10:1,20:0.05"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("10", "'10' is not SECONDS:RATE"),
        ("10:x", "is not SECONDS:RATE"),
        ("10:1:2", "is not SECONDS:RATE"),
        ("0:1", "0:1 is out of range"),
        ("10:-1", "out of range"),
        ("10:nan", "out of range"),
        ("inf:1", "out of range"),
        ("10:0,5:0", "no phase has a rate above 0"),
        ("1000:1000,1001:1000", "would give about 2001000 requests; allowed: at most 2000000"),
        ("9999999:100000", "requests; allowed: at most 2000000: lower the rates or shorten the phases"),
    ],
)
def test_bad_phases_are_refused_with_their_text(text: str, word: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_phases(text)
    assert word in str(caught.value)


def test_a_workload_that_no_machine_could_hold_is_refused_before_it_is_generated() -> None:
    with pytest.raises(InvalidInput, match="would give about 4000012 requests"):
        rag_bursts(1e5, 0, phase_s=20.0)
    assert len(heterogeneous(parse_phases("100:200"), 0).requests) > 19_000


def test_describe_counts_load_lengths_and_shared_prefixes() -> None:
    trace = Trace(
        name="t",
        block_size=10,
        requests=(
            TraceRequest(0.0, 25, 1, block_hashes=(1, 2, 3)),
            TraceRequest(1.0, 25, 2, block_hashes=(1, 2, 4)),
            TraceRequest(3.0, 25, 3, block_hashes=(9, 2, 3)),
            TraceRequest(3.5, 25, 3, block_hashes=(1, 2, 3)),
        ),
    )
    facts = describe(trace)
    assert facts["prompt tokens in prefixes seen before"] == 20 + 0 + 25
    assert facts["load"] == {"bin_s": 1.0, "requests": [1, 1, 0, 2]}
    assert facts["output tokens"].items() >= {"min": 1, "median": 2.5, "mean": 2.25, "max": 3, "total": 9}.items()
    assert facts["requests per second"] == pytest.approx(3 / 3.5)
