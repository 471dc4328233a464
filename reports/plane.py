"""The plane of the space that a study evaluated around its pick, as plain data. Knows no Plotly and no HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotune.results import StudyResults
from reports.roles import BEST_STATIC, TUNED, reference_role, role
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
    rows = tuple(tuple(gain_pct(value) for value in row) for row in plane.ratio)
    known = [abs(g) for row in rows for g in row if g is not None]
    if not known:
        return Missing("The space allows no setting on the plane that the study evaluated.")
    marks = []
    for name in (reference_role(results), BEST_STATIC, TUNED):
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
