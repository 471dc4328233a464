"""How sure the place of a trial on the front is: the search's traces are drawn again, and the front is read off anew.

Plain data. Traces are drawn within their regime, the same for all trials, so that what is common to them cancels. As in
the comparisons the draws are widened, because a bootstrap over a handful of traces is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autotune.pareto import on_front
from autotune.results import StudyResults, Trial
from autotune.stats import student_quantile, widening_factor
from reports.numbers import finite, lower_is_better

DRAWS: Final = 400
CONFIDENCE: Final = 0.95

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Odds:
    """What is known of the places of trials, by trial number.

    source: `traces` (drawn again), `noise` (the A/A measurement, where there are too few traces), or None.
    chance: share of the draws with the trial on the front, from 0 to 1; of the search's trials, empty without traces.
    gain_pct: objective metric to the interval of its gain in per cent. correlation: of the gains in two objectives,
    where it is known. num_traces: what the draws are from.
    """

    source: str | None = None
    chance: Mapping[int, float] = field(default_factory=dict)
    gain_pct: Mapping[int, Mapping[str, Interval]] = field(default_factory=dict)
    correlation: Mapping[int, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    num_traces: int = 0

    def interval(self, trial: Trial, metric: str) -> Interval | None:
        """The interval of the trial's gain in a metric; None where it is not known."""
        return self.gain_pct.get(trial.number, {}).get(metric)


def front_odds(results: StudyResults) -> Odds:
    """The odds of every finished trial."""
    return _from_traces(results) or _from_noise(results) or Odds()


def _from_traces(results: StudyResults) -> Odds | None:
    metrics = [objective.metric for objective in results.objectives]
    reference = next((t for t in results.trials if t.number == results.reference_trial), None)
    if reference is None or not metrics:
        return None
    regime_of = {trace.name: trace.regime for trace in results.traces if trace.purpose == "tuning"}
    names = [name for name in reference.by_trace if name in regime_of]
    regimes = list(dict.fromkeys(regime_of[name] for name in names))
    columns = {regime: [i for i, name in enumerate(names) if regime_of[name] == regime] for regime in regimes}
    if not columns or min(map(len, columns.values())) < 2:
        return None
    known = [trial for trial in results.trials if trial.state == "ok" and (_row(trial, names, metrics) is not None)]
    if reference not in known:
        return None
    values = np.array([_row(trial, names, metrics) for trial in known])  # trial, trace, metric; above 0
    place = known.index(reference)
    flip = np.array([1.0 if lower_is_better(metric) else -1.0 for metric in metrics])
    rng = np.random.default_rng(0)
    point = np.zeros((len(known), len(metrics)))
    drawn = np.zeros((DRAWS, len(known), len(metrics)))
    for places in columns.values():
        mine = values[:, places, :]
        means = np.log(mine.mean(axis=1))
        point += flip * (means - means[place]) / len(columns)
        size = len(places)
        picks = rng.integers(size, size=(DRAWS, size))
        weights = np.apply_along_axis(np.bincount, 1, picks, minlength=size) / size
        again = np.log(np.einsum("dk,tkm->dtm", weights, mine))
        drawn += flip * (again - again[:, place : place + 1, :]) / len(columns)
    factor = widening_factor([len(places) for places in columns.values()], CONFIDENCE)
    drawn = point + factor * (drawn - point)
    drawn += _noise(results, metrics, drawn, known, place)
    low, high = np.percentile(drawn, [100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2], axis=0)
    gain = {
        trial.number: {
            metric: (100 * (1 - float(np.exp(high[i, m]))), 100 * (1 - float(np.exp(low[i, m]))))
            for m, metric in enumerate(metrics)
        }
        for i, trial in enumerate(known)
    }
    pairs = [(a, b) for a in range(len(metrics)) for b in range(len(metrics)) if a != b]
    correlation = {
        trial.number: {(metrics[a], metrics[b]): _correlation(drawn[:, i, a], drawn[:, i, b]) for a, b in pairs}
        for i, trial in enumerate(known)
    }
    rivals = [i for i, trial in enumerate(known) if trial.arm != "random"]
    share = _share_on_front(drawn[:, rivals, :])
    chance = {known[i].number: float(value) for i, value in zip(rivals, share, strict=True)}
    return Odds("traces", chance, gain, correlation, len(names))


def _noise(
    results: StudyResults, metrics: list[str], drawn: NDArray[np.float64], trials: list[Trial], reference: int
) -> NDArray[np.float64]:
    """What the draws lack of the noise that the measurements of every trial have, drawn as well: a few traces drawn again
    may show less. Of draws x trials x metrics; the reference is 0 by definition, and its noise is every trial's.
    """
    known = {
        entry.metric: pct / 100
        for entry in (*results.noise, *results.noise_beside)
        if (pct := finite(entry.objective_pct)) is not None
    }
    if not known:
        return np.zeros(())
    single = np.array([known.get(metric, 0.0) ** 2 for metric in metrics])
    variance = single / trials[reference].measurements + single / np.array([[trial.measurements] for trial in trials])
    lacking = np.sqrt(np.maximum(0.0, variance - drawn.var(axis=0)))
    lacking[reference] = 0.0
    found: NDArray[np.float64] = np.random.default_rng(1).normal(size=drawn.shape) * lacking
    return found


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    spread = float(one.std() * other.std())
    return float(((one - one.mean()) * (other - other.mean())).mean() / spread) if spread > 0 else 0.0


def _row(trial: Trial, names: list[str], metrics: list[str]) -> list[list[float]] | None:
    """The trial's values by trace and metric; None when one is missing or not above 0."""
    rows = [[finite(trial.by_trace.get(name, {}).get(metric)) for metric in metrics] for name in names]
    known = [[value for value in row if value is not None and value > 0] for row in rows]
    return known if all(len(row) == len(metrics) for row in known) else None


def _share_on_front(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of draws x trials x metrics, lower is better: how often each trial is beaten by none."""
    counts = np.zeros(drawn.shape[1])
    for costs in drawn:
        order = np.lexsort(costs.T[::-1])
        ordered = costs[order]
        if costs.shape[1] <= 2:  # sorted by the first, a trial is beaten when an earlier one is as good in the last
            last = ordered[:, -1]
            before = np.concatenate(([np.inf], np.minimum.accumulate(last)[:-1]))
            same = np.concatenate(([False], (ordered[1:] == ordered[:-1]).all(axis=1)))
            kept = last < before
            for i in np.flatnonzero(same):
                kept[i] = kept[i - 1]
            counts[order] += kept
        else:
            counts += on_front(costs)
    return counts / len(drawn)


def _from_noise(results: StudyResults) -> Odds | None:
    """From the A/A measurement: what noise alone may put between a trial and the reference."""
    half = {
        entry.metric: student_quantile(entry.freedom or math.inf, (1 + CONFIDENCE) / 2) * pct / 100
        for entry in (*results.noise, *results.noise_beside)
        if (pct := finite(entry.objective_pct)) is not None
    }
    gain: dict[int, dict[str, Interval]] = {}
    for trial in results.trials:
        if trial.state == "ok" and trial.number != results.reference_trial:  # the reference is 0 by definition
            both = math.sqrt(1 / results.reference_measurements + 1 / trial.measurements)
            gain[trial.number] = {
                metric: (
                    100 * (1 - ratio * math.exp(both * half[metric])),
                    100 * (1 - ratio * math.exp(-both * half[metric])),
                )
                for metric, value in trial.objectives.items()
                if metric in half and (ratio := finite(value)) is not None
            }
    return Odds("noise", {}, gain) if any(gain.values()) else None
