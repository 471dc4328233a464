"""How several studies are drawn beside each other. Computes nothing.

Every text that comes from the results goes through `plotly_text`, because Plotly reads markup in labels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final

from autotune.results import Effect
from reports.drawing import axis, blank, gain_title, short
from reports.numbers import finite, percent, plotly_text
from reports.several import Study
from reports.theme import colour

ORIGINS: Final = {
    "measured": ("Measured", "best_static", "circle"),
    "simulated": ("Simulated", "random", "diamond-open"),
}
"""Origin to its words, colour token and symbol: a forecast is never drawn like a measurement."""


def effects(found: Sequence[tuple[Study, Effect]], metric: str) -> Any:
    """The improvement in `metric` with its interval, a row for each study; measured and simulated ones apart."""
    figure = blank()
    labels = {study.name: _label(study) for study, _ in found}
    for origin, (name, tint, symbol) in ORIGINS.items():
        rows = [(study, effect) for study, effect in found if study.origin == origin]
        if not rows:
            continue
        figure.add_scatter(
            x=[short(effect.improvement_pct) for _, effect in rows],
            y=[labels[study.name] for study, _ in rows],
            mode="markers",
            name=name,
            marker={"color": colour(tint), "symbol": symbol, "size": 12, "line": {"width": 2, "color": colour(tint)}},
            error_x={
                "type": "data",
                "symmetric": False,
                "thickness": 2.2,
                "width": 6,
                "color": colour(tint),
                "array": [_reach(effect.high_pct, effect.improvement_pct) for _, effect in rows],
                "arrayminus": [_reach(effect.improvement_pct, effect.low_pct) for _, effect in rows],
            },
            customdata=[
                f"{percent(e.improvement_pct)} ({percent(e.low_pct)} to {percent(e.high_pct)})" for _, e in rows
            ],
            hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
        )
    figure.add_vline(x=0, line={"color": colour("ink"), "width": 1.2})
    order = [labels[study.name] for study, _ in found]
    figure.update_layout(
        xaxis=axis(gain_title(metric), zeroline=False),
        yaxis=axis(
            "", type="category", categoryorder="array", categoryarray=order[::-1], range=[-0.6, len(order) - 0.4]
        ),
    )
    return figure


def _label(study: Study) -> str:
    """The whole name, in lines short enough for a phone, and the origin."""
    return "<br>".join([*(plotly_text(line) for line in textwrap.wrap(study.name, 24)), f"<i>{study.origin}</i>"])


def _reach(high: float, low: float) -> float:
    return short(max(0.0, finite(high - low) or 0.0))
