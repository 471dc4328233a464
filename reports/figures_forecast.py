"""How the simulator's forecasts and the gains at other rates are drawn. Computes nothing.

Every text that comes from the results goes through `plotly_text`, because Plotly reads markup in labels.
"""

from __future__ import annotations

from typing import Any

from autotune.records import Origin
from reports import theme
from reports.drawing import axis, blank, gain_title, short
from reports.figures import ARMS
from reports.forecast import PredictedView, RobustnessView
from reports.numbers import metric_label, percent, plotly_text
from reports.theme import colour


def predicted(view: PredictedView) -> Any:
    """Across, the gain as foretold; up, as measured; the dotted line is where they agree."""
    figure = blank()
    values = [*view.focus, *(v for p in view.points for v in (p.predicted_pct, p.measured_pct))]
    ends = [min(values), max(values)]
    figure.add_scatter(
        x=ends,
        y=ends,
        mode="lines",
        name="Equal",
        hoverinfo="skip",
        line={"color": colour("muted"), "width": 1.2, "dash": "dot"},
    )
    for arm, (name, tint, symbol) in ARMS.items():
        points = [p for p in view.points if p.trial.arm == arm]
        if points:
            figure.add_scatter(
                x=[short(p.predicted_pct) for p in points],
                y=[short(p.measured_pct) for p in points],
                mode="markers",
                name=name,
                customdata=[
                    [
                        f"<b>{plotly_text(p.trial.setting.label)}</b><br>Trial {p.trial.number} · {name}<br>foretold "
                        f"{percent(p.predicted_pct)}, measured {percent(p.measured_pct)}",
                        p.trial.number,
                    ]
                    for p in points
                ],
                hovertemplate="%{customdata[0]}<extra></extra>",
                marker={
                    "color": colour(tint),
                    "symbol": symbol,
                    "size": 10,
                    "opacity": 0.85,
                    "line": {"color": colour("surface"), "width": 1},
                },
            )
    pick = next((p for p in view.points if p.trial.number == view.pick), None)
    if pick is not None:
        figure.add_scatter(
            x=[short(pick.predicted_pct)],
            y=[short(pick.measured_pct)],
            mode="markers",
            name="Pick",
            hoverinfo="skip",
            marker={
                "symbol": "circle-open",
                "size": 19,
                "color": colour("ink"),
                "line": {"width": 2.2, "color": colour("ink")},
            },
        )
    label = plotly_text(metric_label(view.metric))
    figure.update_layout(
        xaxis=axis(f"Foretold gain in {label}, % (simulated)", range=list(view.focus)),
        yaxis=axis(f"Measured gain in {label}, %", range=list(view.focus)),
    )
    return figure


def robustness(view: RobustnessView) -> Any:
    """The gain over the rate; all regimes thick, each regime thin; open where the queue still grew at the end."""
    figure = blank()
    regimes = list(dict.fromkeys(line.name for line in view.lines if line.name != "All regimes"))
    last = len(theme.LOAD_RAMP) - 1
    ramp = {name: theme.LOAD_RAMP[round(i * last / max(1, len(regimes) - 1))] for i, name in enumerate(regimes)}
    for line in reversed(view.lines):
        whole = line.name == "All regimes"
        simulated = line.origin is Origin.SIMULATED
        tint = colour("tuned") if whole else ramp[line.name]
        name = f"{plotly_text(line.name, 30)}, {'simulated' if simulated else 'measured'}"
        figure.add_scatter(
            x=[short(factor) for factor in line.rate_factor],
            y=[short(gain) for gain in line.gain_pct],
            mode="lines+markers",
            name=name,
            legendrank=1 if whole else 0,
            line={"color": tint, "width": 3 if whole else 1.4, "dash": "dash" if simulated else "solid"},
            marker={
                "color": tint,
                "size": 10 if whole else 7,
                "symbol": ["circle-open" if open_ else "circle" for open_ in line.saturated],
            },
            customdata=["; the queue still grew at the end" if open_ else "" for open_ in line.saturated],
            hovertemplate=f"<b>{name}</b><br>%{{x:.2g}} times the rate: %{{y:+.1f}} %%{{customdata}}<extra></extra>",
        )
    factors = sorted({factor for line in view.lines for factor in line.rate_factor})
    figure.add_hline(y=0, line={"color": colour("ink"), "width": 1.2})
    figure.update_layout(
        xaxis=axis("Rate, as a multiple of the traffic given", tickvals=factors, ticktext=[f"{f:g}×" for f in factors]),
        yaxis=axis(gain_title(view.metric)),
    )
    return figure
