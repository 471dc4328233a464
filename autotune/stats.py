"""How sure we are that one setting beats another on the same traces: paired two-level bootstrap.

Traces are resampled first (within their regime, so that every regime keeps its weight), then the requests within each
drawn trace, the same rows for both settings. Requests of one trace are not independent of each other; resampling
requests alone would make intervals far too narrow. A bootstrap over a handful of traces is too narrow still, so its
intervals are widened as Student's t would: by the quantile for the degrees of freedom (traces less regimes; of one regime
alone, its traces less one), and by the share of variance that resampling K traces loses.

A metric of the replay as a whole (makespan, goodput, ITL) is one number per trace. Resampling a few numbers is
degenerate, so its interval is Student's t on the log ratios of the traces; with one trace in a regime there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from autotune import aggregate, metrics
from autotune.metrics import NO_LIMITS, Limits, Reduce, Sample
from autotune.records import FloatArray, IntArray, Replay
from ppas_core.errors import InvalidInput

RESAMPLES: Final = 2000
TIE_S: Final = 0.001
"""Two latencies of a request closer than this count as equal."""
MAX_DRAWN: Final = 2**18
"""Requests drawn at a time, over all resamples: what bounds the memory. Results do not depend on it."""
LONG_TRACE: Final = 1000
"""Requests from which a resample's percentile is looked for near the trace's own. Results do not depend on it."""
_DEVIATIONS: Final = 6.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate and its interval: bootstrap percentiles, widened for the number of traces."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """A setting against a reference, paired by trace and request.

    overall: metric name to improvement in per cent (positive is better), geometric mean over regimes.
    regimes: regime to metric name to improvement in per cent.
    steady: as overall, over the regimes that are not saturated; empty where none or all are.
    share_faster, share_slower: of the matched requests, by more than TIE_S in end-to-end latency.
    """

    overall: Mapping[str, Interval]
    regimes: Mapping[str, Mapping[str, Interval]]
    share_faster: Interval
    share_slower: float
    num_requests: int
    num_traces: int
    confidence: float
    steady: Mapping[str, Interval] = field(default_factory=dict)


def compare(
    setting: Sequence[Replay],
    reference: Sequence[Replay],
    names: Iterable[str],
    *,
    limits: Limits = NO_LIMITS,
    saturated: Collection[str] = (),
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedComparison:
    """Compares two settings on the same traces, given in the same order.

    saturated: regimes past saturation, without which the comparison is made once more.
    Raises InvalidInput when the traces do not match or a metric cannot be told (see `can_tell`), NoResult when a request
    failed in either.
    """
    if [replay.trace_digest for replay in setting] != [replay.trace_digest for replay in reference]:
        raise InvalidInput("the two settings were not replayed on the same traces in the same order; replay them again")
    names = tuple(names)
    if untold := [name for name in names if not can_tell(name, setting, reference, limits)]:
        raise InvalidInput(
            f"{untold[0]} is one number a trace: it needs two traces of each regime, with a value above 0"
        )
    points = {
        side: aggregate.regime_means(replays, names, limits)
        for side, replays in (("setting", setting), ("reference", reference))
    }
    rng = np.random.default_rng(seed)
    by_regime: dict[str, list[int]] = {}
    for index, replay in enumerate(setting):
        by_regime.setdefault(replay.regime, []).append(index)

    paired = [name for name in names if metrics.metric(name).per_request]
    ratios: dict[str, dict[str, FloatArray]] = {}
    faster_counts = np.zeros(resamples)
    request_counts = np.zeros(resamples)
    for regime, indices in by_regime.items():
        pairs = [(setting[i], reference[i]) for i in indices]
        drawn = _resample_regime(pairs, paired, resamples, rng)
        ratios[regime] = drawn.ratios
        faster_counts += drawn.faster
        request_counts += drawn.requests

    alpha = (1 - confidence) / 2 * 100

    def interval(value: float, draws: FloatArray, over: Collection[str]) -> Interval:
        low, high = np.nanpercentile(draws, [alpha, 100 - alpha])
        below, above = max(value - float(low), 0.0), max(float(high) - value, 0.0)
        widening = widening_factor([len(by_regime[regime]) for regime in over], confidence)
        return Interval(value, value - widening * below, value + widening * above)

    def improvement(ratio: float, draws: FloatArray, over: Collection[str]) -> Interval:
        # Widened on the log: a ratio stays above 0, so that no interval reaches beyond an improvement of 100 %.
        logs = interval(float(np.log(ratio)), np.log(draws), over)
        low, value, high = (aggregate.improvement_pct(float(np.exp(log))) for log in (logs.high, logs.value, logs.low))
        return Interval(value, low, high)

    regimes = {
        regime: {
            name: improvement(
                aggregate.ratio(name, points["setting"][regime][name], points["reference"][regime][name]),
                draws[name],
                [regime],
            )
            for name in paired
        }
        for regime, draws in ratios.items()
    }
    logs = {
        name: {
            regime: np.array([_log_ratio(name, setting[i], reference[i], limits) for i in indices])
            for regime, indices in by_regime.items()
        }
        for name in names
        if name not in paired
    }
    for name, by_name in logs.items():
        for regime, own in by_name.items():
            ratio = aggregate.ratio(name, points["setting"][regime][name], points["reference"][regime][name])
            regimes[regime][name] = _student(ratio, [own], confidence)

    def over(chosen: Collection[str]) -> dict[str, Interval]:
        """The improvement over some regimes, which weigh alike."""
        found = {}
        for name in names:
            ratio = aggregate.objective(
                name, {regime: points["setting"][regime] for regime in chosen}, points["reference"]
            )
            if name in logs:
                found[name] = _student(ratio, [logs[name][regime] for regime in chosen], confidence)
            else:
                draws = np.mean([np.log(ratios[regime][name]) for regime in chosen], axis=0)
                found[name] = improvement(ratio, np.exp(draws), chosen)
        return found

    kept = [regime for regime in by_regime if regime not in saturated]
    differences = np.concatenate([_latency_difference_s(a, b) for a, b in zip(setting, reference, strict=True)])
    share = interval(float((differences < -TIE_S).mean()), faster_counts / request_counts, by_regime)
    if share.value in (0.0, 1.0) and np.any(np.abs(differences) > TIE_S):
        # Draws of what was never seen never show it: the bound is that of K traces of which none did.
        unseen = 1 - ((1 - confidence) / 2) ** (1 / len(setting))
        share = Interval(share.value, share.value - unseen, share.value + unseen)
    return PairedComparison(
        overall=over(by_regime),
        regimes=regimes,
        steady=over(kept) if 0 < len(kept) < len(by_regime) else {},
        share_faster=Interval(share.value, max(share.low, 0.0), min(share.high, 1.0)),
        share_slower=float((differences > TIE_S).mean()),
        num_requests=len(differences),
        num_traces=len(setting),
        confidence=confidence,
    )


def can_tell(name: str, setting: Sequence[Replay], reference: Sequence[Replay], limits: Limits = NO_LIMITS) -> bool:
    """Whether an interval of this metric can be given: for one of whole replays, two traces of each regime and values."""
    if metrics.metric(name).per_request:
        return True
    traces = Counter(replay.regime for replay in setting)
    values = [metrics.value(name, replay.requests, limits) for replay in (*setting, *reference)]
    return min(traces.values()) > 1 and all(value > 0 for value in values)


def widening_factor(traces_per_regime: Sequence[int], confidence: float) -> float:
    """What a bootstrap half-width is multiplied by; tends to 1 with many traces, and is large with one per regime."""
    freedom = max(1, sum(traces_per_regime) - len(traces_per_regime))
    fewest = max(2, min(traces_per_regime))
    upper = (1 + confidence) / 2
    student, normal = student_quantile(freedom, upper), student_quantile(np.inf, upper)
    return float(student / normal * np.sqrt(fewest / (fewest - 1)))


def student_quantile(freedom: float, share: float) -> float:
    """The value below which `share` of Student's t distribution lies; with infinite freedom, of the normal one."""
    from scipy.special import stdtrit  # a quarter of a second of start-up, which most commands do not need

    return float(stdtrit(freedom, share))


