"""How each view of the search is drawn: one Plotly figure per view, usable in a notebook as it is. Computes nothing.

Every text that comes from the results goes through `plotly_text`, because Plotly reads markup in labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from reports.drawing import Axis, axis, blank, gain_title, short, ticks
from reports.numbers import capitalised, metric_label, percent, plotly_text, tokens
from reports.plane import LandscapeView
from reports.quality import DriftView
from reports.roles import BEST_STATIC, TUNED
from reports.theme import colour
from reports.views import (
    ConvergenceView,
    FrontView,
    ImportanceView,
    SliceView,
    TrialPoint,
)

ARMS: Final = {
    "search": ("Search", "tuned", "circle"),
    "random": ("Random search", "random", "diamond"),
    "static": ("Static budget", "static", "square"),
    "published": ("Published setting", "published", "triangle-up"),
    "reference": ("Reference", "reference", "x"),
}
"""Arm to its name, colour tint and symbol."""


def front(view: FrontView, *, close_up: bool = True) -> Any:
    """The objectives against each other; up and to the right is better. close_up: only the range worth a look first."""
    figure = blank()
    if view.x_metric is not None and len(view.front) > 1:
        figure.add_scatter(
            x=[p.x for p in view.front],
            y=[p.y for p in view.front],
            mode="lines",
            line={"color": colour("front"), "width": 1.5, "shape": "hv"},
            name="Pareto front",
            hoverinfo="skip",
        )
    for arm, (name, tint, symbol) in ARMS.items():
        points = [p for p in view.points if p.trial.arm == arm]
        if points:
            figure.add_scatter(**_trials(points, [p.x for p in points], name, tint, symbol))
    if view.pick is not None:
        figure.add_scatter(
            x=[view.pick.x],
            y=[view.pick.y],
            mode="markers+text",
            name="Pick",
            hoverinfo="skip",
            text=["<b>Pick</b>"],
            textposition="bottom left",
            textfont={"color": colour("ink"), "size": 13},
            cliponaxis=False,
            marker={
                "symbol": "circle-open",
                "size": 19,
                "color": colour("ink"),
                "line": {"width": 2.2, "color": colour("ink")},
            },
        )
    x_title = "Trial" if view.x_metric is None else gain_title(view.x_metric)
    x_range, y_range = ({"range": list(view.focus_x)}, {"range": list(view.focus_y)}) if close_up else ({}, {})
    figure.update_layout(
        xaxis=axis(x_title, zeroline=view.x_metric is not None, **x_range),
        yaxis=axis(gain_title(view.y_metric), zeroline=True, **y_range),
    )
    return figure


def convergence(view: ConvergenceView) -> Any:
    """The course of each arm over its own trials."""
    figure = blank()
    for name, level in view.levels.items():
        tint = "best_static" if name == BEST_STATIC else "reference"
        longest = max(len(course) for course in view.arms.values())
        figure.add_scatter(
            x=[1, longest],
            y=[level, level],
            mode="lines",
            name=capitalised(name),
            line={"color": colour(tint), "width": 1.5, "dash": "dot"},
            hovertemplate=f"{capitalised(name)}: {percent(level)}<extra></extra>",
        )
    for arm, course in view.arms.items():
        name, tint, _ = ARMS.get(arm, (plotly_text(arm), "muted", "circle"))
        unit = "%{y:.4~g}" if view.metric is None else "%{y:+.2f} %"
        figure.add_scatter(
            x=list(range(1, len(course) + 1)),
            y=list(course),
            mode="lines" if len(course) > 1 else "markers",
            name=name,
            line={
                "color": colour(tint),
                "width": 2.8 if arm == "search" else 2.2,
                "shape": "hv",
                "dash": "solid" if arm == "search" else "dash",
            },
            marker={"color": colour(tint), "size": 9},
            hovertemplate=f"<b>{name}</b><br>after %{{x}} trials: {unit}<extra></extra>",
        )
    title = "Hypervolume of the front" if view.metric is None else gain_title(view.metric, "Best gain so far in")
    figure.update_layout(
        xaxis=axis("Trials of the arm", rangemode="nonnegative", zeroline=False),
        yaxis=axis(title, zeroline=False, range=list(view.focus)),
    )
    return figure


def importance(view: ImportanceView) -> Any:
    """Share of each knob in the variation of each objective."""
    figure = blank()
    knobs = [plotly_text(k, 32) for k in view.knobs]
    for (metric, shares), (tint, pattern) in zip(
        view.shares.items(),
        (("tuned", ""), ("reference", "/"), ("best_static", "x"), ("random", "."), *(("muted", ""),) * 20),
        strict=False,
    ):
        figure.add_bar(
            y=knobs,
            x=[s * 100 for s in shares],
            orientation="h",
            name=plotly_text(capitalised(metric_label(metric))),
            marker={
                "color": colour(tint),
                "line": {"width": 0},
                "pattern": {"shape": pattern, "size": 5, "fgcolor": colour("surface"), "fillmode": "overlay"},
            },
            hovertemplate="<b>%{y}</b><br>%{x:.1f} %<extra>" + plotly_text(metric_label(metric)) + "</extra>",
        )
    figure.update_layout(
        barmode="group",
        bargap=0.35,
        bargroupgap=0.12,
        xaxis=axis("Share of the variation, %", rangemode="tozero"),
        yaxis=axis("", type="category", autorange="reversed"),
    )
    return figure


def slice_of(view: SliceView) -> Any:
    """One objective over one knob."""
    figure = blank()
    xs = sorted({p.x for p in view.points})
    step = (xs[-1] / xs[0]) ** 0.12 if view.logarithmic else 1 + 0.12 * (xs[-1] - xs[0])
    off_x = xs[-1] * max(step, 1.6) if view.logarithmic else xs[-1] + step

    def place(point: TrialPoint) -> float:
        return off_x if math.isnan(point.x) else point.x

    for arm, (name, tint, symbol) in ARMS.items():
        points = [p for p in (*view.points, *view.off) if p.trial.arm == arm]
        if points:
            figure.add_scatter(**_trials(points, [place(p) for p in points], name, tint, symbol))
    if view.pick is not None:
        figure.add_scatter(
            x=[place(view.pick)],
            y=[view.pick.y],
            mode="markers",
            name="Pick",
            hoverinfo="skip",
            cliponaxis=False,
            marker={
                "symbol": "circle-open",
                "size": 18,
                "color": colour("ink"),
                "line": {"width": 2.2, "color": colour("ink")},
            },
        )
    shown = xs if len(xs) <= 8 else [v for v in (2.0**i for i in range(31)) if xs[0] <= v <= xs[-1]] or [xs[0], xs[-1]]
    marks = (
        {"tickvals": [*shown, off_x], "ticktext": [*ticks(shown), "off"]}
        if view.off
        else {"tickvals": shown, "ticktext": ticks(shown)}
    )
    figure.update_layout(
        xaxis=axis(plotly_text(view.knob), zeroline=False, **({"type": "log"} if view.logarithmic else {}), **marks),
        yaxis=axis(gain_title(view.metric), range=list(view.focus_y)),
    )
    return figure


def drift(view: DriftView) -> Any:
    """The reference's change over the search, with the band that noise alone explains."""
    figure = blank()
    if view.band_pct:
        figure.add_hrect(
            y0=-view.band_pct,
            y1=view.band_pct,
            fillcolor=colour("reference"),
            opacity=0.13,
            line_width=0,
            layer="below",
        )
    figure.add_scatter(
        x=[0, *view.after_trial],  # the first measurement is what the others are compared with
        y=[0.0, *(short(change) for change in view.change_pct)],
        mode="lines+markers",
        name="Reference",
        line={"color": colour("reference"), "width": 2},
        marker={"color": colour("reference"), "size": 8},
        hovertemplate="after %{x} trials: %{y:+.1f} %<extra></extra>",
    )
    reach = 1.25 * max(view.largest_pct, view.band_pct, 0.5)
    figure.update_layout(
        xaxis=axis("Trials before", rangemode="tozero", zeroline=False),
        yaxis=axis("Change of the reference, %", zeroline=True, range=[-reach, reach]),
    )
    return figure


