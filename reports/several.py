"""Several finished studies beside each other, as plain data: verdicts, effects, settings, and whether they compare.

A study's gains are over its own reference on its own traces. Studies on other traces or from another origin can be read
beside each other and not be ranked; where that is so it is said, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune import choose
from autotune.records import Origin
from autotune.results import Effect, StudyResults
from reports import roles, verdict
from reports.numbers import (
    NONE,
    capitalised,
    change,
    change_between,
    cleaned,
    counted,
    finite,
    metric_head,
    metric_label,
    moment,
    percent,
    tokens,
)
from reports.roles import BEST_STATIC
from reports.tables import Cell, Table, effect_cell
from reports.verdict import Headline, Strip, Tone

AGAINST = ("the reference", "the best static budget")
"""What each study's exported (or tuned) setting is held against."""


@dataclass(frozen=True, slots=True)
class Study:
    """A study under a name that no other has here."""

    name: str
    results: StudyResults

    @property
    def simulated(self) -> bool:
        """Whether its numbers come from the simulator."""
        return self.results.origin is Origin.SIMULATED

    @property
    def origin(self) -> str:
        """`simulated` or `measured`."""
        return "simulated" if self.simulated else "measured"

    def effect(self, metric: str, against: str) -> Effect | None:
        """The held-out effect of the tuned setting in a metric against one of AGAINST."""
        reference = BEST_STATIC if against == AGAINST[1] else roles.reference_role(self.results)
        comparison = roles.compared(self.results, reference)
        return comparison.overall.get(metric) if comparison is not None else None


@dataclass(frozen=True, slots=True)
class Line:
    """One effect on a study's card, with its interval in words and on a line that all cards share."""

    label: str
    value: str
    note: str
    tone: Tone
    strip: Strip | None


@dataclass(frozen=True, slots=True)
class Card:
    """What a study concluded."""

    name: str
    simulated: bool
    headline: Headline
    lines: tuple[Line, ...]


def named(found: Iterable[StudyResults]) -> tuple[Study, ...]:
    """The studies under their names, counted where two share one."""
    studies: list[Study] = []
    for results in found:
        name = cleaned(results.name, 60) or "unnamed study"
        same = sum(study.name == name or study.name.startswith(f"{name} (") for study in studies)
        studies.append(Study(f"{name} ({same + 1})" if same else name, results))
    return tuple(studies)


def metrics(studies: Sequence[Study]) -> list[str]:
    """The objectives of any study, then what every study compared."""
    asked = dict.fromkeys(o.metric for study in studies for o in study.results.objectives)
    usual = ("mean_latency_s", "p95_latency_s", "mean_ttft_s", "p95_ttft_s", "mean_tpot_s")
    wanted = dict.fromkeys([*asked, *usual])
    return [m for m in wanted if any(study.effect(m, a) is not None for study in studies for a in AGAINST)]


def cards(studies: Sequence[Study]) -> tuple[Card, ...]:
    """A card for each study; their strips share one scale."""
    effects = {
        (study.name, against): effect
        for study in studies
        for against in AGAINST
        if (effect := study.effect(_preferred(study), against)) is not None
    }
    known = [effect for effect in effects.values() if effect.is_measurable]
    ends = [v for e in known for v in (e.low_pct, e.high_pct, 0.0) if finite(v) is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 0.0)
    made = []
    for study in studies:
        metric = _preferred(study)
        lines = tuple(
            Line(
                f"{capitalised(metric_label(metric))}, tuned against {_against_words(study, against)}",
                change(effect.improvement_pct, metric) if effect.is_measurable else choose.NOT_MEASURABLE,
                change_between(effect.low_pct, effect.high_pct, metric) if effect.is_measurable else "",
                verdict.tone_of(effect),
                verdict.strip_of(effect, low, high),
            )
            for against in AGAINST
            if (effect := effects.get((study.name, against))) is not None
        )
        made.append(Card(study.name, study.simulated, verdict.headline(study.results), lines))
    return tuple(made)


