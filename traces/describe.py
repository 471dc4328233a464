"""What a trace holds, in numbers: load over time, burstiness, lengths, sessions, prefix sharing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from traces.format import SESSIONS, Trace

_BINS: Final = 50
_PERCENTILES: Final = (50, 90, 95, 99)
_FEWEST_WINDOWS: Final = 8
_MOST_WINDOW_SIZES: Final = 4
_WINDOW_STEPS: Final = (1, 3)


def describe(trace: Trace) -> dict[str, Any]:
    """Facts about `trace` as plain JSON values.

    burstiness: the coefficient of variation of the gaps between arrivals: 1 for a Poisson process, 0 for a clock; None
        with fewer than three requests.
    dispersion: for windows of several lengths, the variance of the number of arrivals over its mean: about 1 at every
        length for a Poisson process; what grows with the length is slower than it, as bursts and tides are.
    load: requests in equal bins of bin_s seconds from the trace's start.
    prompt tokens, output tokens: with percentiles (linear interpolation) and a histogram over powers of two.
    prefix sharing: prompt tokens that an unbounded prefix cache would already hold; a server's hits only whole blocks.
    conversations: of sessions; waiting turns are those that are sent a think time after an answer.
    """
    arrivals = [request.arrival_s for request in trace.requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    mean_gap_s = statistics.fmean(gaps) if gaps else 0.0
    prompts = [request.prompt_tokens for request in trace.requests]
    shared = _shared_prefix_tokens(trace)
    return {
        "name": trace.name,
        "regime": trace.regime,
        "seed": trace.seed,
        "digest": trace.digest,
        "mode": trace.mode,
        "requests": len(trace.requests),
        "first arrival, s": arrivals[0],
        "last arrival, s": arrivals[-1],
        "requests per second": len(gaps) / trace.duration_s if trace.duration_s > 0 else None,
        "burstiness": statistics.pstdev(gaps) / mean_gap_s if len(gaps) > 1 and mean_gap_s > 0 else None,
        "dispersion": _dispersion(arrivals, trace.duration_s),
        "prompt tokens": _lengths(prompts),
        "output tokens": _lengths([request.output_tokens for request in trace.requests]),
        "sessions": len({request.session for request in trace.requests if request.session is not None}),
        "conversations": _conversations(trace),
        "prompt tokens in prefixes seen before": shared,
        "prefix sharing": shared / sum(prompts),
        "provenance": dict(trace.provenance),
        "load": _load(arrivals),
    }


def _lengths(lengths: Sequence[int]) -> dict[str, Any]:
    ordered = sorted(lengths)
    return {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "max": ordered[-1],
        "total": sum(ordered),
        **{f"P{percent}": _percentile(ordered, percent) for percent in _PERCENTILES},
        "histogram": _histogram(ordered),
    }


def _percentile(ordered: Sequence[int], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _histogram(lengths: Sequence[int]) -> dict[str, list[int]]:
    """from: the least length of each bin, a power of two, without a gap between the first and the last."""
    counts = Counter(length.bit_length() - 1 for length in lengths)
    powers = range(min(counts), max(counts) + 1)
    return {"from": [2**power for power in powers], "requests": [counts[power] for power in powers]}


def _load(arrivals: Sequence[float]) -> dict[str, Any]:
    bin_s = max(1.0, math.ceil(arrivals[-1] / _BINS))
    counts = [0] * (int(arrivals[-1] // bin_s) + 1)
    for arrival_s in arrivals:
        counts[int(arrival_s // bin_s)] += 1
    return {"bin_s": bin_s, "requests": counts}


def _dispersion(arrivals: Sequence[float], duration_s: float) -> list[dict[str, float]]:
    """Up to four windows of 1, 3, 10, 30 … (also tenths) seconds, from the mean gap to an eighth of the trace.

    In shorter ones nearly all would be empty, of longer ones there would be too few.
    """
    if duration_s <= 0:
        return []
    longest_s, mean_gap_s = duration_s / _FEWEST_WINDOWS, duration_s / (len(arrivals) - 1)
    powers = range(math.floor(math.log10(mean_gap_s)), math.ceil(math.log10(longest_s)) + 1)
    sizes = [float(f"{step}e{power}") for power in powers for step in _WINDOW_STEPS]
    sizes = [size for size in sizes if mean_gap_s <= size <= longest_s]
    stride = max(1, (len(sizes) - 1) / (_MOST_WINDOW_SIZES - 1))
    chosen = [sizes[round(place * stride)] for place in range(min(len(sizes), _MOST_WINDOW_SIZES))]
    return [{"window_s": size, "index": _index_of_dispersion(arrivals, size)} for size in chosen]


def _index_of_dispersion(arrivals: Sequence[float], window_s: float) -> float:
    """Over whole windows from the first arrival on; what is left at the end is left out."""
    first_s = arrivals[0]
    whole = int((arrivals[-1] - first_s) / window_s)
    counts = Counter(int((arrival_s - first_s) / window_s) for arrival_s in arrivals)
    numbers = [counts[place] for place in range(whole)]
    return statistics.variance(numbers) / statistics.fmean(numbers) if sum(numbers) else 0.0


def _conversations(trace: Trace) -> dict[str, Any] | None:
    turns = Counter(request.session for request in trace.requests if request.session is not None)
    if not turns:
        return None
    think_s = [request.think_time_s for request in trace.requests if request.think_time_s is not None]
    return {
        "requests in sessions": turns.total(),
        "turns": {"mean": statistics.fmean(turns.values()), "max": max(turns.values())},
        "waiting turns": len(think_s) if trace.mode == SESSIONS else 0,
        "think time, s": {"median": statistics.median(think_s), "max": max(think_s)} if think_s else None,
    }


def _shared_prefix_tokens(trace: Trace) -> int:
    """Prompt tokens whose whole prefix an earlier request had: an unbounded prefix cache would hold them.

    A partial last block is the beginning of the whole one, so as many of its tokens are known as were ever sent. A prefix
    is told by a 64-bit hash over its blocks: a million long prompts have over twenty million of them.
    """
    if trace.block_size is None:
        return 0
    whole: set[int] = set()  # prefixes of which every block was sent whole
    begun: dict[int, int] = {}  # tokens sent of the last block of prefixes that were only begun
    shared = 0
    for request in trace.requests:
        prefix, hit = 0, True
        left = request.prompt_tokens
        for block in request.block_hashes:
            prefix = hash((prefix, block))
            tokens = min(trace.block_size, left)
            left -= tokens
            known = trace.block_size if prefix in whole else begun.get(prefix, 0)
            if hit:
                shared += min(tokens, known)
                hit = tokens <= known
            if tokens > known:
                if tokens == trace.block_size:
                    whole.add(prefix)
                    begun.pop(prefix, None)
                else:
                    begun[prefix] = tokens
    return shared
