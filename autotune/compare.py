"""Two settings on the same traces, as the result files and the terminal want it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from autotune import aggregate, choose, metrics, stats
from autotune.alike import acted_alike
from autotune.metrics import Limits
from autotune.noise import HOPELESS_PCT, half_width
from autotune.records import FloatArray, Origin, Replay
from autotune.results import Comparison, Effect, HeldOut, HeldOutRequests, Setting, Verdict
from autotune.spec import StudySpec
from autotune.stats import Interval, PairedComparison
from autotune.study_noise import StudyNoise

COMPARED: tuple[str, ...] = (
    "mean_latency_s", "p95_latency_s", "mean_ttft_s", "p95_ttft_s", "mean_tpot_s", "p95_tpot_s", "makespan_s",
)  # fmt: skip
"""Metrics that every comparison shows; a study's own objectives come on top."""
_LEAST_WORTH_PCT: Final = 0.1
_MOST_MINUTES: Final = 24 * 60
_MOST_TRACES: Final = 10_000


def compare_settings(
    candidate: tuple[str, Sequence[Replay]],
    reference: tuple[str, Sequence[Replay]],
    spec: StudySpec,
    preferred: Sequence[str],
    *,
    noise: StudyNoise | None = None,
    saturated: Collection[str] = (),
    simulator_error_pct: float | None = None,
) -> Comparison:
    """`candidate` against `reference`, each (role, replays of the same traces). Raises NoResult if requests failed.

    noise: of the study, where measurements vary: no interval is narrower than it alone makes them, and a winner must be
    ahead by what it lets one see. saturated: regimes past saturation, which count in the verdict, and without which the
    effect is given once more. simulator_error_pct: of a profile, to say where an effect is smaller.
    """
    limits = spec.metric_limits()
    names = tuple(
        name
        for name in dict.fromkeys([*COMPARED, *spec.objectives])
        if _defined(name, candidate[1], limits)
        and _defined(name, reference[1], limits)
        and stats.can_tell(name, candidate[1], reference[1], limits)
    )
    paired = stats.compare(
        candidate[1],
        reference[1],
        names,
        limits=limits,
        saturated=saturated,
        confidence=spec.confidence,
        seed=spec.seed,
    )
    left_out = [regime for regime in paired.regimes if regime in saturated] if paired.steady else []
    if noise is not None and candidate[1][0].params != reference[1][0].params:
        paired = _widened(paired, noise, Counter(replay.regime for replay in reference[1]), left_out)
    verdict, sentence = _judge(candidate, reference, paired, preferred, spec, noise, left_out, simulator_error_pct)
    same = acted_alike(candidate[1], reference[1])
    return Comparison(
        candidate=candidate[0],
        reference=reference[0],
        preferred_metric=preferred[0],
        overall=_effects(paired.overall),
        steady=_effects(paired.steady) if paired.steady else None,
        saturated=left_out,
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
        costs=[] if same else choose.costs(paired, preferred, min_gain_pct=spec.min_gain_pct),
        did_the_same=same,
    )


def _widened(
    paired: PairedComparison, noise: StudyNoise, traces: Mapping[str, int], left_out: Collection[str]
) -> PairedComparison:
    """The comparison with no interval narrower than the noise alone makes it. traces: how many each regime has."""
    kept = [count for regime, count in traces.items() if regime not in left_out]

    def wide(name: str, interval: Interval, per_regime: Sequence[int]) -> Interval:
        floor = noise.of(name)
        if floor is None:
            return interval
        factor = math.exp(half_width(floor, per_regime, paired.confidence))
        ratio = 1 - interval.value / 100
        low, high = (aggregate.improvement_pct(ratio * by) for by in (factor, 1 / factor))
        return Interval(interval.value, min(interval.low, low), max(interval.high, high))

    return replace(
        paired,
        overall={name: wide(name, found, list(traces.values())) for name, found in paired.overall.items()},
        steady={name: wide(name, found, kept) for name, found in paired.steady.items()},
        regimes={
            regime: {name: wide(name, found, [traces[regime]]) for name, found in effects.items()}
            for regime, effects in paired.regimes.items()
        },
    )


