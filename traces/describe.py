"""What a trace holds, in numbers: load over time, burstiness, lengths, sessions, prefix sharing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from traces.format import Trace

_BINS = 50


def describe(trace: Trace) -> dict[str, Any]:
    """Facts about `trace` as plain JSON values.

    burstiness is the coefficient of variation of the gaps between arrivals: 1 for a Poisson process, 0 for a clock;
    None with fewer than three requests. load counts requests in equal bins of bin_s seconds from the trace's start.
    """
    arrivals = [request.arrival_s for request in trace.requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    mean_gap_s = statistics.fmean(gaps) if gaps else 0.0
    shared = _shared_prefix_tokens(trace)
    return {
        "name": trace.name,
        "regime": trace.regime,
        "seed": trace.seed,
        "digest": trace.digest,
        "requests": len(trace.requests),
        "first arrival, s": arrivals[0],
        "last arrival, s": arrivals[-1],
        "requests per second": len(gaps) / trace.duration_s if trace.duration_s > 0 else None,
        "burstiness": statistics.pstdev(gaps) / mean_gap_s if len(gaps) > 1 and mean_gap_s > 0 else None,
        "prompt tokens": _lengths([request.prompt_tokens for request in trace.requests]),
        "output tokens": _lengths([request.output_tokens for request in trace.requests]),
        "sessions": len({request.session for request in trace.requests if request.session is not None}),
        "prompt tokens in prefixes seen before": shared,
        "provenance": dict(trace.provenance),
        "load": _load(arrivals),
    }


def _lengths(lengths: Sequence[int]) -> dict[str, float]:
    return {
        "min": min(lengths),
        "median": statistics.median(lengths),
        "mean": statistics.fmean(lengths),
        "max": max(lengths),
        "total": sum(lengths),
    }


def _load(arrivals: Sequence[float]) -> dict[str, Any]:
    bin_s = max(1.0, math.ceil(arrivals[-1] / _BINS))
    counts = [0] * (int(arrivals[-1] // bin_s) + 1)
    for arrival_s in arrivals:
        counts[int(arrival_s // bin_s)] += 1
    return {"bin_s": bin_s, "requests": counts}


def _shared_prefix_tokens(trace: Trace) -> int:
    """Prompt tokens whose whole block prefix an earlier request had: an unbounded prefix cache would hold them."""
    known: dict[tuple[int, int], int] = {}  # (prefix before the block, block) to the prefix that ends with it
    shared = 0
    for request in trace.requests:
        prefix, hit = 0, True
        for place, block in enumerate(request.block_hashes):
            hit = hit and (prefix, block) in known
            if hit and trace.block_size is not None:
                shared += min(trace.block_size, request.prompt_tokens - trace.block_size * place)
            prefix = known.setdefault((prefix, block), len(known) + 1)
    return shared
