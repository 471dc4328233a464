"""How the preferred objective lies over the budgets, the other knobs held: a map for the report, not a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from autotune import aggregate
from autotune.evaluate import Evaluator
from autotune.metrics import Limits
from autotune.records import Origin
from autotune.results import Landscape
from ppas_core.errors import InvalidSettings, NoResult
from ppas_core.policy import PolicyParams
from search_spaces.knobs import thin
from search_spaces.space import Space
from traces.format import Trace

_POINTS: Final = 12
"""Values per axis."""
_GRID: Final = 20_000
"""Settings of the space looked through for the axes."""


def plane(
    evaluator: Evaluator,
    traces: Sequence[Trace],
    space: Space,
    pick: PolicyParams,
    metric: str,
    reference: Mapping[str, Mapping[str, float]],
    limits: Limits,
) -> Landscape | None:
    """Ratio of `metric` to the reference over b_max (columns) and b_cap (rows), the other knobs as in `pick`;
    where that is static, as in the first capped setting of the space.

    None for a live evaluator, where a map would cost hours, and where the space leaves nothing to map.
    """
    if evaluator.origin is not Origin.SIMULATED:
        return None
    settings = list(space.grid(_GRID))
    if pick.is_static:  # its other knobs say nothing; those of a capped setting of the space do
        pick = next((params for params in settings if not params.is_static), pick)

    def ratio(b_max: int, b_cap: int) -> float | None:
        try:
            params = replace(pick, b_max=b_max, b_cap=b_cap)
            if not space.contains(params):
                return None
            means = aggregate.regime_means([evaluator.replay(params, trace) for trace in traces], [metric], limits)
            return aggregate.objective(metric, means, reference)
        except (InvalidSettings, NoResult):
            return None

    return over_budgets(
        metric,
        [pick.b_max, *(params.b_max for params in settings)],
        [pick.b_cap, *(params.b_cap for params in settings)],
        ratio,
        pick.to_dict(),
        _POINTS,
    )


def over_budgets(
    metric: str,
    b_max: Iterable[int],
    b_cap: Iterable[int],
    ratio: Callable[[int, int], float | None],
    fixed: Mapping[str, Any],
    points: int,
) -> Landscape | None:
    """A map over b_max (columns) and b_cap (rows), at most `points` values of each; None where neither varies.

    ratio: of a setting with these two budgets, None where there is none. fixed: its other knobs.
    """
    x, y = (thin(sorted(set(values)), points) for values in (b_max, b_cap))
    if len(x) < 2 and len(y) < 2:
        return None
    return Landscape(
        metric=metric,
        x_name="b_max",
        y_name="b_cap",
        x=x,
        y=y,
        ratio=[[ratio(column, row) for column in x] for row in y],
        fixed={knob: value for knob, value in fixed.items() if knob not in ("b_max", "b_cap")},
    )
