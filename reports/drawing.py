"""What all figures share: the empty figure, axes, and how numbers are cut for a chart."""

from __future__ import annotations

from collections.abc import Sequence
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


def ticks(values: Sequence[float]) -> list[str]:
    """A knob's values as ticks of one kind: multiples of 1024 as `16k`, or all of them in full."""
    if max(values) >= 1024 and all(v % 1024 == 0 or (v < 1024 and 1024 % v == 0) for v in values if v > 0):
        return [f"{v / 1024:g}k" if v >= 1024 else f"{v:g}" for v in values]
    return [f"{v:,.4g}" if v < 1e4 else f"{v:,.0f}" for v in values]
