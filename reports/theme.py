"""Which colours and fonts the report uses, in light and dark. Figures are drawn light; the page swaps the tokens.

Every light colour is used by one token only, so that the page can tell from a colour which token it is. Pairs that
meet in one figure differ in lightness and in symbol or dash as well as in hue, so colour alone never carries meaning.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any, Final

import plotly.graph_objects as go

FONT: Final = 'Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
CLEAR: Final = "rgba(0,0,0,0)"

TOKENS: Final = MappingProxyType(
    {
        "ink": ("#18202f", "#e8ecf4"),
        "muted": ("#566176", "#a3aec2"),
        "axis": ("#c3cad6", "#46526a"),
        "grid": ("#e9edf3", "#263046"),
        "surface": ("#ffffff", "#141b2a"),
        "tuned": ("#0a5fc2", "#6db0ff"),
        "reference": ("#c24a12", "#ff9f66"),
        "best_static": ("#0b7a57", "#46d3a1"),
        "static": ("#8791a3", "#7f8ba1"),
        "random": ("#a87900", "#dfb649"),
        "published": ("#96398b", "#e293d9"),
        "tuned_pale": ("#c9def7", "#1d3a5f"),
        "static_pale": ("#e4e8ee", "#2b3547"),
        "random_pale": ("#f3e3b6", "#4a3d16"),
        "queue": ("#e3bfdc", "#6a3a68"),
        "interval": ("#6d9bd6", "#5f8fcb"),
        "front": ("#3d7fd1", "#8dbdf7"),
        "better_far": ("#084a9c", "#7db9ff"),
        "better": ("#7fb0e6", "#2f6bb3"),
        "even": ("#f3f2ee", "#1f2839"),
        "worse": ("#eaa27d", "#a4572c"),
        "worse_far": ("#a83a08", "#e58a55"),
        "load_0": ("#eda33f", "#fbc15e"),
        "load_1": ("#df6f50", "#fb9a77"),
        "load_2": ("#c54570", "#ef7d9d"),
        "load_3": ("#98308a", "#d272c3"),
        "load_4": ("#62289c", "#a678e4"),
        "load_5": ("#2d2b8c", "#7f83ea"),
    }
)
"""Token to its colour on a light and on a dark page."""

LOAD_RAMP: Final = tuple(TOKENS[f"load_{i}"][0] for i in range(6))
"""Light to dark, for regimes in ascending load; the same hue for a regime on a light and on a dark page."""


def colour(token: str) -> str:
    """The light colour of `token`."""
    return TOKENS[token][0]


def dark_by_light() -> dict[str, str]:
    """Light colour to dark colour, for the page's theme switch."""
    return dict(TOKENS.values())


@cache
def template() -> Any:
    """The Plotly template of every figure. Figures copy it, so it is built once."""
    axis = {
        "gridcolor": colour("grid"),
        "linecolor": colour("axis"),
        "tickcolor": colour("axis"),
        "zerolinecolor": colour("axis"),
        "zerolinewidth": 1,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickfont": {"color": colour("muted"), "size": 12},
        "title": {"font": {"color": colour("muted"), "size": 12.5}, "standoff": 10},
        "automargin": True,
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": colour("ink")},
            "paper_bgcolor": CLEAR,
            "plot_bgcolor": CLEAR,
            "margin": {"l": 12, "r": 14, "t": 14, "b": 12},
            "xaxis": axis,
            "yaxis": axis,
            "showlegend": False,
            "hovermode": "closest",
            "hoverlabel": {
                "bgcolor": colour("surface"),
                "bordercolor": colour("axis"),
                "font": {"family": FONT, "size": 12.5, "color": colour("ink")},
                "align": "left",
                "namelength": -1,
            },
        }
    )
