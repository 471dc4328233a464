"""The report's figures one by one, as Plotly figures that a notebook shows.

from autotune import load_results
from reports.notebook import figure, names
results = load_results("runs/demo")
names(results)                                    # ('front', 'load', …)
figure(results, "load", metric="P95 latency")
"""

from __future__ import annotations

from itertools import product
from typing import Any, Final

from autotune.results import StudyResults
from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean
from reports import theme
from reports.numbers import plotly_text
from reports.panel import Panel, origin_sentence
from reports.panels import all_panels
from reports.views import Missing

_HEIGHT_PX: Final = 480
_HEAD_PX: Final = 80
_last: list[tuple[StudyResults, dict[str, Panel]]] = []
"""The panels of the results that were asked for last: results never change, and drawing all takes a second."""


def names(results: StudyResults) -> tuple[str, ...]:
    """The figures that `figure` draws of these results; one that they cannot fill is among them, and says why."""
    return tuple(_panels(results))


def choices(results: StudyResults, name: str) -> dict[str, tuple[str, ...]]:
    """What `figure` can be asked for, by keyword: keyword to its options, the first of which is the default.

    Raises InvalidInput when there is no such figure.
    """
    return {_keyword(control.name): control.options for control in _panel(results, name).controls}


def figure(results: StudyResults, name: str, **choice: str) -> Any:
    """The figure `name` of a finished study, with its title, and below it where its numbers come from.

    choice: as `choices` lists them. Returns a `plotly.graph_objects.Figure` of its own, to show or to change. Raises
    InvalidInput when there is no such figure or choice, or with the reason where the results cannot fill it.
    """
    panel = _panel(results, name)
    keywords = [_keyword(control.name) for control in panel.controls]
    for keyword in choice:
        if keyword not in keywords:
            raise InvalidInput(f"figure {name!r} has no choice {keyword!r}{did_you_mean(keyword, keywords)}")
    indices = []
    for keyword, control in zip(keywords, panel.controls, strict=True):
        wanted = choice.get(keyword, control.options[0] if control.options else "")
        if wanted not in control.options:
            raise InvalidInput(f"{keyword} is {wanted!r}{did_you_mean(wanted, control.options)}")
        indices.append(control.options.index(wanted))
    drawn = panel.variants.get("-".join(map(str, indices)), Missing("There is nothing to draw."))
    if isinstance(drawn, Missing):
        raise InvalidInput(f"figure {name!r}: {drawn.reason}")
    return _on_its_own(drawn, panel, results)


def _panels(results: StudyResults) -> dict[str, Panel]:
    if not (_last and _last[0][0] is results):
        _last[:] = [(results, all_panels(results))]
    return _last[0][1]


def _panel(results: StudyResults, name: str) -> Panel:
    panels = _panels(results)
    if name not in panels:
        raise InvalidInput(f"no figure {name!r}{did_you_mean(name, panels)}")
    return panels[name]


def _on_its_own(drawn: Any, panel: Panel, results: StudyResults) -> Any:
    """A copy with what the report's page says around the figure: title, origin, legend, background."""
    alone = type(drawn)(drawn)
    study = plotly_text(f"{results.name}. {origin_sentence(results)}")
    alone.update_layout(
        title={
            "text": panel.title,
            "subtitle": {"text": study},
            "x": 0.0,
            "xref": "paper",
            "yref": "container",
            "y": 0.96,
        },
        margin={"t": _HEAD_PX},
        height=_HEIGHT_PX if panel.rows is None else max(_HEIGHT_PX // 2, _HEAD_PX + 60 + 34 * panel.rows),
        showlegend=True,
        paper_bgcolor=theme.colour("surface"),
        plot_bgcolor=theme.colour("surface"),
    )
    return alone


def _keyword(control: str) -> str:
    return control.lower().replace(" ", "_")


def every_variant(results: StudyResults) -> list[tuple[str, dict[str, str]]]:
    """Every figure with every combination of its choices, as arguments of `figure`."""
    return [
        (name, dict(zip(map(_keyword, (c.name for c in panel.controls)), options, strict=True)))
        for name, panel in _panels(results).items()
        for options in product(*(control.options for control in panel.controls))
    ]
