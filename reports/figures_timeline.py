"""How the time line of a trace is drawn: lanes over one clock, so that what the policy did can be held beside the queue.

Every text that comes from the results goes through `plotly_text`, because Plotly reads markup in labels.
"""

from __future__ import annotations

from typing import Any, Final

from reports.drawing import axis, blank, short
from reports.numbers import capitalised, duration, plotly_text
from reports.roles import BEST_STATIC, TUNED
from reports.theme import colour
from reports.timeline import LaneView, Stretch, TimelineView

BRANCHES: Final = {
    "max": ("Budget b_max", "static"),
    "pressure": ("Budget cut: prefill pressure", "tuned"),
    "large_prefill": ("Budget cut: large prefills", "random"),
}
"""Branch to its words and its colour token; the same colours as in the shares of steps."""

_ARRIVALS: Final = 0.045
"""Share of the height for the arrivals; the lanes share the rest."""
_TITLE: Final = 0.058
_GAP: Final = 0.026
_SPLIT: Final = 400
"""Steps in a window up to which each is drawn on its own."""


def timeline(view: TimelineView, *, close_up: bool = False) -> Any:
    """Arrivals on top; then for each setting its requests, and below them the budget and the tokens of each step."""
    figure = blank()
    low, high = view.close_up if close_up and view.close_up is not None else view.whole
    figure.update_layout(
        hovermode="x",
        hoversubplots="axis",
        xaxis=axis(
            "Seconds from the start of the trace",
            range=[low, high],
            zeroline=False,
            showgrid=True,
            anchor=f"y{2 * len(view.lanes) + 1}",
            showspikes=True,
            spikemode="across",
            spikesnap="cursor",
            spikethickness=1,
            spikedash="dot",
            spikecolor=colour("muted"),
        ),
        yaxis=_bare([1 - _ARRIVALS, 1.0]),
    )
    _arrivals(figure, view, low, high)
    height = (1 - _ARRIVALS - _GAP) / len(view.lanes)
    for number, lane in enumerate(view.lanes):
        top = 1 - _ARRIVALS - _GAP - number * height
        bottom = top - height + (_GAP if number + 1 < len(view.lanes) else 0)
        body = top - _TITLE
        middle = bottom + 0.5 * (body - bottom)
        queue, budget = f"y{2 * number + 2}", f"y{2 * number + 3}"
        shared: dict[str, Any] = {"zeroline": True, "nticks": 4, "fixedrange": True}
        figure.update_layout(
            {
                queue.replace("y", "yaxis"): axis(
                    "Requests",
                    domain=[middle + 0.6 * _GAP, body],
                    range=[0, 1.12 * max(1, view.most_requests)],
                    tickformat=",d",
                    **shared,
                ),
                budget.replace("y", "yaxis"): axis(
                    "Tokens a step",
                    domain=[bottom, middle - 0.4 * _GAP],
                    range=[0, 1.08 * max(1, view.most_tokens)],
                    **shared,
                ),
            }
        )
        shown = [s for s in lane.stretches if s.end_s >= low and s.start_s <= high]
        _requests(figure, shown, queue, first=number == 0)
        one_by_one = close_up and sum(s.steps for s in shown) <= _SPLIT
        _budgets(figure, shown, budget, view, first=number == 0, one_by_one=one_by_one)
        _hover(figure, lane, shown, budget)
        figure.add_annotation(
            text=_title(lane),
            xref="paper",
            yref="paper",
            x=0,
            y=top - 0.1 * _TITLE,
            xanchor="left",
            yanchor="top",
            showarrow=False,
            font={"color": colour(_tint(lane.role)), "size": 13},
        )
    return figure


def _title(lane: LaneView) -> str:
    capped = "budget never cut" if lane.is_static else f"budget cut in {lane.capped_share:.0%} of the steps"
    name = f"<b>{plotly_text(capitalised(lane.role), 30)}</b> {plotly_text(lane.label, 40)}"
    return f"{name} · {capped} · done after {duration(lane.end_s)}"


def _tint(role: str) -> str:
    return {TUNED: "tuned", BEST_STATIC: "best_static"}.get(role, "reference")


def _bare(domain: list[float]) -> dict[str, Any]:
    return {"domain": domain, "range": [0, 1], "visible": False, "fixedrange": True}


def _arrivals(figure: Any, view: TimelineView, low: float, high: float) -> None:
    shown = [(at, tokens) for at, tokens in view.arrivals if low <= at <= high]
    figure.add_scatter(
        x=[short(at) for at, _ in shown],
        y=[0.4] * len(shown),
        mode="markers",
        name="Arrival",
        marker={"symbol": "line-ns-open", "size": 11, "color": colour("ink"), "line": {"width": 1.3}},
        customdata=[f"arrival: {tokens:,} prompt tokens" for _, tokens in shown],
        hovertemplate="%{customdata}<extra></extra>",
        cliponaxis=False,
    )


