"""What each figure shows, as plain data. Knows no Plotly and no HTML; decides nothing about the study.

Gains are per cent with one sign convention everywhere: (1 - ratio) * 100, above 0 is better than the reference.
A view that the results cannot fill is a `Missing` with the reason in words, never an empty chart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune import choose
from autotune.results import Comparison, StudyResults, Trial
from reports.numbers import finite, lower_is_better
from reports.roles import BEST_STATIC, REFERENCES, TUNED, is_static, reference_role, reference_setting


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is nothing to draw."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """A finished trial in a figure; x and y in that figure's units, gain_pct: objective metric to gain."""

    trial: Trial
    x: float
    y: float
    gain_pct: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FrontView:
    """Every finished trial over two objectives; `front` runs from the best in x to the best in y.

    y_metric is None with a single objective: then x is the trial number. focus: the ranges worth looking at first.
    outside: trials beyond them. failed: trials without a place. stopped: of the points, those of stopped trials.
    """

    x_metric: str | None
    y_metric: str
    points: tuple[TrialPoint, ...]
    front: tuple[TrialPoint, ...]
    pick: TrialPoint | None
    reference: TrialPoint | None
    focus_x: tuple[float, float]
    focus_y: tuple[float, float]
    outside: int
    failed: int
    stopped: int


@dataclass(frozen=True, slots=True)
class LoadLine:
    """One setting over the load regimes: mean, lowest and highest trace, and the gain over the reference."""

    role: str
    label: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    gain_pct: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class LoadView:
    """A metric over the load regimes. load: the regimes as numbers where their names differ in one number only.

    reference: the role that gains are over; has_reference: whether it has any value here.
    """

    metric: str
    regimes: tuple[str, ...]
    load: tuple[float, ...] | None
    load_label: str
    lines: tuple[LoadLine, ...]
    reference: str
    has_reference: bool


@dataclass(frozen=True, slots=True)
class EffectRow:
    """An improvement with its interval, in per cent."""

    label: str
    value_pct: float
    low_pct: float
    high_pct: float


@dataclass(frozen=True, slots=True)
class EffectsView:
    """One metric of a comparison: overall first, then the regimes in ascending load."""

    candidate: str
    reference: str
    metric: str
    confidence: float
    rows: tuple[EffectRow, ...]


@dataclass(frozen=True, slots=True)
class ConvergenceView:
    """Arm to its course over its own trials. levels: name to a level to compare with.

    focus: the range to look at first.
    """

    metric: str | None
    arms: Mapping[str, tuple[float | None, ...]]
    levels: Mapping[str, float]
    focus: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ImportanceView:
    """Knobs by importance, greatest first; shares: metric to one share per knob."""

    method: str
    knobs: tuple[str, ...]
    shares: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class SliceView:
    """One objective over one knob, all else free. `off`: the trials with the knob switched off (x is NaN there)."""

    knob: str
    metric: str
    points: tuple[TrialPoint, ...]
    off: tuple[TrialPoint, ...]
    pick: TrialPoint | None
    focus_y: tuple[float, float]
    outside: int
    logarithmic: bool


@dataclass(frozen=True, slots=True)
class BranchesView:
    """Scheduler steps by branch for each held-out setting (role, label), as shares of its steps and as counts."""

    settings: tuple[tuple[str, str], ...]
    branches: tuple[str, ...]
    share: Mapping[str, tuple[float, ...]]
    steps: Mapping[str, tuple[int, ...]]


def gain_pct(ratio: float | None) -> float | None:
    """(1 - ratio) * 100; None when the ratio is missing or not finite."""
    number = finite(ratio)
    return None if number is None else (1 - number) * 100


def gain_over(metric: str, value: float | None, reference: float | None) -> float | None:
    """The gain of `value` over `reference` in the metric `metric`; None when either is missing or not above 0."""
    if value is None or reference is None or value <= 0 or reference <= 0:
        return None
    return gain_pct(value / reference if lower_is_better(metric) else reference / value)


