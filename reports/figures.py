"""How each view of the search is drawn: one Plotly figure per view, usable in a notebook as it is. Computes nothing.

Every text that comes from the results goes through `plotly_text`, because Plotly reads markup in labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from reports.drawing import Axis, axis, blank, gain_title, short, ticks
from reports.numbers import capitalised, interval, metric_label, percent, plotly_text, tokens
from reports.odds import Odds
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
    stopped_words,
)

ARMS: Final = {
    "search": ("Search", "tuned", "circle"),
    "predicted": ("Proposed by the simulator", "tuned", "star"),
    "random": ("Random search", "random", "diamond"),
    "static": ("Static budget", "static", "square"),
    "published": ("Published setting", "published", "triangle-up"),
    "reference": ("Reference", "reference", "x"),
}
"""Arm to its name, colour tint and symbol."""
_MOST_OUTLINES: Final = 8


def front(view: FrontView, odds: Odds, *, close_up: bool = True) -> Any:
    """The objectives against each other; up and to the right is better. close_up: only the range worth a look first.

    odds: intervals of the pick and of the front's trials, and how opaque a mark of the search is: as often as it is on the front.
    """
    figure = blank()
    _uncertainty(figure, view, odds)
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
        points = [p for p in view.points if p.trial.arm == arm and p.trial.state == "ok"]
        if points:
            figure.add_scatter(**_trials(points, [p.x for p in points], name, tint, symbol, odds))
    stopped = [p for p in view.points if p.trial.state == "stopped"]
    if stopped:
        figure.add_scatter(**_stopped(stopped, [p.x for p in stopped]))
    if view.pick is not None:
        figure.add_scatter(
            x=[view.pick.x],
            y=[view.pick.y],
            mode="markers+text",
            name="Pick",
            hoverinfo="skip",
            text=["<b>Pick</b>"],
            textposition="top right",  # where no other setting lies when the pick is on the front
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
    x_range, y_range = ({}, {})
    if close_up:
        ring = (_ring(view, view.pick, odds) if view.pick is not None else None) or ([], [])
        others = [ring for _, ring in _outlines(view, odds)]
        x_range = {"range": _reach(view.focus_x, ring[0], [x for xs, _ in others for x in xs])}
        y_range = {"range": _reach(view.focus_y, ring[1], [y for _, ys in others for y in ys])}
    figure.update_layout(
        xaxis=axis(x_title, zeroline=view.x_metric is not None, **x_range),
        yaxis=axis(gain_title(view.y_metric), zeroline=True, **y_range),
    )
    return figure


def _reach(focus: tuple[float, float], pick: Sequence[float], others: Sequence[float]) -> list[float]:
    """The range with room for `pick` at its upper end; at its lower one, and for `others`, as far as that costs little."""
    (low, high), span = focus, focus[1] - focus[0]
    edge, spare = 0.04 * span, 0.35 * span
    most = max([high, *(min(value + edge, high + spare) for value in others), *(value + edge for value in pick)])
    least = min([low, *(max(value - edge, low - spare) for value in (*pick, *others))])
    return [least, most]


def _outlines(view: FrontView, odds: Odds) -> list[tuple[TrialPoint, tuple[list[float], list[float]]]]:
    """The intervals of the front's trials beside the pick: of the likeliest, where they are known."""
    others = [p for p in view.front if p is not view.pick]
    others = sorted(others, key=lambda p: -odds.chance.get(p.trial.number, 0.0))[:_MOST_OUTLINES]
    return [(p, ring) for p in others if (ring := _ring(view, p, odds)) is not None]


def _uncertainty(figure: Any, view: FrontView, odds: Odds) -> None:
    """How far the places of the pick and of the front's trials are known: ellipses, or bars over a single objective."""
    outlines = _outlines(view, odds)
    picked = _ring(view, view.pick, odds) if view.pick is not None else None
    if picked is not None:
        is_bar = len(picked[0]) == 2
        figure.add_scatter(
            x=picked[0],
            y=picked[1],
            mode="lines+markers" if is_bar else "lines",
            name="Pick, 95% interval",
            fill="toself",
            hoverinfo="skip",
            fillcolor=colour("tuned_pale"),
            legendrank=-1,
            line={"color": colour("tuned_pale"), "width": 9} if is_bar else {"color": colour("interval"), "width": 1},
            marker={"symbol": "line-ns" if picked[1][0] == picked[1][1] else "line-ew", "size": 9}
            | {"line": {"color": colour("interval"), "width": 1.5}},
        )
    if outlines:
        figure.add_scatter(
            x=[x for _, ring in outlines for x in (*ring[0], None)],
            y=[y for _, ring in outlines for y in (*ring[1], None)],
            mode="lines",
            name="Front, 95% intervals",
            hoverinfo="skip",
            line={"color": colour("interval"), "width": 1, "dash": "dot"},
            legendrank=-1,
        )


