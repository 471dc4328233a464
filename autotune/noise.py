"""How much two measurements of the same setting differ, and what a study can see through that noise.

The reference is measured several times on the tuning traces (A/A). Per trace, the spread of the logarithms gives the
noise of one replay; an objective averages over the traces of each regime, so its noise shrinks with their number. Noise comes in
bursts, which a few measurements in a row may miss: whatever else is measured twice during a study, and settings that
did the very same as each other, widen it later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from autotune import metrics
from autotune.metrics import NO_LIMITS, Limits
from autotune.records import FloatArray, Replay
from autotune.stats import student_quantile
from ppas_core.errors import InvalidInput, NoResult

HOPELESS_PCT: Final = 20.0
"""A noise floor above this hides any gain that P-PAS was ever seen to give."""


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The noise of one metric, in per cent.

    replay_pct: standard deviation of one replay of one trace.
    objective_pct: standard deviation of an objective measured once, over all tuning traces; regimes weigh alike.
    visible_pct: smallest difference between two settings that the study can see, each measured once on every trace.
    repeats: how often every trace must be replayed per setting for a difference of the wanted size to be seen.
    num_traces: what the estimate rests on. further: measurements beyond the A/A test that widened it, 0 where it did not
    need to be. freedom: degrees of freedom of the estimate.
    """

    metric: str
    replay_pct: float
    objective_pct: float
    visible_pct: float
    repeats: int
    num_traces: int
    further: int = 0
    freedom: int = 0


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
        raise undefined_on(metric, trace)
    regimes = Counter(replay.regime for replay in runs[0])
    return pooled([np.log(values)], metric, traces_per_regime=list(regimes.values()), wanted_pct=wanted_pct)


def pooled(
    groups: Sequence[FloatArray], metric: str, *, traces_per_regime: Sequence[int], wanted_pct: float, further: int = 0
) -> NoiseFloor:
    """The noise seen within groups of measurements of which each measured the same thing again and again.

    groups: logs of the metric, float64[measurements, traces] each, with two measurements or more; the traces of one
    group need not be those of another. traces_per_regime: of the tuning traces. wanted_pct, further: as in `noise_floor`
    and `NoiseFloor`.
    """
    # Variance per trace: a drift between the measurements stays in, since a study cannot tell it from noise.
    freedom = sum((len(logs) - 1) * logs.shape[1] for logs in groups)
    squares = sum(float(((logs - logs.mean(axis=0)) ** 2).sum()) for logs in groups)
    replay = math.sqrt(squares / freedom)
    objective = replay * math.sqrt(variance_share(traces_per_regime))
    visible = _standard_errors(freedom) * math.sqrt(2) * objective
    wanted = max(wanted_pct, 1e-3) / 100
    return NoiseFloor(
        metric=metric,
        replay_pct=100 * replay,
        objective_pct=100 * objective,
        visible_pct=100 * visible,
        repeats=max(1, math.ceil((visible / wanted) ** 2)),
        num_traces=sum(traces_per_regime),
        further=further,
        freedom=freedom,
    )


def half_width(floor: NoiseFloor, traces_per_regime: Sequence[int], confidence: float) -> float:
    """What the noise alone gives as half the interval of a difference between two settings: a log ratio.

    Each was replayed once on as many traces of each regime, and the regimes weigh alike.
    """
    student = student_quantile(floor.freedom, (1 + confidence) / 2)
    return student * floor.replay_pct / 100 * math.sqrt(2 * variance_share(traces_per_regime))


def variance_share(traces_per_regime: Sequence[int]) -> float:
    """Variance of a mean over regimes that weigh alike, in units of one trace's: 1 / traces where all have as many."""
    return sum(1 / count for count in traces_per_regime) / len(traces_per_regime) ** 2


def undefined_on(metric: str, trace: str) -> NoResult:
    """What is raised where the reference leaves `metric` without a value above 0 on `trace`."""
    return NoResult(
        f"{metric} of the reference is zero or undefined on trace {trace!r}, so its noise is not known; choose another "
        "objective, other limits, or traces on which it says something"
    )


def _standard_errors(freedom: int) -> float:
    """How many standard errors a difference must have to be found at 95 % confidence with 80 % power.

    Student's t, since the noise itself is estimated with `freedom` degrees of freedom: 2.8 with many, 3.4 with six.
    """
    return student_quantile(freedom, 0.975) + student_quantile(freedom, 0.8)
