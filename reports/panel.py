"""What a figure of the report is, with its words and the reader's choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from autotune.records import Origin
from autotune.results import StudyResults
from reports.views import Missing


@dataclass(frozen=True, slots=True)
class Control:
    """A choice that the reader makes; one option alone is not shown."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure with its words.

    variants: one entry per combination of options, keyed by the option indices joined by `-`: a Plotly figure, or the
    reason why there is none. alt: what the figure says, for those who do not see it. rows: bars or rows in the figure,
    from which the page derives its height; None for the usual height.
    """

    id: str
    title: str
    caption: str
    alt: str
    controls: tuple[Control, ...]
    variants: Mapping[str, Any | Missing]
    rows: int | None = None

    @property
    def has_choices(self) -> bool:
        """Whether any control has more than one option."""
        return any(len(control.options) > 1 for control in self.controls)

    @property
    def missing(self) -> str | None:
        """Why nothing at all can be drawn; None when something can."""
        reasons = [v.reason for v in self.variants.values() if isinstance(v, Missing)]
        return reasons[0] if reasons and len(reasons) == len(self.variants) else None


def origin_sentence(results: StudyResults) -> str:
    """Where the numbers come from, in a sentence for captions."""
    if results.origin is Origin.SIMULATED:
        return "Simulated, not measured on a server."
    return "Measured on a live server."


def drawn(view: Any, draw: Callable[[Any], Any]) -> Any | Missing:
    """What `draw` makes of the view; a view that is missing stays so."""
    return view if isinstance(view, Missing) else draw(view)


def variants_of(draw: Callable[..., Any], *sizes: int) -> dict[str, Any]:
    """What `draw` makes of every combination of options, by the key that a panel wants."""
    return {"-".join(map(str, place)): draw(*place) for place in product(*map(range, sizes))}
