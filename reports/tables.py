"""What the report says in tables. Plain data: every cell with its words and with what its column sorts by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autotune import choose
from autotune.aggregate import is_measurable
from autotune.results import Effect, HeldOut, Setting, StudyResults, Trial
from reports import quality, roles, views
from reports.numbers import (
    NONE,
    better_or_worse,
    capitalised,
    cleaned,
    counted,
    duration,
    finite,
    interval,
    metric_head,
    metric_label,
    metric_value,
    percent,
    significant,
    time_scale,
    tokens,
)
from reports.odds import Odds
from reports.roles import BEST_STATIC, REFERENCES, TUNED
from reports.verdict import Tone, tone_of

_ARM_WORDS = {
    "reference": "Reference",
    "published": "Published",
    "static": "Static budget",
    "search": "Search",
    "predicted": "Proposed by the simulator",
    "random": "Random search",
}


_DIGITS = 12
"""Digits of a digest in a table."""
_MOST_REPEATS = 100
"""Replays of each trace beyond which nobody will make them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell. sort: what the column sorts by, the text when None. kind: how it is set. note_tone: of the note."""

    text: str
    sort: float | None = None
    kind: Literal["text", "number", "code", "head"] = "text"
    tone: Tone | None = None
    note: str | None = None
    note_tone: Tone | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a caption; empty: what stands there without rows. tall: scrolls within a height."""

    id: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    empty: str
    sortable: bool = True
    filterable: bool = False

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers."""
        return tuple(any(cell.kind == "number" for cell in column) for column in zip(*self.rows, strict=True))


def settings_table(results: StudyResults) -> Table:
    """The exported setting beside the tuned one and its references, knob by knob."""
    reference = roles.reference_role(results)
    columns = [
        (name, held.setting)
        for role, name in ((TUNED, "Tuned"), (reference, capitalised(reference)), (BEST_STATIC, "Best static"))
        if (held := roles.role(results, role)) is not None
    ]
    if all(name != "Best static" for name, _ in columns):
        columns.append(("Best static", results.best_static))
    exported = roles.acting_params(results.exported)
    place = next((i for i, (_, setting) in enumerate(columns) if roles.acting_params(setting) == exported), None)
    if place is None:
        columns.insert(0, ("Exported", results.exported))
    else:  # first, and once
        name, setting = columns.pop(place)
        columns.insert(0, (f"{name}, exported", setting))
    knobs = dict.fromkeys(knob for _, setting in columns for knob in setting.params)
    rows = tuple(
        (
            Cell(cleaned(knob), kind="head", note="not identified" if knob in results.not_identified else None),
            *(_knob_cell(setting, knob) for _, setting in columns),
        )
        for knob in knobs
    )
    return Table(
        "settings", "Exported setting beside its references", ("Knob", *(n for n, _ in columns)), rows, "", False
    )


def _knob_cell(setting: Setting, knob: str) -> Cell:
    if knob not in setting.params:
        return Cell(NONE, kind="number")
    if not roles.acts(setting, knob):
        return Cell("no effect", kind="number")
    return Cell(cleaned(tokens(setting.params[knob])), kind="number")


def regimes_table(results: StudyResults) -> Table:
    """Every held-out setting in every regime."""
    metrics = _columns(results)
    rows = []
    reference = roles.reference_setting(results)
    scales = {m: time_scale(h.regimes[r].get(m) for h in results.held_out for r in h.regimes) for m in metrics}
    sides = {h.role: roles.compared(results, roles.reference_role(results), h.role) for h in results.held_out}
    for regime in views.ordered_regimes(r for held in results.held_out for r in held.regimes):
        base = reference.regimes.get(regime, {}) if reference else {}
        for held in results.held_out:
            if regime in held.regimes:
                values = held.regimes[regime]
                rows.append(
                    (
                        Cell(cleaned(regime), kind="head"),
                        _setting_cell(held),
                        *(
                            _metric_cell(
                                m,
                                values.get(m),
                                base.get(m) if held.role not in REFERENCES else None,
                                scales[m],
                                side.regimes.get(regime, {}).get(m) if (side := sides[held.role]) else None,
                            )
                            for m in metrics
                        ),
                    )
                )
    names = ("Regime", "Setting", *(_head(results, m) for m in metrics))
    return Table(
        "regimes",
        f"Held-out traces by regime, and how much better or worse than the {roles.reference_role(results)}; "
        "coloured where that is clear",
        names,
        tuple(rows),
        "No setting was replayed on held-out traces.",
        filterable=len(rows) > 12,
    )


def comparisons_table(results: StudyResults) -> Table:
    """Every comparison with its intervals."""
    metrics = list(
        dict.fromkeys([o.metric for o in results.objectives] + [m for c in results.comparisons for m in c.overall])
    )
    metrics = [m for m in metrics if any(m in c.overall for c in results.comparisons)][:6]
    rows = tuple(
        (
            Cell(
                f"{capitalised(cleaned(c.candidate))} against {cleaned(c.reference)}",
                kind="head",
                note=f"{c.word(results.simulator_error_pct)}, on {counted(c.num_requests, 'request')} "
                f"of {counted(c.num_traces, 'trace')}",
            ),
            *(effect_cell(c.overall.get(m)) for m in metrics),
            Cell(
                percent(c.share_faster * 100, signed=False),
                finite(c.share_faster),
                "number",
                note=interval(c.share_faster_interval[0] * 100, c.share_faster_interval[1] * 100, signed=False),
            ),
            Cell(percent(c.share_slower * 100, signed=False), finite(c.share_slower), "number"),
        )
        for c in results.comparisons
    )
    names = (
        "Comparison",
        *(_head(results, m) for m in metrics),
        "Requests faster",
        "Requests slower",
    )
    caption = "Comparisons on held-out traces: improvement and interval, geometric mean over the regimes"
    return Table("comparisons", caption, names, rows, "No settings were compared.")


def trials_table(results: StudyResults, odds: Odds) -> Table:
    """Every trial, failed and stopped ones with their reason."""
    objectives = [o.metric for o in results.objectives]
    names = (
        "Trial",
        "Why tried",
        "Setting",
        *(metric_head(m) for m in objectives),
        *(("On the front",) if odds.chance else ("Front",)),
        "Capped steps",
        "Took",
    )
    rows = []
    for trial in results.trials:
        known = views.gains(trial)
        values = [_gain_cell(trial, m, known.get(m), odds) for m in objectives]
        if trial.state == "stopped" and values:
            values[0] = replace(values[0], note=cleaned(views.stopped_words(trial), 300))
        if trial.state == "failed":
            values[0] = Cell("failed", None, "text", "bad", cleaned(trial.reason or "no reason recorded", 300))
        capped = _capped(trial)
        rows.append(
            (
                Cell(f"{trial.number}", trial.number, "head", note=_trial_note(results, trial)),
                Cell(_ARM_WORDS.get(trial.arm, trial.arm)),
                Cell(cleaned(trial.setting.label), kind="code"),
                *values,
                _front_cell(trial, odds),
                Cell(NONE if capped is None else percent(capped * 100, signed=False), capped, "number"),
                Cell(duration(trial.duration_s), finite(trial.duration_s), "number"),
            )
        )
    return Table(
        "trials",
        f"Trials on the tuning traces: gain over the {roles.reference_role(results)}",
        names,
        tuple(rows),
        "No trial was run.",
        filterable=True,
    )


def noise_table(results: StudyResults) -> Table:
    """What the reference measured against itself showed, for every objective."""
    known = [*results.noise, *results.noise_beside]
    deciding = {n.metric for n in results.noise}
    rows = [
        (
            Cell(
                capitalised(metric_label(n.metric)),
                kind="head",
                note=f"over {counted(n.num_traces, 'tuning trace')}{'' if n.metric in deciding else '; not what decides'}",
            ),
            *(
                Cell(percent(value, signed=False, digits=2), finite(value), "number")
                for value in (n.replay_pct, n.objective_pct, n.alike_pct, n.visible_pct, n.visible_held_out_pct)
            ),
            Cell(f"{n.repeats:,}" if n.repeats <= _MOST_REPEATS else choose.NOT_MEASURABLE, n.repeats, "number"),
        )
        for n in known
    ]
    if known:
        others = [o.metric for o in results.objectives if o.metric not in {n.metric for n in known}]
        blank = (Cell(NONE, kind="number"),) * 6
        rows += [(Cell(capitalised(metric_label(m)), kind="head", note="noise not known"), *blank) for m in others]
    names = (
        "Metric",
        "One replay: standard deviation",
        "One trial: standard deviation",
        "Two trials: noise alone stays below",
        "Two trials: difference that is found",
        "Held-out traces: difference that is found",
        "Replays per trace to see the smallest gain that counts",
    )
    return Table(
        "noise",
        "Noise: the reference measured against itself",
        names,
        tuple(rows),
        "The study did not measure its noise.",
        sortable=len(rows) > 1,
    )


def failures_table(results: StudyResults) -> Table:
    """Why trials failed."""
    rows = tuple(
        (
            Cell(group.reason, kind="head"),
            Cell(f"{len(group.trials):,}", len(group.trials), "number"),
            Cell(cleaned(", ".join(map(str, group.trials)))),
        )
        for group in quality.failures(results)
    )
    failed = sum(trial.state == "failed" for trial in results.trials)
    caption = f"Failed trials: {failed:,} of {len(results.trials):,}"
    return Table("failures", caption, ("Reason", "Count", "Trials"), rows, "No trial failed.", sortable=len(rows) > 1)


def traces_table(results: StudyResults) -> Table:
    """Every trace with its digest."""
    rows = tuple(
        (
            Cell(cleaned(t.name), kind="head"),
            Cell(cleaned(t.regime)),
            Cell(capitalised(t.purpose)),
            Cell(NONE if t.seed is None else str(t.seed), t.seed, "number"),
            Cell(f"{t.num_requests:,}", t.num_requests, "number"),
            Cell(duration(t.duration_s), finite(t.duration_s), "number"),
            Cell(f"{significant(t.rate_per_s)} /s", finite(t.rate_per_s), "number"),
            Cell(_short_digest(cleaned(t.digest)), kind="code"),
        )
        for t in results.traces
    )
    names = ("Trace", "Regime", "Purpose", "Seed", "Requests", "Duration", "Rate", "Digest")
    return Table("traces", "Traces of the study", names, rows, "No trace is recorded.")


def _short_digest(digest: str) -> str:
    """As much of a digest as tells traces apart; the page has it in full to copy."""
    algorithm, _, digits = digest.rpartition(":")
    return digest if len(digits) <= _DIGITS else f"{algorithm}:{digits[:_DIGITS]}…".removeprefix(":")


def _columns(results: StudyResults) -> list[str]:
    known = views.metrics_over_load(results)
    usual = (
        "mean_latency_s",
        "p95_latency_s",
        "mean_ttft_s",
        "p95_ttft_s",
        "mean_tpot_s",
        "makespan_s",
        "goodput_per_s",
    )
    return list(
        dict.fromkeys([o.metric for o in results.objectives if o.metric in known] + [m for m in usual if m in known])
    )[:8]


def _head(results: StudyResults, metric: str) -> str:
    """The head of a metric's column; goodput that no limit narrows is named as the throughput that it is."""
    study = results.provenance.get("study")
    limits = study.get("limits") if isinstance(study, Mapping) else None
    is_free = isinstance(limits, Mapping) and all(limit is None for limit in limits.values())
    return metric_head(metric) + (" (throughput: no limits set)" if metric == "goodput_per_s" and is_free else "")


