"""What the report says in words and tables: the headline, the tiles, every table, the provenance. Plain data."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from autotune.results import Comparison, Effect, HeldOut, StudyResults, Trial
from reports import views
from reports.numbers import (
    NONE,
    capitalised,
    cleaned,
    duration,
    finite,
    interval,
    lower_is_better,
    metric_label,
    metric_value,
    percent,
    significant,
    tokens,
)
from reports.views import BEST_STATIC, REFERENCES, TUNED

Tone = Literal["good", "bad", "even"]
_ARM_WORDS = {
    "reference": "Reference",
    "published": "Published",
    "static": "Static budget",
    "search": "Search",
    "random": "Random search",
}
_COMMAND_KEYS = ("install", "commands", "command", "command_line", "reproduce")


@dataclass(frozen=True, slots=True)
class Strip:
    """An interval on a line, as places from 0 to 100; zero: where no difference lies."""

    zero: float
    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of a whole, in per cent: better, and worse; the rest is the same."""

    better: float
    worse: float


@dataclass(frozen=True, slots=True)
class Tile:
    """One number that matters, with a word for its direction, and its interval in words and as a strip."""

    label: str
    value: str
    word: str
    note: str
    tone: Tone
    strip: Strip | None = None
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict: a word, a sentence, the detail, and what is exported because of it."""

    word: str
    tone: Tone
    title: str
    detail: str
    exported: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell. sort: what the column sorts by, the text when None. kind: how it is set."""

    text: str
    sort: float | None = None
    kind: Literal["text", "number", "code", "head"] = "text"
    tone: Tone | None = None
    note: str | None = None


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


def headline(results: StudyResults) -> Headline:
    """The verdict on the tuned setting against the reference (or the first comparison that was made)."""
    against_default = views.compared(results, views.reference_role(results))
    main = against_default or next(iter(results.comparisons), None)
    exported = f"{cleaned(results.exported.label)} ({cleaned(results.exported_role)})"
    if main is None:
        return Headline(
            "Not compared",
            "even",
            "The study compared no settings on held-out traces",
            "Nothing below is a result yet: figures of the search are flattered by selection.",
            exported,
            (),
        )
    title, _, detail = cleaned(main.sentence, 600).partition(": ")
    tone: Tone = "good" if main.verdict == "better" else "bad" if main.verdict == "worse" else "even"
    return Headline(
        capitalised(main.verdict),
        tone,
        capitalised(title).rstrip("."),
        capitalised(detail),
        exported,
        tuple(_tiles(results, main)),
    )


def _tiles(results: StudyResults, main: Comparison) -> list[Tile]:
    best_static = views.compared(results, BEST_STATIC)
    shown: list[tuple[str, Comparison, str]] = [(_against(main), main, main.preferred_metric)]
    if best_static is not None and best_static is not main:
        shown.append((_against(best_static), best_static, best_static.preferred_metric))
    others = [o.metric for o in results.objectives if o.metric != main.preferred_metric]
    shown += [(_against(main), main, metric) for metric in others[:1]]
    effects = [(name, metric, c.confidence, c.overall[metric]) for name, c, metric in shown if metric in c.overall]
    ends = [v for *_, e in effects for v in (e.low_pct, e.high_pct, 0.0) if finite(v) is not None]
    tiles = [
        Tile(
            f"{capitalised(metric_label(metric))} {name}",
            percent(abs(effect.improvement_pct), signed=False),
            "lower" if (effect.improvement_pct >= 0) == lower_is_better(metric) else "higher",
            f"{confidence:.0%} interval {_range_in_words(effect, metric)}",
            _tone(effect),
            _strip(effect, min(ends), max(ends)),
        )
        for name, metric, confidence, effect in effects
    ]
    low, high = main.share_faster_interval
    tiles.append(
        Tile(
            f"Requests against {cleaned(main.reference, 40)}",
            percent(main.share_faster * 100, signed=False),
            "faster",
            f"{interval(low * 100, high * 100, signed=False)}; "
            f"slower: {percent(main.share_slower * 100, signed=False)}",
            "good" if low > main.share_slower else "bad" if high < main.share_slower else "even",
            split=None
            if math.isnan(main.share_faster + main.share_slower)
            else Split(main.share_faster * 100, main.share_slower * 100),
        )
    )
    return tiles


def _range_in_words(effect: Effect, metric: str) -> str:
    up, down = ("higher", "lower") if lower_is_better(metric) else ("lower", "higher")
    low, high = effect.low_pct, effect.high_pct
    if low >= 0:
        return f"{interval(low, high, signed=False)} {down}"
    if high <= 0:
        return f"{interval(-high, -low, signed=False)} {up}"
    return f"{percent(-low, signed=False)} {up} to {percent(high, signed=False)} {down}"