def _log_ratio(name: str, setting: Replay, reference: Replay, limits: Limits) -> float:
    values = [metrics.value(name, replay.requests, limits) for replay in (setting, reference)]
    return float(np.log(aggregate.ratio(name, *values)))


def _student(ratio: float, groups: Sequence[FloatArray], confidence: float) -> Interval:
    """Improvement in per cent with Student's t interval for the mean, over the groups, of each group's mean log ratio.

    groups: log ratios of the traces of each regime, two or more each. ratio: the point estimate, a ratio of means.
    """
    variance = sum(float(np.var(own, ddof=1)) / len(own) for own in groups) / len(groups) ** 2
    freedom = sum(len(own) - 1 for own in groups)
    half = student_quantile(freedom, (1 + confidence) / 2) * variance**0.5
    low, value, high = (aggregate.improvement_pct(ratio * np.exp(step)) for step in (half, 0.0, -half))
    return Interval(float(value), float(low), float(high))


@dataclass(frozen=True, slots=True)
class _Draws:
    ratios: dict[str, FloatArray]
    faster: FloatArray
    requests: FloatArray


def _resample_regime(
    pairs: Sequence[tuple[Replay, Replay]],
    names: Sequence[str],
    resamples: int,
    rng: np.random.Generator,
) -> _Draws:
    """Bootstrap draws of one regime: per metric the ratio of means over the drawn traces, float64[resamples]."""
    slots = len(pairs)
    trace_of = rng.integers(slots, size=(resamples, slots))
    sides = {name: (np.empty((resamples, slots)), np.empty((resamples, slots))) for name in names}
    faster = np.empty((resamples, slots))
    requests = np.empty((resamples, slots))
    for trace, (setting, reference) in enumerate(pairs):
        places = np.flatnonzero(trace_of == trace)
        size = len(setting.requests)
        sampled = _sampled(names, setting, reference)
        bounds = {
            name: [_near(column, metrics.metric(name).quantile) for column in columns]
            for by_name, columns in sampled
            for name in by_name
        }
        is_faster = _latency_difference_s(setting, reference) < -TIE_S
        requests.flat[places] = size
        for chosen, rows in _row_draws(rng, places, size):
            for by_name, columns in sampled:
                for index, column in enumerate(columns):
                    drawn = column[rows]
                    for name, reduce in by_name.items():
                        near = bounds[name][index]
                        found = reduce(drawn) if near is None else metrics.percentile_near(drawn, *near)
                        sides[name][index].flat[chosen] = found
            faster.flat[chosen] = is_faster[rows].sum(axis=1)
    ratios = {}
    for name, (of_setting, of_reference) in sides.items():
        numerator, denominator = of_setting.mean(axis=1), of_reference.mean(axis=1)
        if metrics.metric(name).better == "higher":
            numerator, denominator = denominator, numerator
        # A draw in which either is zero (all tokens in one chunk: no TPOT to speak of) has no ratio.
        defined = (numerator > 0) & (denominator > 0)
        ratios[name] = np.divide(numerator, denominator, out=np.full(resamples, np.nan), where=defined)
    return _Draws(ratios, faster.sum(axis=1), requests.sum(axis=1))