def title(studies: Sequence[Study]) -> str:
    """What the studies say together, in a sentence."""
    better = [study for study in studies if verdict.headline(study.results).tone == "good"]
    if len(better) == len(studies):
        return f"A better setting was found in {'both' if len(studies) == 2 else f'all {len(studies)}'} studies"
    if not better:
        return f"No study of {len(studies)} found a clearly better setting"
    return f"A better setting was found in {len(better)} of {len(studies)} studies"


def cautions(studies: Sequence[Study]) -> tuple[str, ...]:
    """Why the studies' numbers must not be ranked against each other; empty when they may."""
    found: list[str] = []
    for what, of, consequence in _MUST_AGREE:
        groups = _groups(studies, of)
        if len(groups) > 1:
            parts = "; ".join(f"{_listed(names)}{f': {value}' if value else ''}" for value, names in groups)
            found.append(f"{what} ({parts}). {consequence}")
    return tuple(found)


def verdict_table(studies: Sequence[Study]) -> Table:
    """Verdict and effects with their intervals, study by study."""
    shown = metrics(studies)[:2]
    rows = tuple(
        (
            Cell(study.name, kind="head", note=study.origin),
            Cell(verdict.headline(study.results).word, tone=verdict.headline(study.results).tone),
            *(effect_cell(study.effect(metric, against)) for against in AGAINST for metric in shown),
        )
        for study in studies
    )
    columns = (
        "Study",
        "Verdict",
        *(f"{metric_head(m)} against {against}" for against in AGAINST for m in shown),
    )
    return Table("verdicts", "Improvement of the tuned setting on held-out traces", columns, rows, "No study.")


def settings_table(studies: Sequence[Study]) -> Table:
    """The exported settings, knob by knob."""
    knobs = dict.fromkeys(knob for study in studies for knob in study.results.exported.params)
    rows = []
    for knob in knobs:
        cells = [_knob(study, knob) for study in studies]
        note = "differs" if len(set(cells)) > 1 else None
        rows.append((Cell(cleaned(knob), kind="head", note=note), *(Cell(text, kind="number") for text in cells)))
    return Table("settings", "What each study exports", ("Knob", *_heads(studies)), tuple(rows), "", False)


def facts_table(studies: Sequence[Study]) -> Table:
    """What each study rests on, fact by fact."""
    rows = []
    for name, of in _FACTS.items():
        cells = [cleaned(of(study.results), 160) or NONE for study in studies]
        if any(cell != NONE for cell in cells):
            note = "differs" if len(set(cells)) > 1 else None
            rows.append((Cell(name, kind="head", note=note), *(Cell(cell) for cell in cells)))
    return Table("facts", "What each study rests on", ("Fact", *_heads(studies)), tuple(rows), "", False)


def _heads(studies: Sequence[Study]) -> list[str]:
    return [f"{study.name} ({study.origin})" for study in studies]


def _preferred(study: Study) -> str:
    made = [c.preferred_metric for c in study.results.comparisons]
    return made[0] if made else next((o.metric for o in study.results.objectives), "mean_latency_s")


def _against_words(study: Study, against: str) -> str:
    return against if against == AGAINST[1] else f"the {roles.reference_role(study.results)}"


def _knob(study: Study, knob: str) -> str:
    params = study.results.exported.params
    if knob not in params:
        return NONE
    return cleaned(tokens(params[knob])) if roles.acts(study.results.exported, knob) else "no effect"


def _groups(studies: Sequence[Study], of: Callable[[Study], tuple[object, str]]) -> list[tuple[str, list[str]]]:
    """The studies by what they have in common: (in words, names)."""
    groups: dict[object, tuple[str, list[str]]] = {}
    for study in studies:
        key, words = of(study)
        groups.setdefault(key, (words, []))[1].append(study.name)
    return list(groups.values())


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _held_out(study: Study) -> tuple[object, str]:
    traces = [t for t in study.results.traces if t.purpose == "held-out"]
    regimes = list(dict.fromkeys(t.regime for t in traces))
    words = (
        f"{counted(len(traces), 'trace')} of {cleaned(', '.join(regimes[:3]), 60)}{' …' if len(regimes) > 3 else ''}"
    )
    return frozenset(t.digest for t in traces), words if traces else "no trace"