def _setting_cell(held: HeldOut) -> Cell:
    label = cleaned(held.setting.label)
    if held.role not in roles.KNOWN and roles.is_static(held.setting):
        return Cell("Static", note=label)
    return Cell(capitalised(cleaned(held.role)), note=label)


def _metric_cell(
    metric: str, value: float | None, reference: float | None, scale: tuple[float, str], effect: Effect | None
) -> Cell:
    """effect: the same gain as it was compared, with its interval."""
    gain = views.gain_over(metric, finite(value), finite(reference))
    note = None if gain is None else better_or_worse(gain)
    tone = tone_of(effect) if effect is not None and effect.is_measurable else "even"
    return Cell(metric_value(metric, value, scale), finite(value), "number", note=note, note_tone=tone)


def effect_cell(effect: Effect | None) -> Cell:
    """An improvement with its interval; in words where that says nothing."""
    if effect is None:
        return Cell(NONE, kind="number")
    if not effect.is_measurable:
        return Cell(choose.NOT_MEASURABLE, None, "number", "even")
    note = interval(effect.low_pct, effect.high_pct)
    return Cell(percent(effect.improvement_pct), finite(effect.improvement_pct), "number", tone_of(effect), note)


def _gain_cell(trial: Trial, metric: str, gain: float | None, odds: Odds) -> Cell:
    bounds = odds.interval(trial, metric) if gain is not None else None
    if bounds is None or bounds[0] == bounds[1]:
        return Cell(percent(gain), gain, "number", _sign(gain))
    note = interval(*bounds) if is_measurable(*bounds) else choose.NOT_MEASURABLE
    return Cell(percent(gain), gain, "number", _sign(gain) if bounds[0] > 0 or bounds[1] < 0 else "even", note)


