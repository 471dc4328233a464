"""Which coefficients the steps determine: intervals from a bootstrap over blocks, and the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ppas_core.sim.fit.design import separable
from ppas_core.sim.fit.log import Floats

Status = Literal["identified", "negligible", "not identified"]

_RESAMPLES: Final = 200
_LOW, _HIGH = 1.0, 99.0
"""Percentiles of the interval. Steps of one kind come in few blocks and the choice of the form is not drawn again, so that
it holds the truth in about nine of ten calibrations (`docs/decisions/calibration.md`)."""
_SURE: Final = 0.25
"""A coefficient is identified when half its interval is at most this share of it."""
_SMALL: Final = 0.02
"""A coefficient is negligible when even its upper bound is at most this share of the steps in which it acts."""


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One coefficient of the step cost and what the data say of it.

    value, low, high: estimate and interval (see `_LOW`), in the coefficient's own unit. time_share: its share of the measured
    time, 0 to 1. status: whether the data determine it; reason: why not, or how well.
    """

    name: str
    value: float
    low: float
    high: float
    time_share: float
    status: Status
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def examine(
    names: Sequence[str],
    design: Floats,
    duration_s: Floats,
    weights: Floats,
    coefficients: Floats,
    blocks: npt.NDArray[np.int64],
    *,
    seed: int = 0,
) -> tuple[Coefficient, ...]:
    """What the steps say of each coefficient; arguments as `design.solve` takes and gives them, blocks: int64[S]."""
    weighed = design * weights[:, None]
    kept = separable(weighed)
    draws = _bootstrap(weighed, duration_s * weights, kept, blocks, seed)
    low, high = np.percentile(draws, [_LOW, _HIGH], axis=0)
    predicted = np.maximum(design @ coefficients, 1e-9)
    return tuple(
        _judge(names, place, design, predicted, coefficients, kept, draws, float(low[place]), float(high[place]))
        for place in range(len(names))
    )


def _judge(
    names: Sequence[str],
    place: int,
    design: Floats,
    predicted: Floats,
    coefficients: Floats,
    kept: npt.NDArray[np.bool_],
    draws: Floats,
    low: float,
    high: float,
) -> Coefficient:
    column, value = design[:, place], float(coefficients[place])
    acts = column > 0
    share = float(np.sum(value * column) / np.sum(predicted))

    def found(status: Status, reason: str) -> Coefficient:
        return Coefficient(names[place], value, low, high, share, status, reason)

    if not acts.any():
        return found("not identified", "no step in which it acts was measured; 0 is assumed")
    if not kept[place]:
        others = [name for name, is_kept in zip(names[:place], kept, strict=False) if is_kept]
        partners = _explained_by(design[acts] / predicted[acts, None], place, kept, others)
        return found(
            "not identified",
            f"in these steps it always goes with {partners}, so its part is counted there; steps of other shapes "
            "(a second prompt length, another budget) would tell them apart",
        )
    if value > 0 and (high - low) / 2 <= _SURE * value:
        return found("identified", f"within ±{100 * (high - low) / 2 / value:.1f} %")
    most = float(np.mean(high * column[acts] / predicted[acts]))
    if most <= _SMALL:
        return found("negligible", f"at most {100 * most:.1f} % of the steps in which it acts")
    partner = _partner(names, place, kept, draws)
    trade = f"; it trades against {partner}" if partner else ""
    return found(
        "not identified", f"anything from {low:.3g} to {high:.3g} fits, up to {100 * most:.0f} % of such steps{trade}"
    )


def _bootstrap(
    weighed: Floats, target: Floats, kept: npt.NDArray[np.bool_], blocks: npt.NDArray[np.int64], seed: int
) -> Floats:
    """float64[R, C]: the coefficients fitted to blocks drawn with replacement."""
    lengths = np.sqrt(np.sum(weighed**2, axis=0))
    scaled = weighed[:, kept] / lengths[kept]
    members = [np.flatnonzero(blocks == block) for block in np.unique(blocks)]
    grams = np.array([scaled[rows].T @ scaled[rows] for rows in members])
    sides = np.array([scaled[rows].T @ target[rows] for rows in members])
    rng = np.random.default_rng([seed, len(members)])
    draws = np.zeros((_RESAMPLES, weighed.shape[1]))
    for draw in draws:
        counts = np.bincount(rng.integers(len(members), size=len(members)), minlength=len(members))
        values, vectors = np.linalg.eigh(np.tensordot(counts, grams, 1))
        values = np.maximum(values, 1e-14 * values[-1])
        root = (vectors * np.sqrt(values)).T  # root' root is the drawn Gram matrix
        side = (vectors / np.sqrt(values)).T @ (counts @ sides)
        draw[kept] = nnls(root, side)[0] / lengths[kept]
    return draws


def _partner(names: Sequence[str], place: int, kept: npt.NDArray[np.bool_], draws: Floats) -> str | None:
    """The coefficient that falls when this one rises, over the resamples; None where there is none to speak of."""
    best, name = -0.5, None
    own = draws[:, place]
    for other in np.flatnonzero(kept).tolist():
        if other != place and own.std() > 0 and draws[:, other].std() > 0:
            correlation = float(np.corrcoef(own, draws[:, other])[0, 1])
            if correlation < best:
                best, name = correlation, names[other]
    return name


def _explained_by(weighed: Floats, place: int, kept: npt.NDArray[np.bool_], others: Sequence[str]) -> str:
    before = weighed[:, :place][:, kept[:place]]
    lengths = np.sqrt(np.sum(before**2, axis=0))
    use = lengths > 0
    share, *_ = np.linalg.lstsq(before[:, use] / lengths[use], weighed[:, place], rcond=None)
    large = np.abs(share) > 0.05 * np.abs(share).max()
    named = [name for name, is_used in zip(others, use, strict=True) if is_used]
    return " and ".join(name for name, is_large in zip(named, large, strict=True) if is_large)