def _reference(study: Study) -> tuple[object, str]:
    held = roles.reference_setting(study.results)
    if held is None:
        return None, "not replayed"
    return tuple(sorted((k, str(v)) for k, v in roles.acting_params(held.setting).items())), cleaned(held.setting.label)


def _objectives(study: Study) -> tuple[object, str]:
    names = tuple(o.metric for o in study.results.objectives)
    prefer = cleaned(study.results.prefer, 40)
    return (names, study.results.prefer), f"{', '.join(metric_label(n) for n in names)}, prefers {prefer}"


_MUST_AGREE: tuple[tuple[str, Callable[[Study], tuple[object, str]], str], ...] = (
    (
        "Some studies are simulated and some are measured",
        lambda study: (study.simulated, study.origin),
        "A simulated gain is a forecast: it does not rank against a measured one.",
    ),
    (
        "The held-out traces are not the same",
        _held_out,
        "Each gain holds for its own workload; a larger one elsewhere does not make a setting better.",
    ),
    (
        "The setting to beat is not the same",
        _reference,
        "The same gain over a weaker reference is worth less.",
    ),
    (
        "The studies searched for different things",
        _objectives,
        "Each pick is best by its own rule.",
    ),
)


def _nested(data: Mapping[str, Any], *path: str) -> str:
    value: Any = data
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def _first(*texts: str) -> str:
    return next((text for text in texts if text), "")


def _measured_on(*keys: str) -> Callable[[StudyResults], str]:
    def of(results: StudyResults) -> str:
        places = (("measured_on",), ("measured_on", "server"), ("profile",))
        return _first(*(_nested(results.provenance, *place, key) for key in keys for place in places))

    return of


def _traces(purpose: str) -> Callable[[StudyResults], str]:
    def of(results: StudyResults) -> str:
        mine = [t for t in results.traces if t.purpose == purpose]
        regimes = list(dict.fromkeys(t.regime for t in mine))
        requests = sum(t.num_requests for t in mine)
        if not mine:
            return ""
        return f"{counted(len(mine), 'trace')}, {counted(requests, 'request')}: {', '.join(regimes)}"

    return of


def _trials(results: StudyResults) -> str:
    counts: dict[str, int] = {}
    for trial in results.trials:
        counts[trial.arm] = counts.get(trial.arm, 0) + 1
    return f"{len(results.trials):,}: " + ", ".join(f"{n:,} {arm}" for arm, n in counts.items())


def _noise(results: StudyResults) -> str:
    floor = max((n.visible_held_out_pct for n in results.noise), default=math.nan)
    return "" if finite(floor) is None else percent(floor, signed=False)


_FACTS: dict[str, Callable[[StudyResults], str]] = {
    "Origin": lambda results: str(results.origin),
    "Model": _measured_on("model"),
    "GPU": _measured_on("gpu", "device"),
    "vLLM": _measured_on("vllm_version"),
    "Simulator profile": lambda results: _nested(results.provenance, "measured_on", "profile"),
    "Reference": lambda results: held.setting.label if (held := roles.reference_setting(results)) else "",
    "Objectives": lambda results: ", ".join(metric_label(o.metric) for o in results.objectives),
    "Prefers": lambda results: results.prefer,
    "Search space": lambda results: _nested(results.space, "preset"),
    "Tuning traces": _traces("tuning"),
    "Held-out traces": _traces("held-out"),
    "Trials": _trials,
    "Smallest visible difference": _noise,
    "Exported": lambda results: f"{results.exported_role}, {roles.setting_words(results.exported)}",
    "ppas-autotune": lambda results: _nested(results.provenance, "versions", "ppas-autotune"),
    "Finished": lambda results: moment(results.created_at),
}