def _judge(
    candidate: tuple[str, Sequence[Replay]],
    reference: tuple[str, Sequence[Replay]],
    paired: PairedComparison,
    preferred: Sequence[str],
    spec: StudySpec,
    noise: StudyNoise | None,
    left_out: Sequence[str],
    simulator_error_pct: float | None,
) -> tuple[Verdict, str]:
    """The verdict and the sentence that goes with it."""
    names, origin = (candidate[0], reference[0]), candidate[1][0].origin
    floor_pct = 0.0 if noise is None else max(entry.visible_held_out_pct for entry in noise.infos)
    if candidate[1][0].params == reference[1][0].params:
        same = f"{names[0]} is the same setting as {names[1]}"
        if floor_pct > HOPELESS_PCT:
            return "inconclusive", f"Inconclusive: {same}, and no gain below {floor_pct:.0f} % could have been seen."
        return "unchanged", f"Unchanged: {same}."
    if missing := [name for name in preferred if name not in paired.overall]:
        definition = metrics.metric(missing[0])
        reason = f"{definition.label} is zero or undefined in a load regime of the {origin} held-out traces"
        if not definition.per_request:
            reason += ", or one of them has a single trace, which says nothing of how traces differ"
        return "inconclusive", f"{names[0]} against {names[1]} is inconclusive: {reason}."
    if acted_alike(candidate[1], reference[1]):
        return "no clear winner", (
            f"No clear winner between {names[0]} and {names[1]}: neither capped a step of these traces, and both have a "
            f"budget of {candidate[1][0].params.b_max}, so they did the same; what was measured between them is noise."
            if origin is Origin.LIVE or noise is not None
            else f"No clear winner between {names[0]} and {names[1]}: they did the same at every step of these traces."
        )
    verdict = choose.verdict(paired, preferred, min_gain_pct=spec.min_gain_pct, floor_pct=floor_pct)
    is_within = verdict in ("better", "worse") and aggregate.is_within_error(
        paired.overall[preferred[0]].value, simulator_error_pct
    )
    sentence = choose.sentence(*names, paired, preferred, verdict, origin, simulator_error_pct if is_within else None)
    if left_out:
        sentence = f"{sentence} {choose.without_saturated(paired, preferred, verdict, left_out)}"
    if verdict == "inconclusive":
        seconds = sum(metrics.makespan_s(replay.requests) for replay in (*candidate[1], *reference[1]))
        sentence = f"{sentence} {_needed(paired, preferred, spec.min_gain_pct, origin, seconds)}"
    return verdict, sentence


def _needed(
    paired: PairedComparison, preferred: Sequence[str], worth_pct: float, origin: Origin, seconds: float
) -> str:
    """What would tell whether there is a gain worth having: an interval shrinks as the root of its measurements.

    seconds: what the comparison's replays took.
    """
    worth_pct = max(worth_pct, _LEAST_WORTH_PCT)
    half = max(_half_width(paired.overall[name]) for name in preferred)
    more = max((half / (worth_pct / 100)) ** 2, 2.0)  # an interval already as narrow lies across the bound
    unseen = f"A gain of {worth_pct:g} % is not measurable here: "
    if origin is Origin.LIVE:
        minutes = seconds * (more - 1) / 60
        if minutes > _MOST_MINUTES:
            return f"{unseen}it would take more than a day of replays."
        return f"To see a gain of {worth_pct:g} %, about {max(minutes, 1):.0f} more minutes of replays are needed."
    traces = more * paired.num_traces
    if traces > _MOST_TRACES:
        return f"{unseen}it would take more than {_MOST_TRACES:,} held-out traces."
    return f"To see a gain of {worth_pct:g} %, about {math.ceil(traces)} held-out traces are needed."


def _half_width(interval: Interval) -> float:
    """Half an interval's width as a log ratio."""
    if interval.high >= 100 or interval.low == -math.inf:
        return math.inf
    return math.log((100 - interval.low) / (100 - interval.high)) / 2


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
