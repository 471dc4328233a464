"""Whether the pick holds up when the traffic is slower or faster than it was, and where a queue only ever grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from autotune import aggregate
from autotune.evaluate import Evaluator
from autotune.metrics import Limits
from autotune.records import Replay, RequestRecords
from autotune.results import RobustnessPoint
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from traces.format import Trace
from traces.shape import scale_time

_GROWN: Final = 2.0
"""Requests in flight when the last one arrives, over their mean before, from which a queue counts as growing."""
_FEW: Final = 8
"""Fewer requests in flight than this are no queue, whatever their mean was."""


def at_rates(traces: Sequence[Trace], factor: float) -> list[Trace]:
    """The traces at `factor` times their rate, by scaling time; bursts stay bursts."""
    if factor == 1.0:
        return list(traces)
    return [scale_time(trace, 1 / factor, f"{trace.name} at {factor:g}x") for trace in traces]


def robustness(
    evaluator: Evaluator,
    traces: Sequence[Trace],
    factors: Sequence[float],
    pick: PolicyParams,
    reference: PolicyParams,
    names: Sequence[str],
    limits: Limits,
) -> list[RobustnessPoint]:
    """The pick against the reference on `traces` at each of `factors` times the rate and as they are, ascending.

    A rate at which a setting cannot be measured is left out.
    """
    points = []
    for factor in sorted({1.0, *factors}):
        scaled = at_rates(traces, factor)
        try:
            sides = [[evaluator.replay(params, trace) for trace in scaled] for params in (pick, reference)]
            setting, base = (aggregate.regime_means(side, names, limits) for side in sides)
            points.append(
                RobustnessPoint(
                    rate_factor=factor,
                    origin=evaluator.origin,
                    overall={
                        name: aggregate.improvement_pct(aggregate.objective(name, setting, base)) for name in names
                    },
                    regimes={
                        regime: {
                            name: aggregate.improvement_pct(aggregate.ratio(name, means[name], base[regime][name]))
                            for name in names
                        }
                        for regime, means in setting.items()
                    },
                    saturated=saturated_regimes([*sides[0], *sides[1]]),
                )
            )
        except (InvalidInput, NoResult):
            continue
    return points


def regimes_at(
    evaluator: Evaluator,
    traces: Sequence[Trace],
    factors: Sequence[float],
    params: PolicyParams,
    names: Sequence[str],
    limits: Limits,
) -> Mapping[str, Mapping[str, float]]:
    """Regime and rate, such as `λ=0.8 at 1.3x`, to metric name to mean, for a setting. Raises NoResult as a replay does."""
    found: dict[str, Mapping[str, float]] = {}
    for factor in factors:
        replays = [evaluator.replay(params, trace) for trace in at_rates(traces, factor)]
        for regime, means in aggregate.regime_means(replays, names, limits).items():
            found[f"{regime} at {factor:g}x"] = means
    return found


def saturated_regimes(replays: Sequence[Replay]) -> list[str]:
    """Regimes in most of whose replays the queue still grew when the last request arrived."""
    by_regime: dict[str, list[bool]] = {}
    for replay in replays:
        by_regime.setdefault(replay.regime, []).append(still_growing(replay.requests))
    return [regime for regime, found in by_regime.items() if sum(found) * 2 > len(found)]


def still_growing(records: RequestRecords) -> bool:
    """Whether many more requests were in flight when the last one arrived than on average until then.

    A server that keeps up has as many at the end as before; one that does not piles them up, and its latencies say how
    long the trace was rather than how fast the server is.
    """
    arrival_s, done_s = records.planned_s, records.last_token_s
    ok = np.isfinite(done_s)
    end_s = float(arrival_s.max())
    span_s = end_s - float(arrival_s.min())
    if span_s <= 0:
        return False
    at_end = int(np.count_nonzero(done_s[ok] > end_s))
    mean = float(np.sum(np.minimum(done_s[ok], end_s) - arrival_s[ok])) / span_s
    # Linear growth from nothing gives 2; a burst that ends with the trace gives more, and is no steady state either.
    return at_end >= _FEW and at_end > 0.8 * _GROWN * mean