def _requests(figure: Any, shown: list[Stretch], y: str, *, first: bool) -> None:
    """The queue as an area, what runs as a line; both stay level until the next stretch begins, and fall when idle."""
    for name in ("Waiting", "Running"):
        x: list[float] = []
        values: list[int] = []
        for stretch, after in zip(shown, [*shown[1:], None], strict=True):
            value = stretch.waiting if name == "Waiting" else stretch.running
            idle = after is None or after.start_s > stretch.end_s + 0.05
            until_s = stretch.end_s if idle or after is None else after.start_s
            if not values or values[-1] != value:
                x.append(short(stretch.start_s))
                values.append(value)
            if idle:
                x.append(short(until_s))
                values.append(0)
        area = {"fill": "tozeroy", "fillcolor": colour("queue")} if name == "Waiting" else {}
        figure.add_scatter(
            x=x,
            y=values,
            yaxis=y,
            mode="lines",
            name=name,
            legendgroup=name,
            showlegend=first,
            hoverinfo="skip",
            line={
                "color": colour("published" if area else "ink"),
                "width": 1.0 if area else 1.6,
                "shape": "hv",
            },
            **area,
        )


def _budgets(figure: Any, shown: list[Stretch], y: str, view: TimelineView, *, first: bool, one_by_one: bool) -> None:
    """What a step was allowed, pale, and what it scheduled, full: in the colour of the rule that set the budget.

    one_by_one: with an edge between the steps.
    """
    present = dict.fromkeys(s.branch for lane in view.lanes for s in lane.stretches)
    branches = [*(b for b in BRANCHES if b in present), *(b for b in present if b not in BRANCHES)]
    for used in (False, True):
        for branch in branches:
            words, tint = BRANCHES.get(branch, (plotly_text(branch, 30), "static"))
            x, values = _bars([s for s in shown if s.branch == branch], used=used, one_by_one=one_by_one and used)
            figure.add_scatter(
                x=x,
                y=values,
                yaxis=y,
                mode="lines",
                name=words,
                legendgroup=words,
                showlegend=first and used,
                hoverinfo="skip",
                line={"color": colour("surface" if used else tint), "width": 0.7 if one_by_one or not used else 0},
                fill="tozeroy",
                fillcolor=colour(tint if used else f"{tint}_pale"),
            )


def _bars(stretches: list[Stretch], *, used: bool, one_by_one: bool) -> tuple[list[float | None], list[float | None]]:
    """A rectangle for each run of stretches of the same height, or for each step, with a gap behind it."""
    x: list[float | None] = []
    y: list[float | None] = []
    end_s = -1.0
    for s in stretches:
        height = short(min(s.tokens, s.budget) if used else s.budget)
        start = short(s.start_s)
        if one_by_one:
            for step in range(s.steps):
                left, right = (short(s.start_s + place * s.step_s) for place in (step, step + 1))
                x += [left, left, right, right, None]
                y += [0.0, height, height, 0.0, None]
        elif y and y[-3] == height and s.start_s <= end_s + 0.005:
            x[-3] = x[-2] = short(s.end_s)
        else:
            x += [start, start, short(s.end_s), short(s.end_s), None]
            y += [0.0, height, height, 0.0, None]
        end_s = s.end_s
    return x or [None], y or [None]


def _hover(figure: Any, lane: LaneView, shown: list[Stretch], y: str) -> None:
    """Unseen marks that answer the pointer, in the lane's budget; the figure asks every lane at once."""
    figure.add_scatter(
        x=[short((s.start_s + s.end_s) / 2) for s in shown],
        y=[float(s.budget) for s in shown],
        yaxis=y,
        mode="markers",
        showlegend=False,
        marker={"size": 12, "opacity": 0, "color": colour(_tint(lane.role))},
        customdata=[
            [
                f"{s.steps:,} steps of {duration(s.step_s)}" if s.steps > 1 else f"1 step of {duration(s.step_s)}",
                f"{s.budget:,}",
                BRANCHES.get(s.branch, (plotly_text(s.branch, 30), ""))[0],
                f"{s.tokens:,.0f}",
                s.running,
                s.waiting,
            ]
            for s in shown
        ],
        hovertemplate=f"<b>{plotly_text(capitalised(lane.role), 30)}</b> · %{{customdata[0]}}<br>%{{customdata[2]}}, "
        "%{customdata[1]} tokens<br>%{customdata[3]} tokens scheduled a step<br>%{customdata[4]} running, "
        "%{customdata[5]} waiting<extra></extra>",
    )
