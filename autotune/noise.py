"""How much two measurements of the same setting differ, and what a study can see through that noise.

The reference is measured several times on the tuning traces (A/A). Per trace, the spread of the logarithms gives the
noise of one replay; an objective averages over the traces, so its noise shrinks with their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune import metrics
from autotune.metrics import NO_LIMITS, Limits
from autotune.records import Replay
from autotune.stats import student_quantile
from ppas_core.errors import InvalidInput, NoResult


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
    runs: Sequence[Sequence[Replay]], metric: str, *, wanted_pct: float, limits: Limits = NO_LIMITS
) -> NoiseFloor:
    """The noise seen between several measurements of the same setting, each on the same traces in the same order.

    wanted_pct: the difference that should be visible. Raises InvalidInput for fewer than two runs or other traces,
    NoResult where the metric is zero or undefined on a trace.
    """
    digests = [[replay.trace_digest for replay in run] for run in runs]
    if len(runs) < 2 or not digests[0] or any(other != digests[0] for other in digests):
        raise InvalidInput("the noise needs two or more measurements of the same traces in the same order")
    values = np.array([[metrics.value(metric, replay.requests, limits) for replay in run] for run in runs])
    if not np.all(values > 0):
        trace = runs[0][int(np.argmax(~np.all(values > 0, axis=0)))].trace_name
        raise NoResult(
            f"{metric} of the reference is zero or undefined on trace {trace!r}, so its noise is not known; choose "
            "another objective, other limits, or traces on which it says something"
        )
    logs = np.log(values)
    # Variance per trace: a drift between the runs stays in, since a study cannot tell it from noise.
    replay = float(np.sqrt(np.mean(np.var(logs, axis=0, ddof=1))))
    num_traces = len(digests[0])
    objective = replay / math.sqrt(num_traces)
    visible = _standard_errors((len(runs) - 1) * num_traces) * math.sqrt(2) * objective
    wanted = max(wanted_pct, 1e-3) / 100
    return NoiseFloor(
        metric=metric,
        replay_pct=100 * replay,
        objective_pct=100 * objective,
        visible_pct=100 * visible,
        repeats=max(1, math.ceil((visible / wanted) ** 2)),
        num_traces=num_traces,
    )


def _standard_errors(freedom: int) -> float:
    """How many standard errors a difference must have to be found at 95 % confidence with 80 % power.

    Student's t, since the noise itself is estimated with `freedom` degrees of freedom: 2.8 with many, 3.4 with six.
    """
    return student_quantile(freedom, 0.975) + student_quantile(freedom, 0.8)
