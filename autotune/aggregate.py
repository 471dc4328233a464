"""How replays become one number per setting, as the paper does it.

Mean over a regime's traces, ratio to the reference setting on the same traces, geometric mean over the regimes. So an
objective is unit-free, 1 for the reference, and an idle regime weighs as much as a busy one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autotune import metrics
from autotune.metrics import NO_LIMITS, Limits
from autotune.records import Replay
from ppas_core.errors import NoResult

_WIDEST = 4.0
"""Upper over lower end of a ratio's interval beyond which its numbers would only mislead."""

RegimeMeans = dict[str, dict[str, float]]
"""Regime to metric name to mean over the regime's traces."""


def regime_means(replays: Sequence[Replay], names: Iterable[str], limits: Limits = NO_LIMITS) -> RegimeMeans:
    """Mean of each metric over the traces of each regime, in the order of first appearance.

    Raises NoResult, with the trace, the counts by reason and what the first of each says, when a request failed: a run
    that lost requests has no latency.
    """
    sums: dict[str, dict[str, list[float]]] = {}
    names = tuple(names)
    for replay in replays:
        if failures := replay.requests.failures():
            reasons = "; ".join(_in_words(replay, *failure) for failure in sorted(failures.items()))
            raise NoResult(f"trace {replay.trace_name!r}: {reasons}")
        regime = sums.setdefault(replay.regime, {name: [] for name in names})
        for name in names:
            regime[name].append(metrics.value(name, replay.requests, limits))
    return {
        regime: {name: math.fsum(values) / len(values) for name, values in by_name.items()}
        for regime, by_name in sums.items()
    }


def _in_words(replay: Replay, reason: str, count: int) -> str:
    """`19 of 19 requests: HTTP 400: …`; where no server answered with a status, the reason's own word as well."""
    detail, of = replay.failure_details.get(reason, ""), f"of {len(replay.requests)} requests"
    if detail.startswith("HTTP "):
        return f"{count} {of}: {detail}"
    return f"{count} {reason} {of}" + (f": {detail}" if detail else "")


def means_of_traces(by_trace: Mapping[str, Mapping[str, float]], regimes: Mapping[str, str]) -> RegimeMeans:
    """As `regime_means`, from each trace's values. regimes: the traces that count, with the regime of each."""
    rows: dict[str, list[Mapping[str, float]]] = {}
    for trace, regime in regimes.items():
        rows.setdefault(regime, []).append(by_trace[trace])
    return {
        regime: {name: math.fsum(row[name] for row in values) / len(values) for name in values[0]}
        for regime, values in rows.items()
    }


def ratio(name: str, setting: float, reference: float) -> float:
    """Setting over reference where lower is better, the inverse where higher is: below 1 is an improvement."""
    numerator, denominator = (setting, reference) if metrics.metric(name).better == "lower" else (reference, setting)
    return numerator / denominator if denominator > 0 else math.nan


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN when a value is not a positive number, or there is none."""
    values = tuple(values)
    if not values or not all(value > 0 for value in values):
        return math.nan
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def objective(
    name: str, setting: Mapping[str, Mapping[str, float]], reference: Mapping[str, Mapping[str, float]]
) -> float:
    """The paper's aggregate of one metric: geometric mean over regimes of the ratio to the reference.

    Raises NoResult, naming the regime, when the metric is undefined there.
    """
    ratios = {regime: ratio(name, means[name], reference[regime][name]) for regime, means in setting.items()}
    for regime, value in ratios.items():
        if not (math.isfinite(value) and value > 0):
            raise NoResult(f"{name} is undefined in regime {regime!r}: no request there has a value, or it is zero")
    return geometric_mean(ratios.values())


def improvement_pct(ratio_value: float) -> float:
    """The paper's improvement of a ratio, in per cent: (1 - R) * 100; positive is better."""
    return (1 - ratio_value) * 100


def is_measurable(low_pct: float, high_pct: float) -> bool:
    """Whether an interval of an improvement says anything: not where it reaches to both sides of 0 and its ends are more
    than a factor of four apart, as from half to twice the reference.
    """
    if not low_pct < 0 < high_pct:
        return True
    return (100 - low_pct) <= _WIDEST * (100 - high_pct)


def is_within_error(improvement_pct: float, simulator_error_pct: float | None) -> bool:
    """Whether a change is smaller than the simulator's own error; not where that is unknown, or nothing is simulated."""
    return simulator_error_pct is not None and abs(improvement_pct) < simulator_error_pct


def client_lag(replays: Iterable[Replay]) -> dict[str, float] | None:
    """How late the client of live replays was: the highest p50_s, p99_s and max_s of them, and how many replays had to
    be repeated for it (`repeated`). None where nothing was live.
    """
    lags = [replay.client for replay in replays if replay.client is not None]
    if not lags:
        return None
    worst = {name: max(getattr(lag, name) for lag in lags) for name in ("p50_s", "p99_s", "max_s")}
    return {**worst, "repeated": sum(lag.attempts - 1 for lag in lags)}


def cached_share(replays: Iterable[Replay]) -> float | None:
    """Which share of the prompt tokens came out of the prefix cache, over the requests of which that is known; None where
    it is known of none.
    """
    cached = prompts = 0
    for replay in replays:
        if (tokens := replay.requests.cached_tokens) is not None:
            known = tokens >= 0
            cached += int(tokens[known].sum())
            prompts += int(replay.requests.prompt_tokens[known].sum())
    return cached / prompts if prompts else None


def sum_branches(replays: Iterable[Replay]) -> dict[str, int]:
    """Scheduler steps by branch over all `replays`."""
    totals: dict[str, int] = {}
    for replay in replays:
        for branch, steps in replay.branch_steps.items():
            totals[branch] = totals.get(branch, 0) + steps
    return totals
