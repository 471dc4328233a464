"""How several finished studies become one HTML file that opens offline: `ppas report --compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.results import StudyResults
from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically
from reports import figures, figures_several, html, plane, several, summary
from reports.numbers import capitalised, cleaned, counted, finite, interval, metric_head, metric_label, percent, tokens
from reports.panel import Control, Panel, variants_of
from reports.plane import LandscapeView
from reports.several import AGAINST, Study
from reports.views import Missing

MOST_STUDIES = 12
"""Studies that fit beside each other on one page."""


def write_comparison(found: Sequence[StudyResults], path: Path) -> None:
    """Writes the report of several studies to `path`, whole or not at all. Raises InvalidInput, OSError."""
    write_atomically(path, render(found).encode("utf-8", "replace"))


def render(found: Sequence[StudyResults]) -> str:
    """The studies in one HTML document, in the order given. Raises InvalidInput for fewer than two, or too many."""
    if not 2 <= len(found) <= MOST_STUDIES:
        raise InvalidInput(f"a comparison is of 2 to {MOST_STUDIES} studies; {len(found)} given")
    studies = several.named(found)
    shown = all_panels(studies)
    origins = {study.simulated for study in studies}
    tables = (several.verdict_table(studies), several.settings_table(studies), several.facts_table(studies))
    return html.document(
        "compare.html.j2",
        shown,
        title=f"{len(studies)} studies",
        kind="P-PAS studies compared",
        simulated="both" if len(origins) == 2 else origins.pop(),
        heading=several.title(studies),
        cautions=several.cautions(studies),
        cards=several.cards(studies),
        tables={table.id: table for table in tables},
        landscapes=[(study, shown[f"landscape-{i}"]) for i, study in enumerate(studies)],
        commands=[(study.name, line) for study in studies for line in summary.commands(study.results)],
        simulated_names=[study.name for study in studies if study.simulated],
    )


def all_panels(studies: Sequence[Study]) -> dict[str, Panel]:
    """The figures: the effects of all studies, and a landscape for each."""
    return {panel.id: panel for panel in (_effects(studies), *_landscapes(studies))}


def _effects(studies: Sequence[Study]) -> Panel:
    metrics = several.metrics(studies)
    title = "How much each study gained"
    if not metrics:
        reason = Missing("None of these studies compared settings on held-out traces.")
        return Panel("effects", title, "", reason.reason, (), {"": reason})

    def found(against: int, metric: int) -> list[tuple[Study, Any]]:
        pairs = [(study, study.effect(metrics[metric], AGAINST[against])) for study in studies]
        return [
            (study, effect)
            for study, effect in pairs
            if effect and effect.is_measurable and finite(effect.improvement_pct) is not None
        ]

    def draw(against: int, metric: int) -> Any:
        rows = found(against, metric)
        missing = Missing(f"No study compared {metric_label(metrics[metric])} against {AGAINST[against]}.")
        return figures_several.effects(rows, metrics[metric]) if rows else missing

    alt = " ".join(
        f"{study.name} ({study.origin}): {percent(e.improvement_pct)}, interval {interval(e.low_pct, e.high_pct)}."
        for study, e in found(0, 0)
    )
    controls = (
        Control("Against", tuple(f"Against {against}" for against in AGAINST)),
        Control("Metric", tuple(metric_head(m) for m in metrics)),
    )
    caption = (
        "Improvement of each study's tuned setting over its own reference, on its own held-out traces, with the interval "
        "of that study. Right of 0 % is better. Filled circles are measured, open diamonds are simulated."
    )
    return Panel(
        "effects",
        title,
        caption,
        f"{capitalised(metric_label(metrics[0]))} against the reference. {alt}",
        controls,
        variants_of(draw, len(AGAINST), len(metrics)),
        round(1.5 * len(studies)) + 1,
    )


def _landscapes(studies: Sequence[Study]) -> list[Panel]:
    """Small multiples: those of one metric share their colours."""
    views = [plane.landscape(study.results) for study in studies]
    limits: dict[str, float] = {}
    for view in views:
        if isinstance(view, LandscapeView):
            limits[view.metric] = max(view.limit_pct, limits.get(view.metric, 0.0))
    return [
        _landscape(i, study, replace(view, limit_pct=limits[view.metric]) if isinstance(view, LandscapeView) else view)
        for i, (study, view) in enumerate(zip(studies, views, strict=True))
    ]


def _landscape(number: int, study: Study, view: LandscapeView | Missing) -> Panel:
    if isinstance(view, Missing):
        return Panel(f"landscape-{number}", study.name, "", view.reason, (), {"": view})
    fixed = ", ".join(f"{cleaned(k)} {tokens(v)}" for k, v in view.fixed.items())
    known = [g for row in view.gain_pct for g in row if g is not None]
    return Panel(
        f"landscape-{number}",
        study.name,
        f"{capitalised(metric_label(view.metric))}, {study.origin}. Held fixed: {cleaned(fixed, 160)}.",
        f"{study.name}: gains from {percent(min(known))} to {percent(max(known))} over {counted(len(known), 'setting')} "
        f"of {view.x_name} and {view.y_name}.",
        (),
        {"": figures.landscape(view)},
    )
