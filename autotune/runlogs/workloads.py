"""The requests that a run replayed, from what its log says of them: generated again, and held against the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from autotune.runlogs.model import RequestResults, RunResult
from ppas_core.errors import InvalidInput
from ppas_core.sim.requests import RequestArrays
from traces.generate import NEMOTRON_PROMPT_TOKENS, OUTPUT_TOKENS, QWEN_PROMPT_TOKENS, heterogeneous, parse_phases

Shapes = tuple[Sequence[int], Sequence[int]]
"""Prompt lengths and output lengths that requests are drawn from."""

_TOLERANCE: Final = 1e-3
_REMEDY: Final = "give the lengths that were used (--prompt-lengths, --output-lengths), or a table with trace files"


def requests_of(run: RunResult, shapes: Sequence[Shapes] = ()) -> RequestArrays:
    """The requests of the trace that `run` replayed.

    They are taken as they are known, or generated from phases and seed as the published workloads are, and must then
    have the log's number of requests and lengths. Where the log does not name the lengths, `shapes` and the published
    mixes are tried. Raises InvalidInput where nothing fits.
    """
    if run.workload.arrays is not None:
        return run.workload.arrays
    if (told := _told(run)) is not None:
        return told
    workload = run.workload
    if not workload.phases or workload.seed is None:
        missing = "load phases" if not workload.phases else "seed"
        raise InvalidInput(f"{run.source}: the log names no {missing}, so its trace cannot be generated again")
    phases = parse_phases(workload.phases)
    expected = sum(phase.duration_s * phase.rate_per_s for phase in phases)
    if expected > 10 * run.num_requests + 1000:
        raise InvalidInput(f"{run.source}: its phases give about {expected:.0f} requests, it says {run.num_requests}")
    reasons = []
    for prompts, outputs in _candidates(run, shapes):
        trace = heterogeneous(phases, workload.seed, prompt_tokens=prompts, output_tokens=outputs)
        shape = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests]
        arrays = RequestArrays(*(np.array(column) for column in zip(*shape, strict=True)))
        if (reason := _contradiction(run, arrays)) is None:
            return arrays
        reasons.append(reason)
    raise InvalidInput(
        f"{run.source}: no trace of known shape fits ({reasons[0] if reasons else 'no lengths'}); {_REMEDY}"
    )


def _candidates(run: RunResult, shapes: Sequence[Shapes]) -> list[Shapes]:
    own = (run.workload.prompt_tokens, run.workload.output_tokens)
    if all(own):
        return [*shapes, own]
    prompts = [own[0]] if own[0] else [QWEN_PROMPT_TOKENS, NEMOTRON_PROMPT_TOKENS]
    if not own[0] and not any(name.startswith("prompt") for name in run.workload.facts):
        prompts = []  # nothing in the log could tell one mix from the other
    return [*shapes, *((one, own[1] or OUTPUT_TOKENS) for one in prompts)]


def _contradiction(run: RunResult, arrays: RequestArrays) -> str | None:
    """What of `arrays` differs from the log; None where nothing does."""
    if run.num_requests and len(arrays) != run.num_requests:
        return f"it says {run.num_requests} requests, phases and seed give {len(arrays)}"
    for side, lengths in (("prompt", arrays.prompt_tokens), ("output", arrays.output_tokens)):
        for stat, value in (("mean", lengths.mean()), ("max", lengths.max()), ("p50", np.median(lengths))):
            told = run.workload.facts.get(f"{side}_{stat}")
            if told is not None and abs(value - told) > _TOLERANCE * max(told, 1.0):
                return f"it says {side}_{stat} {told:g}, the generated trace has {value:g}"
    return None


def _told(run: RunResult) -> RequestArrays | None:
    """The requests as the log lists them one by one; None where it does not, or not in full."""
    results = run.requests
    if results is None or len(results) != run.num_requests:
        return None
    complete = np.isfinite(results.arrival_s).all() and (results.prompt_tokens > 0).all()
    if not complete or not (results.output_tokens > 0).all():
        return None
    order = arrival_order(results)
    arrival_s = results.arrival_s[order]
    return RequestArrays(arrival_s - arrival_s[0], results.prompt_tokens[order], results.output_tokens[order])


def arrival_order(results: RequestResults) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Places of the requests by their arrival; equal ones as they stand."""
    return np.argsort(results.arrival_s, kind="stable")
