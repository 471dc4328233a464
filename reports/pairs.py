"""How two settings compare request by request, as plain data. Knows no Plotly and no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from autotune.results import StudyResults
from reports.numbers import finite
from reports.roles import TUNED, compared, role
from reports.views import Missing, ordered_regimes

T = TypeVar("T")

REQUEST_METRICS = {"latency_s": "End-to-end latency", "ttft_s": "TTFT", "tpot_s": "TPOT"}
"""Per-request columns of the held-out results and their labels."""

MAX_SCATTER_POINTS = 900
MAX_ECDF_POINTS = 400


@dataclass(frozen=True, slots=True)
class RequestPair:
    """A request under both settings, in seconds."""

    regime: str
    trace: str
    prompt_tokens: int
    output_tokens: int
    candidate_s: float
    reference_s: float


@dataclass(frozen=True, slots=True)
class PairedView:
    """The tuned setting and a reference on the same held-out requests.

    pairs: every request with both values. sample: at most `MAX_SCATTER_POINTS` of them. regimes: in ascending load.
    difference_s, share: the empirical distribution of candidate - reference, thinned; share runs from 0 to 1.
    focus_s: the range of the central 98 % of the differences, 0 included, with a margin.
    """

    metric: str
    candidate: str
    reference: str
    reference_role: str
    regimes: tuple[str, ...]
    num_pairs: int
    num_undefined: int
    sample: tuple[RequestPair, ...]
    difference_s: tuple[float, ...]
    share: tuple[float, ...]
    focus_s: tuple[float, float]
    share_faster: float
    share_slower: float
    tie_s: float


def paired(results: StudyResults, reference_role: str, column: str) -> PairedView | Missing:
    """Per-request values of the tuned setting against the setting in `reference_role`; column: see REQUEST_METRICS."""
    candidate, reference = role(results, TUNED), role(results, reference_role)
    if candidate is None or reference is None:
        return Missing(f"The held-out traces were not replayed with both the tuned setting and the {reference_role}.")
    ours, theirs = getattr(candidate.requests, column), getattr(reference.requests, column)
    if len(ours) != len(theirs):
        return Missing("The two settings were replayed on different requests, so they cannot be paired.")
    pairs = [
        RequestPair(regime, trace, prompt, output, a, b)
        for regime, trace, prompt, output, mine, other in zip(
            candidate.requests.regime, candidate.requests.trace, candidate.requests.prompt_tokens,
            candidate.requests.output_tokens, ours, theirs, strict=True,
        )
        if (a := finite(mine)) is not None and (b := finite(other)) is not None
    ]  # fmt: skip
    if not pairs:
        return Missing("No request has this value under both settings.")
    comparison = compared(results, reference_role)
    tie_s = comparison.tie_s if comparison else 0.0
    differences = sorted(p.candidate_s - p.reference_s for p in pairs)
    n = len(differences)
    places = _thinned(range(n), MAX_ECDF_POINTS)
    return PairedView(
        metric=column,
        candidate=candidate.setting.label,
        reference=reference.setting.label,
        reference_role=reference_role,
        regimes=tuple(ordered_regimes(p.regime for p in pairs)),
        num_pairs=n,
        num_undefined=len(ours) - n,
        sample=tuple(_thinned(pairs, MAX_SCATTER_POINTS)),
        difference_s=tuple(differences[i] for i in places),
        share=tuple((i + 1) / n for i in places),
        focus_s=_central(differences),
        share_faster=sum(d < -tie_s for d in differences) / n,
        share_slower=sum(d > tie_s for d in differences) / n,
        tie_s=tie_s,
    )


def _central(ordered: Sequence[float]) -> tuple[float, float]:
    cut = len(ordered) // 100
    low, high = min(0.0, ordered[cut]), max(0.0, ordered[-1 - cut])
    margin = 0.05 * (high - low or 1.0)
    return low - margin, high + margin


def _thinned(items: Sequence[T], limit: int) -> list[T]:
    n = len(items)
    if n <= limit:
        return list(items)
    return [items[round(i * (n - 1) / (limit - 1))] for i in range(limit)]
