"""Generated traces: the two published workload families, identical for a seed on every machine.

Source: the workloads of the P-PAS paper and its public repository. One `random.Random(seed)` runs through a trace:
first the arrivals of all phases, then (heterogeneous workloads) the shapes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from ppas_core.errors import InvalidInput
from traces.format import Trace, TraceRequest

OUTPUT_TOKENS: Final = (16, 32, 64, 128, 256)
"""Output lengths of the published heterogeneous workloads."""
MAX_REQUESTS: Final = 2_000_000
"""Requests that the phases of a generated trace may be expected to give."""
QWEN_PROMPT_TOKENS: Final = (8192, 16384, 32768, 65536)
NEMOTRON_PROMPT_TOKENS: Final = (16384, 32768, 65536, 131072)


class Phase(NamedTuple):
    """A stretch of constant load: `duration_s` seconds of Poisson arrivals at `rate_per_s` requests per second."""

    duration_s: float
    rate_per_s: float


def parse_phases(text: str) -> tuple[Phase, ...]:
    """Phases from the paper's notation, `10:0.2,10:1.0` (seconds : requests per second). Raises InvalidInput."""
    phases = []
    for part in text.split(","):
        try:
            duration, rate = (float(number) for number in part.split(":"))
        except ValueError:
            raise InvalidInput(f"phase {part!r} is not SECONDS:RATE, as in 10:0.2,10:1.0") from None
        phases.append(Phase(duration, rate))
    _check_phases(phases)
    return tuple(phases)


def format_phases(phases: Sequence[Phase]) -> str:
    """The paper's notation of `phases`; `parse_phases` reads it."""
    return ",".join(f"{phase.duration_s:g}:{phase.rate_per_s:g}" for phase in phases)


def rag_bursts(
    rate_per_s: float,
    seed: int,
    *,
    prompt_tokens: int = 25_000,
    output_tokens: int = 32,
    idle_rate_per_s: float = 0.2,
    phase_s: float = 10.0,
) -> Trace:
    """The paper's RAG bursts: five phases, idle – burst – idle – burst – idle, every request of one shape.

    rate_per_s is the paper's λ. With the defaults and seed 0, λ = 0.6 gives 15 requests, 1.0 gives 22, 1.2 gives 25.
    """
    idle, burst = Phase(phase_s, idle_rate_per_s), Phase(phase_s, rate_per_s)
    phases = (idle, burst, idle, burst, idle)
    arrivals = _poisson_arrivals(phases, random.Random(seed))  # noqa: S311 - reproducible, not secret
    shapes = [(prompt_tokens, output_tokens)] * len(arrivals)
    regime = f"λ={rate_per_s:g}"
    if (prompt_tokens, output_tokens) != (25_000, 32):
        regime += f" p{prompt_tokens} o{output_tokens}"
    return _trace("rag-bursts", regime, seed, phases, arrivals, shapes)


def heterogeneous(
    phases: Sequence[Phase],
    seed: int,
    *,
    prompt_tokens: Sequence[int] = QWEN_PROMPT_TOKENS,
    output_tokens: Sequence[int] = OUTPUT_TOKENS,
) -> Trace:
    """The published mixed shapes: every (prompt, output) cell of the grid gets an equal share of the requests.

    Shares are rounded by largest remainder, ties broken by the seed; the shapes are then shuffled and dealt to the
    requests in arrival order.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    arrivals = _poisson_arrivals(phases, rng)
    grid = [(prompt, output) for prompt in sorted(prompt_tokens) for output in sorted(output_tokens)]
    if not grid:
        raise InvalidInput("prompt_tokens and output_tokens must each hold at least one length")
    quota, remainder = divmod(len(arrivals), len(grid))
    # All fractional parts are equal here, so a stable sort leaves the shuffled order as it is.
    cells = list(range(len(grid)))
    rng.shuffle(cells)
    extra = set(cells[:remainder])
    shapes = [shape for cell, shape in enumerate(grid) for _ in range(quota + (cell in extra))]
    rng.shuffle(shapes)
    return _trace("heterogeneous", f"phases {format_phases(phases)}", seed, phases, arrivals, shapes)


def _poisson_arrivals(phases: Sequence[Phase], rng: random.Random) -> list[tuple[float, int]]:
    """(arrival in seconds, phase index) in order; the first arrival past a phase's end is dropped."""
    _check_phases(phases)
    arrivals = []
    start_s = 0.0
    for index, phase in enumerate(phases):
        end_s = start_s + phase.duration_s
        time_s = start_s
        while phase.rate_per_s > 0:
            time_s += rng.expovariate(phase.rate_per_s)
            if time_s >= end_s:
                break
            arrivals.append((time_s, index))
        start_s = end_s
    if not arrivals:
        raise InvalidInput(
            f"phases {format_phases(phases)} gave no request with this seed; use another seed or a higher rate"
        )
    return arrivals


def _check_phases(phases: Sequence[Phase]) -> None:
    for phase in phases:
        if not (0 < phase.duration_s < 1e7 and 0 <= phase.rate_per_s <= 1e5):
            raise InvalidInput(
                f"phase {phase.duration_s:g}:{phase.rate_per_s:g} is out of range; "
                "allowed: above 0 and below 1e7 seconds, 0 to 100000 requests per second"
            )
    if not any(phase.rate_per_s > 0 for phase in phases):
        raise InvalidInput("no phase has a rate above 0; at least one must")
    expected = sum(phase.duration_s * phase.rate_per_s for phase in phases)
    if expected > MAX_REQUESTS:
        raise InvalidInput(
            f"phases {format_phases(phases)[:200]} would give about {expected:.0f} requests; allowed: at most "
            f"{MAX_REQUESTS}: lower the rates or shorten the phases"
        )


def _trace(
    family: str,
    regime: str,
    seed: int,
    phases: Sequence[Phase],
    arrivals: list[tuple[float, int]],
    shapes: list[tuple[int, int]],
) -> Trace:
    requests = tuple(
        TraceRequest(arrival_s=time_s, prompt_tokens=prompt, output_tokens=output, phase=phase)
        for (time_s, phase), (prompt, output) in zip(arrivals, shapes, strict=True)
    )
    return Trace(
        name=f"{family} {regime} seed {seed}",
        requests=requests,
        regime=regime,
        seed=seed,
        provenance={"source": "generated", "family": family, "phases": format_phases(phases)},
    )