def _against(comparison: Comparison) -> str:
    return f"against {cleaned(comparison.reference, 40)}"


def _tone(effect: Effect) -> Tone:
    return "good" if effect.low_pct > 0 else "bad" if effect.high_pct < 0 else "even"


def _strip(effect: Effect, low: float, high: float) -> Strip | None:
    if any(finite(v) is None for v in (effect.low_pct, effect.improvement_pct, effect.high_pct)):
        return None
    margin = 0.08 * max(high - low, 1.0)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return round((value - low) / (high - low) * 100, 2)

    return Strip(place(0), place(effect.low_pct), place(effect.improvement_pct), place(effect.high_pct))


def settings_table(results: StudyResults) -> Table:
    """The exported setting beside the tuned one and its references, knob by knob."""
    reference = views.reference_role(results)
    columns = [("Exported", results.exported)]
    for role, name in ((TUNED, "Tuned"), (reference, capitalised(reference)), (BEST_STATIC, "Best static")):
        if (held := views.role(results, role)) is not None:
            columns.append((name, held.setting))
    if all(name != "Best static" for name, _ in columns):
        columns.append(("Best static", results.best_static))
    knobs = dict.fromkeys(knob for _, setting in columns for knob in setting.params)
    rows = tuple(
        (
            Cell(cleaned(knob), kind="head", note="not identified" if knob in results.not_identified else None),
            *(Cell(cleaned(tokens(s.params[knob])) if knob in s.params else NONE, kind="number") for _, s in columns),
        )
        for knob in knobs
    )
    return Table(
        "settings", "Exported setting beside its references", ("Knob", *(n for n, _ in columns)), rows, "", False
    )


def regimes_table(results: StudyResults) -> Table:
    """Every held-out setting in every regime."""
    metrics = _columns(results)
    rows = []
    reference = views.reference_setting(results)
    for regime in views.ordered_regimes(r for held in results.held_out for r in held.regimes):
        base = reference.regimes.get(regime, {}) if reference else {}
        for held in results.held_out:
            if regime in held.regimes:
                values = held.regimes[regime]
                rows.append(
                    (
                        Cell(cleaned(regime), kind="head"),
                        Cell(_role_word(held)),
                        Cell(cleaned(held.setting.label), kind="code"),
                        *(
                            _metric_cell(m, values.get(m), base.get(m) if held.role not in REFERENCES else None)
                            for m in metrics
                        ),
                    )
                )
    names = ("Regime", "Role", "Setting", *(capitalised(metric_label(m)) for m in metrics))
    return Table(
        "regimes",
        f"Held-out traces by regime, and the gain over the {views.reference_role(results)}",
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
            Cell(f"{cleaned(c.candidate)} against {cleaned(c.reference)}", kind="head"),
            Cell(capitalised(c.verdict)),
            *(_effect_cell(c.overall.get(m)) for m in metrics),
            Cell(
                percent(c.share_faster * 100, signed=False),
                finite(c.share_faster),
                "number",
                note=interval(c.share_faster_interval[0] * 100, c.share_faster_interval[1] * 100, signed=False),
            ),
            Cell(percent(c.share_slower * 100, signed=False), finite(c.share_slower), "number"),
            Cell(f"{c.num_requests:,}", c.num_requests, "number"),
            Cell(f"{c.num_traces:,}", c.num_traces, "number"),
        )
        for c in results.comparisons
    )
    names = (
        "Comparison",
        "Verdict",
        *(capitalised(metric_label(m)) for m in metrics),
        "Faster",
        "Slower",
        "Requests",
        "Traces",
    )
    caption = "Comparisons on held-out traces: improvement and interval, geometric mean over the regimes"
    return Table("comparisons", caption, names, rows, "No settings were compared.")