def _near(column: FloatArray, quantile: float | None) -> tuple[float, float, float] | None:
    """The quantile, and between which values of `column` nearly every resample has it; None to look at all values.

    The rank of a resample's quantile p among m values has the standard deviation sqrt(m p (1 - p)).
    """
    values = np.sort(column[~np.isnan(column)])
    if quantile is None or len(values) < LONG_TRACE:
        return None
    place = (len(values) - 1) * quantile / 100
    margin = 2 + _DEVIATIONS * np.sqrt(len(values) * quantile / 100 * (1 - quantile / 100))
    low, high = int(max(place - margin, 0)), int(min(place + margin, len(values) - 1))
    return quantile, float(values[low]), float(values[high])


def _row_draws(rng: np.random.Generator, places: IntArray, size: int) -> Iterator[tuple[IntArray, IntArray]]:
    """For each of `places` `size` rows drawn with replacement: some places at a time, with rows int64[places, size].

    The stream is drawn in order, so the rows are the same however many places are taken at a time.
    """
    step = max(1, MAX_DRAWN // size)
    for start in range(0, len(places), step):
        chosen = places[start : start + step]
        yield chosen, rng.integers(size, size=(len(chosen), size))


def _sampled(
    names: Sequence[str], setting: Replay, reference: Replay
) -> list[tuple[dict[str, Reduce], list[FloatArray]]]:
    """The metrics grouped by what they reduce: metric name to its reduction, and float64[N] of either side."""
    groups: dict[Sample, dict[str, Reduce]] = {}
    for name in names:
        definition = metrics.metric(name)
        if definition.sample is None or definition.reduce is None:
            raise AssertionError(f"{name} is no metric per request")
        groups.setdefault(definition.sample, {})[name] = definition.reduce
    return [
        (by_name, [sample(replay.requests) for replay in (setting, reference)]) for sample, by_name in groups.items()
    ]


def _latency_difference_s(setting: Replay, reference: Replay) -> FloatArray:
    return metrics.latency_s(setting.requests) - metrics.latency_s(reference.requests)
