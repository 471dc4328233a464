"""What all figures share: the empty figure, axes, and how numbers are cut for a chart."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from reports import theme
from reports.numbers import metric_label, plotly_text

Axis = dict[str, Any]


def blank() -> Any:
    """An empty figure in the house style."""
    return go.Figure(layout={"template": theme.template()})


def axis(title: str, **more: Any) -> Axis:
    """An axis with its title."""
    return {"title": {"text": title}, **more}


def gain_title(metric: str, start: str = "Gain in") -> str:
    """The title of an axis that shows gains in a metric."""
    return f"{start} {plotly_text(metric_label(metric))}, %"


def short(value: float) -> float:
    """`value` with the digits that a chart can show, to keep the page small."""
    return float(f"{value:.5g}")


def compact(value: float) -> str:
    """A knob's value as a tick: 16384 as `16k`."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
