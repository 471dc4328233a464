"""The plane of the space that a study evaluated around its pick, as plain data. Knows no Plotly and no HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.results import Landscape, StudyResults
from reports.roles import BEST_STATIC, TUNED, is_static, reference_role, role
from reports.views import Missing, gain_pct


@dataclass(frozen=True, slots=True)
class PlaneMark:
    """A named setting on the plane, at fractional column and row."""

    name: str
    column: float
    row: float


@dataclass(frozen=True, slots=True)
class LandscapeView:
    """The preferred objective over a plane. gain_pct[row][column]; None where the space allows no setting."""

    metric: str
    x_name: str
    y_name: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    gain_pct: tuple[tuple[float | None, ...], ...]
    fixed: Mapping[str, object]
    marks: tuple[PlaneMark, ...]
    limit_pct: float


def landscape(results: StudyResults) -> LandscapeView | Missing:
    """The preferred objective over the plane that the study evaluated, with the named settings that lie in it."""
    plane = results.landscape
    if plane is None:
        return Missing("The study did not evaluate a plane of the space.")
    return _view(results, plane, roles=(reference_role(results), BEST_STATIC, TUNED))


def maps(results: StudyResults) -> tuple[LandscapeView, ...]:
    """The simulated maps; the settings marked on each lie in it. All of them share the scale of their colours."""
    views = []
    for plane in results.maps:
        within = tuple(name for name in (reference_role(results), BEST_STATIC, TUNED) if _lies_in(results, name, plane))
        view = _view(results, plane, roles=within)
        if isinstance(view, LandscapeView):
            views.append(view)
    limit = max((view.limit_pct for view in views), default=1.0)
    return tuple(replace(view, limit_pct=limit) for view in views)


def turned(view: LandscapeView, among: Sequence[LandscapeView]) -> list[tuple[str, object]]:
    """The fixed knobs that tell this map from the others; all of them where none does."""
    differing = [k for k, v in view.fixed.items() if any(other.fixed.get(k) != v for other in among)]
    return [(k, view.fixed[k]) for k in differing or view.fixed]


def _lies_in(results: StudyResults, name: str, plane: Landscape) -> bool:
    """Whether the setting in a role has the plane's values of the knobs that the plane holds fixed."""
    held = role(results, name)
    if held is None:
        return False
    return is_static(held.setting) or all(held.setting.params.get(k, v) == v for k, v in plane.fixed.items())


def _view(results: StudyResults, plane: Landscape, *, roles: Sequence[str]) -> LandscapeView | Missing:
    rows = tuple(tuple(gain_pct(value) for value in row) for row in plane.ratio)
    known = [abs(g) for row in rows for g in row if g is not None]
    if not known:
        return Missing("The space allows no setting on the plane that the study evaluated.")
    marks = []
    for name in roles:
        held = role(results, name)
        if held is None:
            continue
        column = _place(held.setting.params.get(plane.x_name), plane.x)
        row = _place(held.setting.params.get(plane.y_name), plane.y)
        if column is not None and row is not None:
            marks.append(PlaneMark(name, column, row))
    best = max((g for row in rows for g in row if g is not None), default=0.0)
    return LandscapeView(
        plane.metric,
        plane.x_name,
        plane.y_name,
        tuple(plane.x),
        tuple(plane.y),
        rows,
        plane.fixed,
        tuple(marks),
        max(1.0, min(max(known), 3 * max(best, 1.0))),
    )


def _place(value: object, grid: Sequence[int]) -> float | None:
    """Where `value` lies on `grid` (ascending), as a fractional index in log space; None outside or not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not grid:
        return None
    for i, (low, high) in enumerate(pairwise(grid)):
        if low <= value <= high:
            return i + (math.log(value / low) / math.log(high / low) if low > 0 else (value - low) / (high - low))
    return float(len(grid) - 1) if value == grid[-1] else None