def gains(trial: Trial) -> dict[str, float]:
    """The trial's finite gains by objective metric; empty when it failed. Of a stopped trial: on the traces it saw."""
    if trial.state == "failed":
        return {}
    return {name: gain for name, ratio in trial.objectives.items() if (gain := gain_pct(ratio)) is not None}


def stopped_words(trial: Trial) -> str:
    """That a trial was stopped, and why, for people; a reason that says so itself is no reason to say it twice."""
    reason = trial.reason or "no reason recorded"
    return reason if reason.startswith("stopped") else f"stopped: {reason}"


def front(results: StudyResults, x_metric: str | None, y_metric: str) -> FrontView | Missing:
    """The trials over the objectives `x_metric` (None: the trial number) and `y_metric`."""
    points = [
        TrialPoint(trial, x, y, known)
        for trial in results.trials
        if (known := gains(trial))
        and (y := known.get(y_metric)) is not None
        and (x := float(trial.number) if x_metric is None else known.get(x_metric)) is not None
    ]
    failed = len(results.trials) - len(points)
    if not points:
        return Missing(f"None of the {len(results.trials)} trials finished with a value, so there is no front to draw.")
    # With more than two objectives the front is no line here: only what no other trial beats in these two is on it.
    line: list[TrialPoint] = []
    for point in sorted((p for p in points if p.trial.on_front), key=lambda p: (-p.x, -p.y)):
        if not line or point.y > line[-1].y:
            line.append(point)
    keep = [p for p in points if p.trial.on_front or _is_landmark(results, p.trial)]
    focus_y = focus_range([p.y for p in points], [p.y for p in keep])
    if x_metric is None:
        focus_x = (min(p.x for p in points) - 1, max(p.x for p in points) + 1)
    else:
        focus_x = focus_range([p.x for p in points], [p.x for p in keep])
    outside = sum(not (focus_x[0] <= p.x <= focus_x[1] and focus_y[0] <= p.y <= focus_y[1]) for p in points)
    return FrontView(
        x_metric,
        y_metric,
        tuple(points),
        tuple(line),
        _numbered(points, results.pick_trial),
        _numbered(points, results.reference_trial),
        focus_x,
        focus_y,
        outside,
        failed,
        sum(p.trial.state == "stopped" for p in points),
    )


def metrics_over_load(results: StudyResults) -> list[str]:
    """The metrics that any held-out setting has, the objectives first."""
    names = dict.fromkeys(o.metric for o in results.objectives)
    for held in results.held_out:
        for values in held.regimes.values():
            names.update(dict.fromkeys(values))
    known = {name for held in results.held_out for values in held.regimes.values() for name in values}
    return [name for name in names if name in known]


def over_load(results: StudyResults, metric: str) -> LoadView | Missing:
    """The metric called `metric` of every held-out setting, regime by regime."""
    regimes = ordered_regimes(r for held in results.held_out for r in held.regimes)
    reference = reference_setting(results)
    lines = []
    for held in results.held_out:
        values = tuple(finite(held.regimes.get(r, {}).get(metric)) for r in regimes)
        if all(v is None for v in values):
            continue
        spread = [held.regime_spread.get(r, {}).get(metric) for r in regimes]
        base = [None if reference is None else finite(reference.regimes.get(r, {}).get(metric)) for r in regimes]
        lines.append(
            LoadLine(
                held.role,
                held.setting.label,
                values,
                tuple(None if s is None else finite(s[0]) for s in spread),
                tuple(None if s is None else finite(s[1]) for s in spread),
                tuple(gain_over(metric, v, b) for v, b in zip(values, base, strict=True)),
            )
        )
    if not lines:
        return Missing("No setting has this metric on the held-out traces.")
    load, label = _as_numbers(regimes)
    has_reference = any(g is not None for line in lines if line.role not in REFERENCES for g in line.gain_pct)
    return LoadView(metric, tuple(regimes), load, label, tuple(lines), reference_role(results), has_reference)


