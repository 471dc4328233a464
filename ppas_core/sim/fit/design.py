"""The step-time model as a linear one: which column belongs to which coefficient, and how the columns are weighed."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ppas_core.sim.cost import StepCost
from ppas_core.sim.fit.log import Floats, StepFeatures

COEFFICIENTS: Final = (
    "step_s",
    "prefill_token_s",
    "decode_token_s",
    "prefill_pair_s",
    "decode_context_token_s",
    "prefill_step_s",
    "mixed_step_s",
)
"""In the order in which they are kept where the data cannot tell them apart."""
RAMP: Final = "prefill_ramp_token_s"
_SAME: Final = 1e-7
"""A column whose share of squares beyond the columns before it is below this says nothing of its own."""
_HUBER: Final = 1.5
"""Relative residuals beyond this many robust standard deviations count linearly, not squared."""
_ROUNDS: Final = 12
_LEAST_SPREAD: Final = 0.01


def columns(steps: StepFeatures, ramp_tokens: float | None = None) -> Floats:
    """float64[S, C]: one column per coefficient of COEFFICIENTS, and one for RAMP where ramp_tokens is given."""
    prefill, decode = steps.is_prefill, steps.is_decode
    found = [
        np.ones(len(steps)),
        steps.prefill_tokens,
        steps.decode_tokens,
        steps.prefill_pairs,
        steps.decode_context_tokens,
        prefill.astype(np.float64),
        (prefill & decode).astype(np.float64),
    ]
    if ramp_tokens is not None:
        found.append(np.minimum(steps.prefill_tokens, ramp_tokens))
    return np.column_stack(found)


def separable(weighed: Floats) -> npt.NDArray[np.bool_]:
    """bool[C]: columns that are no combination of those before them."""
    return _orthogonal(weighed)[0]


def _orthogonal(weighed: Floats) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Which columns are kept, bool[C], and an orthonormal basis of them, float64[K, S] (Gram-Schmidt, twice over)."""
    kept = np.zeros(weighed.shape[1], np.bool_)
    basis = np.empty((weighed.shape[1], weighed.shape[0]))
    size = 0
    for place in range(weighed.shape[1]):
        column = weighed[:, place]
        squares = float(column @ column)
        if squares == 0:
            continue
        rest = column.copy()
        for _ in range(2):
            rest -= (basis[:size] @ rest) @ basis[:size]
        left = float(rest @ rest)
        if left > _SAME * squares:
            kept[place] = True
            basis[size] = rest / np.sqrt(left)
            size += 1
    return kept, basis[:size]


def kinds(steps: StepFeatures) -> npt.NDArray[np.int64]:
    """int64[S]: steps of one kind are alike: without prefill, or by the prefill tokens (in powers of 4), mixed or not."""
    size = np.floor(np.log2(np.maximum(steps.prefill_tokens, 1)) / 2).astype(np.int64)
    return np.where(steps.is_prefill, 2 * (size + 1) + steps.is_decode, 0)


def balance(kind: npt.NDArray[np.int64]) -> Floats:
    """float64[S], mean 1: how much each step counts, so that a kind counts by the square root of its number of steps.

    A log holds hundreds of decode-only steps for one chunk of 16,384 tokens, which takes as long as all of them.
    """
    _, place, counts = np.unique(kind, return_inverse=True, return_counts=True)
    weight = 1 / np.sqrt(counts[place])
    return np.asarray(weight / weight.mean())


def solve(design: Floats, duration_s: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Coefficients of least relative error, none negative, and the weights of the steps; float64[C] and float64[S].

    Each residual counts in relation to the predicted duration, and a large one linearly (Huber, by iteration), so that
    a stall of a shared machine moves nothing. counts: how much each step counts, see `balance`.
    """
    predicted = duration_s
    coefficients = np.zeros(design.shape[1])
    importance = np.sqrt(counts)
    weights = importance / predicted
    for _ in range(_ROUNDS):
        coefficients = least_squares(design * weights[:, None], duration_s * weights)
        predicted = np.maximum(design @ coefficients, 1e-9)
        relative = duration_s / predicted - 1
        spread = max(robust_spread(relative), _LEAST_SPREAD)
        soft = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(relative), 1e-300)))
        weights = importance * soft / predicted
    return coefficients, weights


def least_squares(design: Floats, target: Floats) -> Floats:
    """Non-negative least squares; columns are brought to one length first, and one that says nothing of its own gets 0."""
    kept, basis = _orthogonal(design)
    answer = np.zeros(design.shape[1])
    if kept.any():
        lengths = np.sqrt(np.sum(design[:, kept] ** 2, axis=0))
        # In the basis there are as many rows as columns; what lies outside it no coefficient can change.
        found, _ = nnls(basis @ (design[:, kept] / lengths), basis @ target)
        answer[kept] = found / lengths
    return answer


def robust_spread(relative: Floats) -> float:
    """Standard deviation of the bulk of `relative`, by the median absolute deviation."""
    return float(1.4826 * np.median(np.abs(relative - np.median(relative)))) if len(relative) else 0.0


def cost_of(coefficients: Floats, ramp_tokens: float | None) -> StepCost:
    """The coefficients of `columns` as a step cost. Raises InvalidInput where no step takes any time."""
    named = dict(zip((*COEFFICIENTS, RAMP), coefficients.tolist(), strict=False))
    return StepCost(**named, prefill_ramp_tokens=ramp_tokens or 0.0)
