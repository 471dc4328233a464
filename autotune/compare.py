"""Two settings on the same traces, as the result files and the terminal want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autotune import aggregate, choose, metrics, stats
from autotune.metrics import Limits
from autotune.records import FloatArray, Origin, Replay
from autotune.results import Comparison, Effect, HeldOut, HeldOutRequests, Setting, Verdict
from autotune.spec import StudySpec
from autotune.stats import Interval, PairedComparison

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
    limits = spec.metric_limits()
    names = tuple(
        name
        for name in dict.fromkeys([*COMPARED, *spec.objectives])
        if _defined(name, candidate[1], limits)
        and _defined(name, reference[1], limits)
        and stats.can_tell(name, candidate[1], reference[1], limits)
    )
    paired = stats.compare(candidate[1], reference[1], names, limits=limits, confidence=spec.confidence, seed=spec.seed)
    asked_pct = spec.min_gain_pct if min_gain_pct is None else min_gain_pct
    verdict, sentence = _judge(candidate, reference, paired, preferred, asked_pct)
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


def _judge(
    candidate: tuple[str, Sequence[Replay]],
    reference: tuple[str, Sequence[Replay]],
    paired: PairedComparison,
    preferred: Sequence[str],
    asked_pct: float,
) -> tuple[Verdict, str]:
    """The verdict and the sentence that goes with it."""
    origin = candidate[1][0].origin
    if candidate[1][0].params == reference[1][0].params:
        return "no clear winner", f"No clear winner: {candidate[0]} is the same setting as {reference[0]}."
    if missing := [name for name in preferred if name not in paired.overall]:
        definition = metrics.metric(missing[0])
        reason = f"{definition.label} is zero or undefined in a load regime of the {origin} held-out traces"
        if not definition.per_request:
            reason += ", or one of them has a single trace, which says nothing of how traces differ"
        return "inconclusive", f"{candidate[0]} against {reference[0]} is inconclusive: {reason}."
    verdict = choose.verdict(paired, preferred, min_gain_pct=asked_pct)
    hidden = max(paired.overall[name].high for name in preferred)
    if origin is not Origin.LIVE or verdict != "no clear winner" or hidden < asked_pct:
        return verdict, choose.sentence(candidate[0], reference[0], paired, preferred, verdict, origin)
    # A gain that is worth having is not excluded: more measurements could tell, the interval shrinks as their root.
    needed = max(_half_width(paired.overall[name]) for name in preferred) / max(asked_pct, 0.1)
    seconds = sum(metrics.makespan_s(replay.requests) for replay in (*candidate[1], *reference[1]))
    minutes = seconds * (needed**2 - 1) / 60
    sentence = choose.sentence(candidate[0], reference[0], paired, preferred, "inconclusive", origin)
    return (
        "inconclusive",
        f"{sentence} To see {asked_pct:.1f} %, about {max(minutes, 1):.0f} more minutes of replays are needed.",
    )


def _half_width(interval: Interval) -> float:
    return (interval.high - interval.low) / 2


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
    """Whether the metric has a positive mean in every regime: with one-token outputs there is no TPOT, for instance."""
    means = aggregate.regime_means(replays, [name], limits)
    return all(np.isfinite(regime[name]) and regime[name] > 0 for regime in means.values())


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values))


def _effects(intervals: Mapping[str, Interval]) -> dict[str, Effect]:
    return {
        name: Effect(improvement_pct=interval.value, low_pct=interval.low, high_pct=interval.high)
        for name, interval in intervals.items()
    }