def landscape(view: LandscapeView) -> Any:
    """The gain over a plane of the space; blue is better than the reference, orange is worse."""
    figure = blank()
    hover = [
        [
            f"{plotly_text(view.x_name)} {tokens(x)}<br>{plotly_text(view.y_name)} {tokens(y)}<br><b>"
            + ("not allowed" if gain is None else percent(gain))
            + "</b>"
            for x, gain in zip(view.x, row, strict=False)
        ]
        for y, row in zip(view.y, view.gain_pct, strict=False)
    ]
    figure.add_heatmap(
        z=[list(row) for row in view.gain_pct],
        x=list(range(len(view.x))),
        y=list(range(len(view.y))),
        customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        zmid=0,
        zmin=-view.limit_pct,
        zmax=view.limit_pct,
        xgap=1.5,
        ygap=1.5,
        colorscale=[
            [0, colour("worse_far")],
            [0.25, colour("worse")],
            [0.5, colour("even")],
            [0.75, colour("better")],
            [1, colour("better_far")],
        ],
        colorbar={
            "title": {"text": "%", "side": "top", "font": {"color": colour("muted"), "size": 12}},
            "thickness": 10,
            "outlinewidth": 0,
            "tickfont": {"color": colour("muted"), "size": 11},
        },
    )
    for mark in view.marks:
        symbol = {TUNED: "star", BEST_STATIC: "square-open"}.get(mark.name, "x")
        figure.add_scatter(
            x=[mark.column],
            y=[mark.row],
            mode="markers",
            name=capitalised(mark.name),
            cliponaxis=False,
            hovertemplate=f"<b>{capitalised(mark.name)}</b><extra></extra>",
            marker={
                "symbol": symbol,
                "size": 14,
                "color": colour("ink"),
                "line": {"color": colour("surface" if "open" not in symbol else "ink"), "width": 1.5},
            },
        )
    figure.update_layout(
        xaxis=axis(plotly_text(view.x_name), showgrid=False, zeroline=False, **_grid_ticks(view.x)),
        yaxis=axis(plotly_text(view.y_name), showgrid=False, zeroline=False, **_grid_ticks(view.y)),
    )
    return figure