def _ring(view: FrontView, point: TrialPoint, odds: Odds) -> tuple[list[float], list[float]] | None:
    """An ellipse as wide and as high as the intervals in x and y, tilted as they hang together; a bar where but one of
    them is known.
    """
    tall = odds.interval(point.trial, view.y_metric)
    wide = odds.interval(point.trial, view.x_metric) if view.x_metric is not None else None
    if view.x_metric is None or tall is None or wide is None:
        ends = [short(v) for v in wide or (point.x, point.x)], [short(v) for v in tall or (point.y, point.y)]
        return None if tall is None and wide is None else ends
    tilt = odds.correlation.get(point.trial.number, {}).get((view.x_metric, view.y_metric), 0.0)
    (x, half_x), (y, half_y) = (((low + high) / 2, (high - low) / 2) for low, high in (wide, tall))
    if half_x == half_y == 0:
        return None
    angles = [2 * math.pi * i / 48 for i in range(49)]
    across = math.sqrt(max(0.0, 1 - tilt * tilt))
    return (
        [short(x + half_x * math.cos(a)) for a in angles],
        [short(y + half_y * (tilt * math.cos(a) + across * math.sin(a))) for a in angles],
    )


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
                "dash": {"search": "solid", "predicted": "dashdot"}.get(arm, "dash"),
            },
            marker={"color": colour(tint), "size": 9},
            hovertemplate=f"<b>{name}</b><br>after %{{x}} trials: {unit}<extra></extra>",
        )
    title = "Hypervolume of the front" if view.metric is None else gain_title(view.metric, "Best gain so far in")
    figure.update_layout(
        xaxis=axis("Trials of that kind", rangemode="nonnegative", zeroline=False),
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


def slice_of(view: SliceView, odds: Odds) -> Any:
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
            figure.add_scatter(**_trials(points, [place(p) for p in points], name, tint, symbol, odds))
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
        yaxis=axis("Change of the reference, % (above 0: worse)", zeroline=True, range=[-reach, reach]),
    )
    return figure


def landscape(view: LandscapeView, *, terse: bool = False) -> Any:
    """The gain over a plane of the space; blue is better than the reference, orange is worse.

    terse: hover texts without names, for many planes on one page.
    """
    figure = blank()
    hover = [[_place_words(view, x, y, terse=terse) for x in view.x] for y in view.y]
    figure.add_heatmap(
        z=[[None if g is None else short(g) for g in row] for row in view.gain_pct],
        x=list(range(len(view.x))),
        y=list(range(len(view.y))),
        customdata=hover,
        hovertemplate="%{customdata}<br><b>%{z:+.1f} %</b><extra></extra>",
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


def _place_words(view: LandscapeView, x: int, y: int, *, terse: bool) -> str:
    if terse:
        return f"{tokens(x)} / {tokens(y)}"
    return f"{plotly_text(view.x_name)} {tokens(x)}<br>{plotly_text(view.y_name)} {tokens(y)}"


def _trials(
    points: Sequence[TrialPoint], x: Sequence[float], name: str, tint: str, symbol: str, odds: Odds
) -> dict[str, Any]:
    small, large = (12.0, 15.0) if symbol == "star" else (7.5, 10.5)  # a star covers half of what a circle does
    return {
        "x": [short(v) for v in x],
        "y": [short(p.y) for p in points],
        "mode": "markers",
        "name": name,
        "customdata": [[_trial_hover(p, name, odds), p.trial.number] for p in points],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
        "marker": {
            "color": colour(tint),
            "symbol": symbol,
            "size": [large if p.trial.on_front else small for p in points] if tint == "tuned" else 9.5,
            "opacity": [_opacity(p, tint, odds) for p in points],
            "line": {"color": colour("surface"), "width": 0 if symbol == "star" else 1},
        },
    }


def _stopped(points: Sequence[TrialPoint], x: Sequence[float]) -> dict[str, Any]:
    """Trials that were raced off: where they stood on the traces that they saw."""
    made = _trials(points, x, "Stopped early", "muted", "circle-open", Odds())
    made["marker"] |= {"size": 7, "opacity": 0.7, "line": {"color": colour("muted"), "width": 1.2}}
    return made


def _opacity(point: TrialPoint, tint: str, odds: Odds) -> float:
    if tint not in ("tuned", "random") or point.trial.arm == "predicted":
        return 1.0
    if odds.chance and tint == "tuned":
        return round(0.22 + 0.78 * min(1.0, 2 * odds.chance.get(point.trial.number, 0.0)), 2)
    return 1.0 if point.trial.on_front else 0.35 if odds.chance else 0.5


def _trial_hover(point: TrialPoint, arm: str, odds: Odds) -> str:
    trial = point.trial
    lines = [f"<b>{plotly_text(trial.setting.label)}</b>", f"Trial {trial.number} · {arm}"]
    for m, g in point.gain_pct.items():
        bounds = odds.interval(trial, m)
        spread = f" ({interval(*bounds)})" if bounds is not None and bounds[0] != bounds[1] else ""
        lines.append(f"{plotly_text(metric_label(m))}: {percent(g)}{spread}")
    if trial.branch_steps:
        lines.append("steps: " + ", ".join(f"{plotly_text(b, 20)} {n:,}" for b, n in trial.branch_steps.items()))
    if trial.measurements > 1:
        lines.append(f"measured {trial.measurements} times, averaged")
    if trial.state == "stopped":
        lines.append(plotly_text(stopped_words(trial), 160))
    if trial.on_front:
        lines.append("on the Pareto front")
    if trial.number in odds.chance:
        lines.append(f"on the front in {odds.chance[trial.number]:.0%} of the draws")
    return "<br>".join(lines)


def _grid_ticks(values: Sequence[int]) -> Axis:
    every = max(1, -(-len(values) // 10))
    places, labels = list(range(0, len(values), every)), ticks(values)
    return {"tickvals": places, "ticktext": [labels[i] for i in places]}