def trials_table(results: StudyResults) -> Table:
    """Every trial, failed ones with their reason."""
    objectives = [o.metric for o in results.objectives]
    names = (
        "Trial",
        "Why tried",
        "Setting",
        *(capitalised(metric_label(m)) for m in objectives),
        "Front",
        "Capped steps",
        "Took",
    )
    rows = []
    for trial in results.trials:
        known = views.gains(trial)
        values = [Cell(percent(known.get(m)), known.get(m), "number", tone=_sign(known.get(m))) for m in objectives]
        if trial.state == "failed":
            values[0] = Cell("failed", None, "text", "bad", cleaned(trial.reason or "no reason recorded", 300))
        capped = _capped(trial)
        rows.append(
            (
                Cell(f"{trial.number}", trial.number, "head", note=_trial_note(results, trial)),
                Cell(_ARM_WORDS.get(trial.arm, trial.arm)),
                Cell(cleaned(trial.setting.label), kind="code"),
                *values,
                Cell("●" if trial.on_front else "", float(trial.on_front)),
                Cell(NONE if capped is None else percent(capped * 100, signed=False), capped, "number"),
                Cell(duration(trial.duration_s), finite(trial.duration_s), "number"),
            )
        )
    return Table(
        "trials",
        f"Trials on the tuning traces: gain over the {views.reference_role(results)}",
        names,
        tuple(rows),
        "No trial was run.",
        filterable=True,
    )


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
            Cell(cleaned(t.digest), kind="code"),
        )
        for t in results.traces
    )
    names = ("Trace", "Regime", "Purpose", "Seed", "Requests", "Duration", "Rate", "Digest")
    return Table("traces", "Traces of the study, with their digests", names, rows, "No trace is recorded.")


def commands(results: StudyResults) -> list[str]:
    """The command lines that the provenance records, in order."""
    found: list[str] = []
    for key in _COMMAND_KEYS:
        value = results.provenance.get(key)
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list | tuple):
            texts = [str(v) for v in value]
            found += texts if key in ("commands", "reproduce") else [shlex.join(texts)]
    return [cleaned(line, 1000) for line in found]


def study_file(results: StudyResults) -> str | None:
    """The study as it was resolved, as YAML that can be run again; None when it is not recorded."""
    study = results.provenance.get("study")
    if not isinstance(study, Mapping):
        return None
    return yaml.safe_dump(dict(study), sort_keys=False, allow_unicode=True, width=100)


def exported_json(results: StudyResults) -> str:
    """The exported setting as JSON, to copy."""
    return json.dumps(results.exported.params, indent=2, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """A named value of the provenance, or a group of them."""

    name: str
    text: str | None
    entries: tuple[Entry, ...] = ()


def provenance(results: StudyResults) -> tuple[Entry, ...]:
    """The provenance but the commands and the study file, which stand apart."""
    return entries({k: v for k, v in results.provenance.items() if k not in (*_COMMAND_KEYS, "study")})


def entries(data: Mapping[str, Any], depth: int = 0) -> tuple[Entry, ...]:
    """Nested plain data as named entries, groups last; lists of plain values on one line."""
    made = tuple(_entry(cleaned(name, 80), value, depth) for name, value in data.items())
    return tuple(sorted(made, key=lambda entry: entry.text is None))


def _entry(name: str, value: Any, depth: int) -> Entry:
    if isinstance(value, Mapping) and value and depth < 6:
        return Entry(name, None, entries(value, depth + 1))
    if isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
        return Entry(name, None, entries({str(i + 1): v for i, v in enumerate(value)}, depth + 1))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Entry(name, ", ".join(cleaned(v, 120) for v in value) or NONE)
    if isinstance(value, float):
        return Entry(name, f"{value:.6g}")
    return Entry(name, NONE if value is None or value == {} else cleaned(value, 2000))


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


def _role_word(held: HeldOut) -> str:
    known = (TUNED, *REFERENCES, BEST_STATIC)
    return "Static" if held.role not in known and views.is_static(held.setting) else capitalised(cleaned(held.role))


def _metric_cell(metric: str, value: float | None, reference: float | None) -> Cell:
    gain = views.gain_over(metric, finite(value), finite(reference))
    return Cell(metric_value(metric, value), finite(value), "number", note=None if gain is None else percent(gain))


def _effect_cell(effect: Effect | None) -> Cell:
    if effect is None:
        return Cell(NONE, kind="number")
    note = interval(effect.low_pct, effect.high_pct)
    return Cell(percent(effect.improvement_pct), finite(effect.improvement_pct), "number", _tone(effect), note)


def _sign(value: float | None) -> Tone | None:
    return None if value is None else "good" if value > 0.05 else "bad" if value < -0.05 else "even"


def _capped(trial: Trial) -> float | None:
    total = sum(trial.branch_steps.values())
    return None if total <= 0 or views.is_static(trial.setting) else 1 - trial.branch_steps.get("max", 0) / total


def _trial_note(results: StudyResults, trial: Trial) -> str | None:
    notes = [w for n, w in ((results.pick_trial, "pick"), (results.reference_trial, "reference")) if n == trial.number]
    return ", ".join(notes) or None
