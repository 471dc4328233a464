"""How each view of the held-out traces is drawn: one Plotly figure per view. Computes nothing.

Every text that comes from the results goes through `plotly_text`, because Plotly reads markup in labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from reports import theme
from reports.drawing import Axis, axis, blank, gain_title, short
from reports.numbers import capitalised, duration, is_time, metric_label, percent, plotly_text, significant, time_scale
from reports.pairs import REQUEST_METRICS, PairedView
from reports.roles import BEST_STATIC, REFERENCES, TUNED
from reports.theme import colour
from reports.views import BranchesView, EffectsView, LoadLine, LoadView

ROLES: Final = {
    TUNED: ("tuned", "solid", 3.0),
    **dict.fromkeys(REFERENCES, ("reference", "dash", 2.5)),
    BEST_STATIC: ("best_static", "dashdot", 2.5),
}
STATIC_DASHES: Final = ("dot", "longdash", "dash", "longdashdot", "solid")
STATIC_SYMBOLS: Final = ("square", "triangle-up", "diamond", "cross", "triangle-down", "pentagon")


def over_load(view: LoadView, *, relative: bool) -> Any:
    """A metric over load: absolute, or as the gain over the reference."""
    if len(view.regimes) == 1:
        return _one_regime(view, relative=relative)
    figure = blank()
    factor, unit = _unit(view, relative=relative)
    x: Sequence[Any] = view.load if view.load is not None else [plotly_text(r) for r in view.regimes]
    styles = _line_styles(view.lines)
    for line, (tint, dash, width, symbol) in reversed(list(zip(view.lines, styles, strict=True))):
        values = line.gain_pct if relative else _scaled(line.values, factor)
        name = plotly_text(f"{capitalised(line.role)} · {line.label}" if line.role in ROLES else line.label)
        hover = [
            f"<b>{name}</b><br>{plotly_text(regime)}<br>{_load_hover(view.metric, line, i)}"
            for i, regime in enumerate(view.regimes)
        ]
        figure.add_scatter(
            x=list(x),
            y=list(values),
            mode="lines+markers",
            name=name,
            customdata=hover,
            hovertemplate="%{customdata}<extra></extra>",
            legendrank=1000 - view.lines.index(line),
            line={"color": colour(tint), "dash": dash, "width": width},
            marker={"color": colour(tint), "symbol": symbol, "size": 8 if width > 2 else 6},
        )
    figure.update_layout(
        xaxis=axis(
            plotly_text(view.load_label),
            **(
                {"tickvals": list(view.load)}
                if view.load and len(view.load) <= 12
                else {"type": "category"}
                if view.load is None
                else {}
            ),
        ),
        yaxis=axis(
            _value_title(view.metric, unit, relative=relative),
            zeroline=relative,
            **({} if relative else {"rangemode": "tozero"}),
        ),
    )
    return figure


def pairs(view: PairedView) -> Any:
    """Every request once: across, under the reference; up, under the tuned setting. Below the line is faster."""
    figure = blank()
    factor, unit = time_scale(v for p in view.sample for v in (p.candidate_s, p.reference_s))
    values = [v * factor for p in view.sample for v in (p.candidate_s, p.reference_s)]
    positive = [v for v in values if v > 0]
    logarithmic = len(positive) == len(values) and max(positive) / min(positive) > 12
    low, high = min(values), max(values)
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": colour("muted"), "width": 1.2, "dash": "dot"},
        name="Equal",
        hoverinfo="skip",
    )
    for regime, shade in zip(view.regimes, _ramp(len(view.regimes)), strict=True):
        rows = [p for p in view.sample if p.regime == regime]
        if not rows:
            continue
        figure.add_scatter(
            x=[short(p.reference_s * factor) for p in rows],
            y=[short(p.candidate_s * factor) for p in rows],
            mode="markers",
            name=plotly_text(regime),
            customdata=[
                f"<b>{plotly_text(p.trace, 60)}</b><br>{p.prompt_tokens:,} prompt, {p.output_tokens:,} output tokens"
                for p in rows
            ],
            hovertemplate="%{customdata}<br>tuned %{y:.4~g} "
            + unit
            + "<br>"
            + plotly_text(view.reference_role, 30)
            + " %{x:.4~g} "
            + unit
            + "<extra></extra>",
            marker={"color": shade, "size": 6.5, "opacity": 0.75, "line": {"width": 0}},
        )
    kind = _log_axis(low, high) if logarithmic else {}
    label = REQUEST_METRICS[view.metric]
    figure.update_layout(
        xaxis=axis(f"{label}, {plotly_text(view.reference_role, 30)}, {unit}", **kind),
        yaxis=axis(f"{label}, tuned, {unit}", **kind),
    )
    return figure


def differences(view: PairedView) -> Any:
    """The distribution of tuned - reference per request; left of zero is faster."""
    figure = blank()
    factor, unit = time_scale(view.difference_s)
    x = [short(d * factor) for d in view.difference_s]
    figure.add_scatter(
        x=x,
        y=[short(s * 100) for s in view.share],
        mode="lines",
        name="Requests",
        line={"color": colour("tuned"), "width": 2.5, "shape": "hv"},
        hovertemplate="%{y:.0f} % of the requests differ by<br>at most %{x:.3~g} " + unit + "<extra></extra>",
    )
    figure.add_vline(x=0, line={"color": colour("ink"), "width": 1.2})
    for share, word, anchor, x_at, tint in (
        (view.share_faster, "faster", "left", 0.015, "tuned"),
        (view.share_slower, "slower", "right", 0.985, "reference"),
    ):
        figure.add_annotation(
            text=f"<b>{share * 100:.1f} %</b> {word}",
            xref="paper",
            yref="paper",
            x=x_at,
            y=0.985 if word == "faster" else 0.03,
            xanchor=anchor,
            yanchor="top" if word == "faster" else "bottom",
            showarrow=False,
            bgcolor=colour("surface"),
            font={"color": colour(tint), "size": 15},
        )
    figure.update_layout(
        xaxis=axis(
            f"{REQUEST_METRICS[view.metric]}, tuned − {plotly_text(view.reference_role, 30)}, {unit}",
            zeroline=False,
            range=[v * factor for v in view.focus_s],
        ),
        yaxis=axis("Share of requests, %", range=[0, 101], zeroline=False),
    )
    return figure


def effects(view: EffectsView) -> Any:
    """The improvement and its interval, overall and regime by regime."""
    figure = blank()
    labels = [plotly_text(row.label, 28) for row in view.rows]
    for rows, tint, size in ((view.rows[:1], "tuned", 13), (view.rows[1:], "front", 9)):
        if not rows:
            continue
        names = labels[:1] if tint == "tuned" else labels[1:]
        figure.add_scatter(
            x=[r.value_pct for r in rows],
            y=names,
            mode="markers",
            showlegend=False,
            error_x={
                "type": "data",
                "symmetric": False,
                "thickness": 2.4 if tint == "tuned" else 1.8,
                "width": 5,
                "color": colour(tint),
                "array": [max(0.0, r.high_pct - r.value_pct) for r in rows],
                "arrayminus": [max(0.0, r.value_pct - r.low_pct) for r in rows],
            },
            marker={"color": colour(tint), "size": size, "symbol": "diamond" if tint == "tuned" else "circle"},
            customdata=[f"{percent(r.value_pct)} ({percent(r.low_pct)} to {percent(r.high_pct)})" for r in rows],
            hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
        )
    figure.add_vline(x=0, line={"color": colour("ink"), "width": 1.2})
    figure.update_layout(
        xaxis=axis(gain_title(view.metric), zeroline=False),
        yaxis=axis(
            "", type="category", categoryorder="array", categoryarray=labels[::-1], range=[-0.6, len(labels) - 0.4]
        ),
    )
    return figure


def branches(view: BranchesView) -> Any:
    """Share of scheduler steps by the branch that set their budget."""
    figure = blank()
    names = [f"{plotly_text(capitalised(role), 30)}<br>{plotly_text(label, 30)}" for role, label in view.settings]
    styles = {"max": ("static", ""), "pressure": ("tuned", "/"), "large_prefill": ("random", ".")}
    words = {"max": "b_max", "pressure": "b_cap: prefill pressure", "large_prefill": "b_cap: large prefill"}
    for branch in view.branches:
        tint, pattern = styles.get(branch, ("published", "x"))
        figure.add_bar(
            y=names,
            x=[s * 100 for s in view.share[branch]],
            orientation="h",
            name=plotly_text(words.get(branch, branch)),
            marker={
                "color": colour(tint),
                "line": {"width": 0},
                "pattern": {
                    "shape": pattern,
                    "size": 6,
                    "fgcolor": colour("surface"),
                    "fillmode": "overlay",
                    "solidity": 0.18,
                },
            },
            customdata=[f"{n:,}" for n in view.steps[branch]],
            hovertemplate="<b>%{y}</b><br>%{customdata} steps, %{x:.1f} %<extra>"
            + plotly_text(words.get(branch, branch))
            + "</extra>",
        )
    figure.update_layout(
        barmode="stack",
        bargap=0.45,
        xaxis=axis("Share of steps, %", range=[0, 100], zeroline=False),
        yaxis=axis("", type="category", autorange="reversed"),
    )
    return figure


def _one_regime(view: LoadView, *, relative: bool) -> Any:
    """With a single regime there is no load to plot over: one row per setting instead."""
    figure = blank()
    factor, unit = _unit(view, relative=relative)
    names = []
    for line, (tint, _, width, symbol) in zip(view.lines, _line_styles(view.lines), strict=True):
        value = line.gain_pct[0] if relative else line.values[0]
        role = f"{plotly_text(capitalised(line.role), 30)}<br>" if line.role in ROLES else ""
        name = role + plotly_text(line.label, 30)
        if value is None or name in names:
            continue
        names.append(name)
        low, high = line.low[0], line.high[0]
        spread = None if relative or low is None or high is None else (low, high)
        figure.add_scatter(
            x=[value * factor],
            y=[name],
            mode="markers",
            showlegend=False,
            marker={"color": colour(tint), "symbol": symbol, "size": 11 if width > 2 else 9},
            error_x=None
            if spread is None
            else {
                "type": "data",
                "symmetric": False,
                "array": [max(0.0, (spread[1] - value) * factor)],
                "arrayminus": [max(0.0, (value - spread[0]) * factor)],
                "color": colour(tint),
                "width": 5,
                "thickness": 1.8,
            },
            customdata=[_load_hover(view.metric, line, 0)],
            hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
        )
    figure.update_layout(
        xaxis=axis(_value_title(view.metric, unit, relative=relative), rangemode="normal" if relative else "tozero"),
        yaxis=axis("", type="category", categoryorder="array", categoryarray=names[::-1]),
    )
    return figure


def _unit(view: LoadView, *, relative: bool) -> tuple[float, str]:
    if relative:
        return 1.0, "%"
    if is_time(view.metric):
        return time_scale(v for line in view.lines for v in (*line.values, *line.high))
    return 1.0, "per second" if view.metric.endswith("_per_s") else ""


def _value_title(metric: str, unit: str, *, relative: bool) -> str:
    if relative:
        return gain_title(metric)
    return capitalised(plotly_text(metric_label(metric))) + (f", {unit}" if unit else "")


def _line_styles(lines: Sequence[LoadLine]) -> list[tuple[str, str, float, str]]:
    styles, static = [], 0
    for line in lines:
        if line.role in ROLES:
            tint, dash, width = ROLES[line.role]
            styles.append((tint, dash, width, {TUNED: "circle", BEST_STATIC: "square"}.get(line.role, "x")))
        else:
            dash, symbol = STATIC_DASHES[static % 5], STATIC_SYMBOLS[static % 6]
            styles.append(("static", dash, 1.4, symbol))
            static += 1
    return styles


def _load_hover(metric: str, line: LoadLine, i: int) -> str:
    show = duration if is_time(metric) else significant
    text = f"{plotly_text(metric_label(metric))}: {show(line.values[i])}"
    if line.low[i] is not None and line.high[i] is not None:
        text += f"<br>traces: {show(line.low[i])} to {show(line.high[i])}"
    if line.gain_pct[i] is not None and line.role not in REFERENCES:
        text += f"<br>gain: {percent(line.gain_pct[i])}"
    return text


def _log_axis(low: float, high: float) -> Axis:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    places = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return {"type": "log", "tickvals": places, "ticktext": [f"{place:g}" for place in places]}


def _scaled(values: Iterable[float | None], factor: float) -> list[float | None]:
    return [None if v is None else v * factor for v in values]


def _ramp(n: int) -> list[str]:
    last = len(theme.LOAD_RAMP) - 1
    return [theme.LOAD_RAMP[round(i * last / max(1, n - 1))] for i in range(n)]