def effects(comparison: Comparison, metric: str) -> EffectsView | Missing:
    """The improvement in `metric`, overall and per regime, of one comparison."""
    named = [("All regimes", comparison.overall.get(metric))]
    named += [(r, comparison.regimes[r].get(metric)) for r in ordered_regimes(comparison.regimes)]
    rows = [
        EffectRow(label, value, low if low is not None else value, high if high is not None else value)
        if effect.is_measurable
        else EffectRow(f"{label}: {choose.NOT_MEASURABLE}", math.nan, math.nan, math.nan)
        for label, effect in named
        if effect is not None and (value := finite(effect.improvement_pct)) is not None
        for low, high in [(finite(effect.low_pct), finite(effect.high_pct))]
    ]
    if rows and all(math.isnan(row.value_pct) for row in rows):
        return Missing("Not measurable here: every interval reaches to both sides by more than a factor of two or so.")
    if not rows:
        return Missing("This comparison has no value for the metric.")
    return EffectsView(comparison.candidate, comparison.reference, metric, comparison.confidence, tuple(rows))


def best_so_far(results: StudyResults, metric: str) -> ConvergenceView | Missing:
    """The best gain in the objective `metric` after each trial that the simulator proposed, of the search, and at random."""
    arms: dict[str, tuple[float | None, ...]] = {}
    for arm in ("predicted", "search", "random"):
        course: list[float | None] = []
        best: float | None = None
        for trial in sorted((t for t in results.trials if t.arm == arm), key=lambda t: t.number):
            gain = gains(trial).get(metric) if trial.state == "ok" else None
            best = gain if best is None else best if gain is None else max(best, gain)
            course.append(best)
        if any(value is not None for value in course):
            arms[arm] = tuple(course)
    if not arms:
        return Missing("No trial of the search or of the random arm finished, so there is no course to draw.")
    static = [g for t in results.trials if t.arm == "static" and (g := gains(t).get(metric)) is not None]
    levels = {reference_role(results): 0.0} | ({BEST_STATIC: max(static)} if static else {})
    known = [v for course in arms.values() for v in course if v is not None] + list(levels.values())
    ends = [course[-1] for course in arms.values() if course[-1] is not None]
    return ConvergenceView(metric, arms, levels, focus_range(known, [*levels.values(), *ends]))


def hypervolume(results: StudyResults) -> ConvergenceView | Missing:
    """The front's hypervolume after each trial, by arm."""
    arms = {
        arm: tuple(finite(v) for v in course)
        for arm, course in results.hypervolume.items()
        if any(finite(v) is not None for v in course)
    }
    if not arms:
        return Missing("The study recorded no hypervolume.")
    known = [v for course in arms.values() for v in course if v is not None]
    margin = 0.05 * (max(known) - min(known) or 1.0)
    return ConvergenceView(None, arms, {}, (min(known) - margin, max(known) + margin))


def importance(results: StudyResults) -> ImportanceView | Missing:
    """Which knob moved which objective."""
    shares = {
        metric: {knob: share for knob, value in by_knob.items() if (share := finite(value)) is not None}
        for metric, by_knob in results.importance.items()
    }
    shares = {metric: by_knob for metric, by_knob in shares.items() if by_knob}
    if not shares:
        return Missing("Too few trials finished to tell which knob matters.")
    total: dict[str, float] = {}
    for by_knob in shares.values():
        for knob, share in by_knob.items():
            total[knob] = total.get(knob, 0.0) + share
    knobs = tuple(sorted(total, key=lambda k: (-total[k], k)))
    return ImportanceView(
        results.importance_method, knobs, {m: tuple(v.get(k, 0.0) for k in knobs) for m, v in shares.items()}
    )


ADAPTIVE_KNOBS = ("n_th", "t_large")
"""Knobs that do nothing in a static budget, whatever their value there."""


def knobs_tried(results: StudyResults) -> list[str]:
    """The settings that took at least two values in finished trials, as numbers or switched off."""
    seen: dict[str, set[float | None]] = {}
    for trial in results.trials:
        if trial.state == "ok":
            for name, value in trial.setting.params.items():
                if _leaves_out(trial, name):
                    continue
                if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                    seen.setdefault(name, set()).add(value)
    return [name for name, values in seen.items() if len(values) > 1 and len(values - {None}) > 0]