def _trials(points: Sequence[TrialPoint], x: Sequence[float], name: str, tint: str, symbol: str) -> dict[str, Any]:
    on_front = [p.trial.on_front for p in points]
    return {
        "x": [short(v) for v in x],
        "y": [short(p.y) for p in points],
        "mode": "markers",
        "name": name,
        "customdata": [[_trial_hover(p, name), p.trial.number] for p in points],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
        "marker": {
            "color": colour(tint),
            "symbol": symbol,
            "size": [10.5 if f else 7.5 for f in on_front] if tint == "tuned" else 9.5,
            "opacity": [1.0 if f or tint not in ("tuned", "random") else 0.5 for f in on_front],
            "line": {"color": colour("surface"), "width": 1},
        },
    }


def _trial_hover(point: TrialPoint, arm: str) -> str:
    trial = point.trial
    lines = [f"<b>{plotly_text(trial.setting.label)}</b>", f"Trial {trial.number} · {arm}"]
    lines += [f"{plotly_text(metric_label(m))}: {percent(g)}" for m, g in point.gain_pct.items()]
    if trial.branch_steps:
        lines.append("steps: " + ", ".join(f"{plotly_text(b, 20)} {n:,}" for b, n in trial.branch_steps.items()))
    if trial.on_front:
        lines.append("on the Pareto front")
    return "<br>".join(lines)


def _grid_ticks(values: Sequence[int]) -> Axis:
    every = max(1, -(-len(values) // 10))
    places, labels = list(range(0, len(values), every)), ticks(values)
    return {"tickvals": places, "ticktext": [labels[i] for i in places]}
