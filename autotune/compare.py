"""Two settings on the same traces, as the result files and the terminal want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autotune import aggregate, choose, metrics, stats
from autotune.metrics import Limits
from autotune.records import FloatArray, Replay
from autotune.results import Comparison, Effect, HeldOut, HeldOutRequests, Setting
from autotune.spec import StudySpec
from autotune.stats import Interval

COMPARED: tuple[str, ...] = (
    "mean_latency_s", "p95_latency_s", "mean_ttft_s", "p95_ttft_s", "mean_tpot_s", "p95_tpot_s", "makespan_s",
)  # fmt: skip
"""Metrics that every comparison shows; a study's own objectives come on top."""


def compare_settings(
    candidate: tuple[str, Sequence[Replay]],
    reference: tuple[str, Sequence[Replay]],
    spec: StudySpec,
    preferred: Sequence[str],
    *,
    min_gain_pct: float | None = None,
) -> Comparison:
    """`candidate` against `reference`, each (role, replays of the same traces). Raises NoResult if requests failed.

    min_gain_pct: the smallest gain that is called better; left out, the study file's own.
    """
    names = tuple(dict.fromkeys([*COMPARED, *spec.objectives]))
    names = tuple(name for name in names if _defined(name, [*candidate[1], *reference[1]], spec.metric_limits()))
    paired = stats.compare(
        candidate[1], reference[1], names, limits=spec.metric_limits(), confidence=spec.confidence, seed=spec.seed
    )
    verdict = choose.verdict(
        paired, preferred, min_gain_pct=spec.min_gain_pct if min_gain_pct is None else min_gain_pct
    )
    if candidate[1][0].params == reference[1][0].params:
        sentence = f"No clear winner: {candidate[0]} is the same setting as {reference[0]}."
    else:
        sentence = choose.sentence(candidate[0], reference[0], paired, preferred, verdict, candidate[1][0].origin)
    return Comparison(
        candidate=candidate[0],
        reference=reference[0],
        preferred_metric=preferred[0],
        overall=_effects(paired.overall),
        regimes={regime: _effects(effects) for regime, effects in paired.regimes.items()},
        share_faster=paired.share_faster.value,
        share_faster_interval=(paired.share_faster.low, paired.share_faster.high),
        share_slower=paired.share_slower,
        tie_s=stats.TIE_S,
        num_requests=paired.num_requests,
        num_traces=paired.num_traces,
        confidence=paired.confidence,
        verdict=verdict,
        sentence=sentence,
        costs=choose.costs(paired, preferred),
    )


def held_out_result(role: str, replays: Sequence[Replay], limits: Limits) -> HeldOut:
    """One setting's replays of the held-out traces as a result."""
    by_regime: dict[str, list[Replay]] = {}
    for replay in replays:
        by_regime.setdefault(replay.regime, []).append(replay)
    spread = {
        regime: {name: _range([metrics.value(name, r.requests, limits) for r in group]) for name in metrics.METRICS}
        for regime, group in by_regime.items()
    }
    return HeldOut(
        role=role,
        setting=Setting.of(replays[0].params),
        regimes=aggregate.regime_means(replays, metrics.METRICS, limits),
        regime_spread=spread,
        branch_steps=aggregate.sum_branches(replays),
        requests=_requests(replays),
    )


def _requests(replays: Sequence[Replay]) -> HeldOutRequests:
    def column(of: FloatArray) -> list[float | None]:
        return [None if np.isnan(value) else float(value) for value in of]

    return HeldOutRequests(
        trace=[r.trace_name for r in replays for _ in range(len(r.requests))],
        regime=[r.regime for r in replays for _ in range(len(r.requests))],
        latency_s=column(np.concatenate([metrics.latency_s(r.requests) for r in replays])),
        ttft_s=column(np.concatenate([metrics.ttft_s(r.requests) for r in replays])),
        tpot_s=column(np.concatenate([metrics.tpot_s(r.requests) for r in replays])),
        prompt_tokens=[int(n) for r in replays for n in r.requests.prompt_tokens],
        output_tokens=[int(n) for r in replays for n in r.requests.output_tokens],
    )


def _defined(name: str, replays: Sequence[Replay], limits: Limits) -> bool:
    """Whether the metric has a positive value in every replay: one-token outputs have no TPOT, for instance."""
    values = [metrics.value(name, replay.requests, limits) for replay in replays]
    return all(np.isfinite(value) and value > 0 for value in values)


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values))


def _effects(intervals: Mapping[str, Interval]) -> dict[str, Effect]:
    return {
        name: Effect(improvement_pct=interval.value, low_pct=interval.low, high_pct=interval.high)
        for name, interval in intervals.items()
    }
