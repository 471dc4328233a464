"""What a simulator foretold and how the pick fares at other rates, as plain data. Knows no Plotly and no HTML."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records import Origin
from autotune.results import StudyResults, Trial
from reports.numbers import NONE, counted, finite, percent, significant
from reports.verdict import Tone
from reports.views import Missing, focus_range, gain_pct, ordered_regimes

_TONES: dict[str, Tone] = {"trusted": "good", "refitted": "good", "dropped": "bad"}


@dataclass(frozen=True, slots=True)
class Foretold:
    """A trial with its gain as foretold and as measured, in per cent."""

    trial: Trial
    predicted_pct: float
    measured_pct: float


@dataclass(frozen=True, slots=True)
class PredictedView:
    """One objective as foretold and as measured.

    focus: the range worth looking at first, on both axes; outside: trials beyond it.
    """

    metric: str
    points: tuple[Foretold, ...]
    pick: int
    focus: tuple[float, float]
    outside: int


@dataclass(frozen=True, slots=True)
class RateLine:
    """A regime, or all of them, over the rate. saturated: per rate, whether the queue still grew at the end."""

    name: str
    origin: Origin
    rate_factor: tuple[float, ...]
    gain_pct: tuple[float, ...]
    saturated: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class RobustnessView:
    """The gain in one metric over the rate: all regimes together first, per origin, then the regimes."""

    metric: str
    lines: tuple[RateLine, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """How far the simulator is believed, in words. facts: name and value."""

    word: str
    tone: Tone
    sentence: str
    facts: tuple[tuple[str, str], ...]


def predicted(results: StudyResults, metric: str) -> PredictedView | Missing:
    """The trials that have both, over one objective."""
    points = tuple(
        Foretold(trial, foretold, measured)
        for trial in results.trials
        if trial.state == "ok"
        and (foretold := gain_pct(trial.predicted.get(metric))) is not None
        and (measured := gain_pct(trial.objectives.get(metric))) is not None
    )
    if not points:
        return Missing("No trial has both a forecast and a measurement of this objective.")
    values = [value for p in points for value in (p.predicted_pct, p.measured_pct)]
    kept = [
        v
        for p in points
        if p.trial.on_front or p.trial.number == results.pick_trial
        for v in (p.predicted_pct, p.measured_pct)
    ]
    low, high = focus_range(values, kept)
    outside = sum(min(p.predicted_pct, p.measured_pct) < low for p in points)
    return PredictedView(metric, points, results.pick_trial, (low, max(high, 0.0)), outside)


def judged(results: StudyResults) -> Judged | None:
    """What became of the simulator; None where there was none beside the study."""
    made = results.prediction
    if made is None:
        return None
    rank = NONE if made.rank_correlation is None else significant(made.rank_correlation, 2)
    pairs = NONE if made.concordance is None else percent(100 * made.concordance, signed=False, digits=0)
    bias = _bias_words(made.bias_pct)
    facts = (
        ("Profile", f"{made.profile}, {made.source}"),
        ("Settings swept", f"{made.settings:,} in {significant(made.sweep_s)} s"),
        ("Judged by", counted(made.num_trials, "measured trial")),
        ("Mean absolute error", percent(made.error_pct, signed=False)),
        *([] if bias is None else [("Mean error", bias)]),
        ("Pairs ranked rightly", pairs),
        ("Rank correlation", rank),
    )
    return Judged(made.verdict.capitalize(), _TONES[made.verdict], made.sentence, facts)


def _bias_words(bias_pct: float | None) -> str | None:
    """The mean error of the ratios with its sign, and what it does to gains; None where it is not known."""
    bias = finite(bias_pct)
    if bias is None:
        return None
    return f"{percent(bias)}, gains foretold too {'small' if bias > 0 else 'large'}" if bias else percent(bias)


def robust_metrics(results: StudyResults) -> list[str]:
    """The metrics that were looked at under other rates, the objectives first."""
    names = dict.fromkeys(o.metric for o in results.objectives)
    names |= dict.fromkeys(m for point in results.robustness for m in point.overall)
    known = {m for p in results.robustness for m, value in p.overall.items() if finite(value) is not None}
    return [name for name in names if name in known]


def robustness(results: StudyResults, metric: str) -> RobustnessView:
    """The gain in `metric`, one of `robust_metrics`, over the rate."""
    lines = []
    for origin in dict.fromkeys(point.origin for point in results.robustness):
        points = sorted((p for p in results.robustness if p.origin is origin), key=lambda p: p.rate_factor)
        regimes = ordered_regimes(regime for p in points for regime in p.regimes)
        for name in (None, *(regimes if len(regimes) > 1 else ())):
            known = [
                (p.rate_factor, value, bool(p.saturated) if name is None else name in p.saturated)
                for p in points
                for value in [finite((p.overall if name is None else p.regimes.get(name, {})).get(metric))]
                if value is not None
            ]
            if known:
                factors, gains, saturated = zip(*known, strict=True)
                lines.append(RateLine(name or "All regimes", origin, factors, gains, saturated))
    return RobustnessView(metric, tuple(sorted(lines, key=lambda line: line.name != "All regimes")))