def _front_cell(trial: Trial, odds: Odds) -> Cell:
    """With odds the share of the draws in which the trial is on the front, else a dot where it is."""
    dot = "● " if trial.on_front else ""
    if not odds.chance:
        return Cell(dot.strip(), float(trial.on_front))
    chance = odds.chance.get(trial.number)
    words = "" if chance is None else f"{dot}{percent(100 * chance, signed=False, digits=0)}"
    return Cell(words, chance, "number")


def _sign(value: float | None) -> Tone | None:
    return None if value is None else "good" if value > 0.05 else "bad" if value < -0.05 else "even"


def _capped(trial: Trial) -> float | None:
    total = sum(trial.branch_steps.values())
    return None if total <= 0 or roles.is_static(trial.setting) else 1 - trial.branch_steps.get("max", 0) / total


def _acted_as_reference(results: StudyResults, trial: Trial) -> bool:
    """Whether every step of both had the same budget."""
    reference = next((other for other in results.trials if other.number == results.reference_trial), None)
    if reference is None:
        return False
    acted = [roles.behaviour(side.setting, side.branch_steps) for side in (reference, trial)]
    return acted[0] is not None and acted[0] == acted[1]


def _trial_note(results: StudyResults, trial: Trial) -> str | None:
    notes = [w for n, w in ((results.pick_trial, "pick"), (results.reference_trial, "reference")) if n == trial.number]
    if trial.number == results.pick_trial and trial.setting != results.pick:
        notes[0] = f"the pick, as {cleaned(results.pick.label)}"
    if results.noise and trial.number != results.reference_trial and _acted_as_reference(results, trial):
        notes.append("did the same as the reference: the difference is noise")
    return ", ".join(notes) or None
