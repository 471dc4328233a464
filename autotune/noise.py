"""How much two measurements of the same setting differ, and what a study can see through that noise.

The reference is measured twice on the tuning traces (A/A). Per trace, the log ratio of the two gives the noise of one
replay; an objective averages over the traces, so its noise shrinks with their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from autotune import metrics
from autotune.metrics import NO_LIMITS, Limits
from autotune.records import Replay
from ppas_core.errors import InvalidInput

_VISIBLE: Final = 1.96 + 0.84
"""Standard errors that a difference must have to be found at 95 % confidence with 80 % power (normal approximation)."""


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The noise of one metric, in per cent.

    replay_pct: standard deviation of one replay of one trace.
    objective_pct: standard deviation of an objective measured once, over all tuning traces.
    visible_pct: smallest difference between two settings that the study can see, each measured once on every trace.
    repeats: how often every trace must be replayed per setting for a difference of the wanted size to be seen.
    num_traces: what the estimate rests on.
    """

    metric: str
    replay_pct: float
    objective_pct: float
    visible_pct: float
    repeats: int
    num_traces: int


def noise_floor(
    first: Sequence[Replay], second: Sequence[Replay], metric: str, *, wanted_pct: float, limits: Limits = NO_LIMITS
) -> NoiseFloor:
    """The noise seen between two measurements of the same setting on the same traces in the same order.

    wanted_pct: the difference that should be visible. Raises InvalidInput when the two do not match.
    """
    if [r.trace_digest for r in first] != [r.trace_digest for r in second] or not first:
        raise InvalidInput("the two measurements of the reference are not of the same traces in the same order")
    pairs = zip(first, second, strict=True)
    log_ratios = [
        math.log(metrics.value(metric, b.requests, limits) / metrics.value(metric, a.requests, limits))
        for a, b in pairs
    ]
    # The mean is kept in: a drift between the two measurements is noise to a study that cannot tell it apart.
    replay = float(np.sqrt(np.mean(np.square(log_ratios)) / 2))
    objective = replay / math.sqrt(len(log_ratios))
    visible = _VISIBLE * math.sqrt(2) * objective
    wanted = max(wanted_pct, 1e-3) / 100
    return NoiseFloor(
        metric=metric,
        replay_pct=100 * replay,
        objective_pct=100 * objective,
        visible_pct=100 * visible,
        repeats=max(1, math.ceil((visible / wanted) ** 2)),
        num_traces=len(log_ratios),
    )