def slice_of(results: StudyResults, knob: str, metric: str) -> SliceView | Missing:
    """The gain in `metric` of every finished trial over the setting called `knob`."""
    points: list[TrialPoint] = []
    off: list[TrialPoint] = []
    for trial in results.trials:
        known = gains(trial) if trial.state == "ok" else {}
        if metric not in known or knob not in trial.setting.params or _leaves_out(trial, knob):
            continue
        value = trial.setting.params[knob]
        point = TrialPoint(trial, float(value) if value is not None else math.nan, known[metric], known)
        (off if value is None else points).append(point)
    if not points:
        return Missing("No finished trial has a value for this knob.")
    everything = points + off
    focus = focus_range(
        [p.y for p in everything],
        [p.y for p in everything if p.trial.on_front or _is_landmark(results, p.trial)],
    )
    spread = [p.x for p in points if p.x > 0]
    return SliceView(
        knob,
        metric,
        tuple(points),
        tuple(off),
        _numbered(everything, results.pick_trial),
        focus,
        sum(not focus[0] <= p.y <= focus[1] for p in everything),
        len(spread) == len(points) and max(spread) / min(spread) >= 8,
    )


def _leaves_out(trial: Trial, knob: str) -> bool:
    return knob in ADAPTIVE_KNOBS and is_static(trial.setting)


def branches(results: StudyResults) -> BranchesView | Missing:
    """How often each branch of the policy set the budget, on the held-out traces."""
    adaptive = [h for h in results.held_out if h.role in (TUNED, *REFERENCES) and not is_static(h.setting)]
    held = [h for h in adaptive if sum(h.branch_steps.values()) > 0]
    names = tuple(dict.fromkeys(name for h in held for name, count in h.branch_steps.items() if count))
    if not held:
        return Missing("No adaptive setting was replayed on held-out traces, or its scheduler steps were not recorded.")
    total = [sum(h.branch_steps.values()) for h in held]
    steps = {name: tuple(h.branch_steps.get(name, 0) for h in held) for name in names}
    share = {name: tuple(c / t for c, t in zip(counts, total, strict=True)) for name, counts in steps.items()}
    return BranchesView(tuple((h.role, h.setting.label) for h in held), names, share, steps)


def ordered_regimes(names: Iterable[str]) -> list[str]:
    """The distinct regimes, in ascending load where their names hold numbers."""
    return sorted(dict.fromkeys(names), key=lambda name: ([float(n) for n in _NUMBER.findall(name)], name))


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def _as_numbers(regimes: Sequence[str]) -> tuple[tuple[float, ...] | None, str]:
    matches = [_NUMBER.search(name) for name in regimes]
    frames = {(n[: m.start()], n[m.end() :]) for n, m in zip(regimes, matches, strict=True) if m}
    values = tuple(float(m.group()) for m in matches if m)
    if len(values) != len(regimes) or len(frames) != 1 or len(set(values)) != len(values):
        return None, "Load regime"
    before, after = next(iter(frames))
    if before == "λ=":
        return values, "λ, requests/s in bursts" + (f" ({after.strip()})" if after.strip() else "")
    return values, f"Load regime, {before}…{after}"


def _is_landmark(results: StudyResults, trial: Trial) -> bool:
    return (
        trial.number in (results.pick_trial, results.reference_trial)
        or trial.setting.params == results.best_static.params
    )


def focus_range(values: Sequence[float], keep: Sequence[float]) -> tuple[float, float]:
    """The range that holds `keep` and the better part of `values`, with a margin; all of them when they lie near."""
    high, lowest = max(values), min(values)
    worst_kept = min([*keep, 0.0] if keep else [lowest])
    low = worst_kept - 0.6 * max(high - worst_kept, 1.0)
    margin = 0.06 * max(high - max(low, lowest), 1.0)
    return max(low, lowest) - margin, high + margin


def _numbered(points: Iterable[TrialPoint], number: int) -> TrialPoint | None:
    return next((p for p in points if p.trial.number == number), None)
