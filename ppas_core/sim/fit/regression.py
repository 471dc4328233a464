"""The fit: step cost from measured steps, with residuals per regime and an error on steps that were held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ppas_core.errors import NoResult
from ppas_core.sim.cost import StepCost
from ppas_core.sim.fit import design
from ppas_core.sim.fit.identify import Coefficient, examine
from ppas_core.sim.fit.log import Bools, Floats, StepFeatures

if TYPE_CHECKING:
    import pandas as pd

LEAST_STEPS: Final = 40
"""Fewer usable steps are no basis for a fit."""
SMALL_CHUNK_TOKENS: Final = 512
"""Up to so many tokens a step of vLLM runs in captured CUDA graphs by default; residuals are told apart there."""
_BLOCK_STEPS: Final = 16
_LEAST_BLOCKS: Final = 20
_FOLDS: Final = 5
_RAMP_GAIN: Final = 0.01
"""The ramp is kept when it lowers the mean squared left-out error by more than this share of it."""
_LARGEST_ERROR: Final = 0.3
_RAMP_CANDIDATES: Final = (256, 512, 1024, 1536, 2048, 3072, 4096)
"""A GPU is full from a few thousand tokens on: a bend beyond is noise, and would make the largest steps free."""
_RAMP_FOLDS: Final = 3
"""Folds, of the five, in which the ramp must lower the error: one lucky fold is no evidence."""
_STALL: Final = 8.0
_LEAST_SPREAD: Final = 0.01
_OUTLIER: Final = 4.0
"""A step this many robust standard deviations off is an outlier."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors (predicted / measured - 1) over some steps: their number, mean absolute, median absolute, mean."""

    steps: int
    mean_absolute: float
    median_absolute: float
    mean: float

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> Residuals:
        """Of these steps; there must be one."""
        relative = predicted / measured - 1
        return cls(
            len(relative),
            float(np.abs(relative).mean()),
            float(np.median(np.abs(relative))),
            float(relative.mean()),
        )

    def to_dict(self) -> dict[str, float]:
        """Plain JSON values, rounded."""
        return {
            "steps": self.steps,
            "mean_absolute": round(self.mean_absolute, 5),
            "median_absolute": round(self.median_absolute, 5),
            "mean": round(self.mean, 5),
        }


@dataclass(frozen=True, slots=True)
class StepFit:
    """What `fit_steps` found.

    cost: the fitted step cost. coefficients: each with its interval and verdict.
    residuals: by regime, of the steps fitted. held_out: the same, of the blocks held out, predicted by a fit without
    them. noise_sigma: standard deviation of the log of measured over predicted, of the bulk. outlier_share: of the
    steps. level: what all coefficients were multiplied by at the end, see `fit_steps`. time_ratio: predicted over
    measured time of all steps; below 1 where stalls took time that no model holds.
    ramp: how it was decided. left_out: rows of the logs that were no use, by reason.
    """

    cost: StepCost
    coefficients: tuple[Coefficient, ...]
    residuals: Mapping[str, Residuals]
    held_out: Mapping[str, Residuals]
    noise_sigma: float
    outlier_share: float
    level: float
    time_ratio: float
    ramp: Mapping[str, Any]
    left_out: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the notes of a profile."""
        return {
            "metrics": "relative errors (predicted / measured - 1) of single steps",
            "residuals": {name: found.to_dict() for name, found in self.residuals.items()},
            "held_out": {name: found.to_dict() for name, found in self.held_out.items()},
            "noise_sigma": round(self.noise_sigma, 5),
            "outlier_share": round(self.outlier_share, 5),
            "level": round(self.level, 5),
            "time_ratio": round(self.time_ratio, 5),
            "ramp": dict(self.ramp),
            "rows_left_out": dict(self.left_out),
            "coefficients": {entry.name: entry.to_dict() for entry in self.coefficients},
            "not_identified": {
                entry.name: entry.reason for entry in self.coefficients if entry.status == "not identified"
            },
        }


def fit_steps(steps: pd.DataFrame | StepFeatures, *, seed: int = 0) -> StepFit:
    """The step cost that describes measured steps best.

    steps: one log with the columns of `StepRow`, or the features of several (see `StepFeatures.join`).
    Every fifth block of consecutive steps is held out: the form is chosen without it and its error is what `held_out`
    says; the coefficients returned are fitted to all steps. A robust fit follows the middle of the noise, but a replay
    takes the mean: at the end all coefficients are scaled so that the time in all fitted steps is the measured one, where
    a step counts as at most _STALL robust standard deviations above its prediction. Deterministic for a seed.
    Raises NoResult when fewer than LEAST_STEPS steps are usable.
    """
    found = steps if isinstance(steps, StepFeatures) else StepFeatures.of(steps)
    if len(found) < LEAST_STEPS:
        lost = "".join(f"; {count} rows: {reason}" for reason, count in found.left_out.items())
        raise NoResult(
            f"the step log holds {len(found)} usable steps; a fit needs at least {LEAST_STEPS}: replay more{lost}"
        )
    blocks = block_numbers(found)
    is_tested = blocks % _FOLDS == _FOLDS // 2
    ramp_tokens, ramp = _choose_ramp(found.take(~is_tested), blocks[~is_tested])
    held_out = _without(found, ~is_tested, ramp_tokens)[is_tested]

    columns = design.columns(found, ramp_tokens)
    coefficients, weights = design.solve(columns, found.duration_s, design.balance(design.kinds(found)))
    coefficients, level = _levelled(columns, found.duration_s, coefficients)
    predicted = np.maximum(columns @ coefficients, 1e-9)
    relative = found.duration_s / predicted - 1
    spread = design.robust_spread(np.log(found.duration_s / predicted))
    names = (*design.COEFFICIENTS, *([design.RAMP] if ramp_tokens is not None else []))
    examined = examine(names, columns, found.duration_s * level, weights, coefficients, blocks, seed=seed)
    return StepFit(
        cost=design.cost_of(coefficients, ramp_tokens),
        coefficients=examined,
        residuals=_by_regime(found, predicted),
        held_out=_by_regime(found.take(is_tested), held_out),
        noise_sigma=spread,
        outlier_share=float(np.mean(np.abs(relative) > _OUTLIER * max(spread, 1e-4))),
        level=level,
        time_ratio=float(predicted.sum() / found.duration_s.sum()),
        ramp=ramp,
        left_out=found.left_out,
    )


def block_numbers(steps: StepFeatures) -> npt.NDArray[np.int64]:
    """int64[S]: blocks of consecutive steps of one stretch, 16 each, or fewer where that leaves too few blocks."""
    size = max(1, min(_BLOCK_STEPS, len(steps) // _LEAST_BLOCKS))
    starts = np.concatenate(([True], np.diff(steps.run) != 0))
    first = np.flatnonzero(starts)
    within = np.arange(len(steps)) - np.repeat(first, np.diff([*first, len(steps)]))
    return np.asarray(np.cumsum(within % size == 0) - 1, np.int64)


def _choose_ramp(steps: StepFeatures, blocks: npt.NDArray[np.int64]) -> tuple[float | None, dict[str, Any]]:
    """Tokens of the ramp, None for none: kept when it lowers the error on blocks left out, fold by fold."""
    plain_folds = _left_out_losses(steps, blocks, None)
    chunks = steps.prefill_tokens[steps.is_prefill]
    candidates = [
        tokens for tokens in _RAMP_CANDIDATES if len(chunks) and chunks.min() < tokens and tokens < chunks.max()
    ]
    by_fold = {tokens: _left_out_losses(steps, blocks, tokens) for tokens in candidates}
    losses, plain = {tokens: _mean(folds) for tokens, folds in by_fold.items()}, _mean(plain_folds)
    report: dict[str, Any] = {"left_out_error_without": round(plain**0.5, 5), "kept": False}
    if not losses:
        return None, {**report, "reason": "prefill steps of one size only"}
    best = min(losses, key=lambda tokens: losses[tokens])
    better = sum(one[0] < other[0] for one, other in zip(by_fold[best], plain_folds, strict=True))
    kept = losses[best] < (1 - _RAMP_GAIN) * plain and better >= min(_RAMP_FOLDS, len(plain_folds))
    report |= {
        "left_out_error_with": round(losses[best] ** 0.5, 5),
        "prefill_ramp_tokens": best,
        "folds_improved": better,
        "kept": kept,
        "reason": f"it {'lowers' if kept else 'does not lower'} the error on blocks left out",
    }
    return (float(best) if kept else None), report


def _left_out_losses(
    steps: StepFeatures, blocks: npt.NDArray[np.int64], ramp_tokens: float | None
) -> list[tuple[float, float]]:
    """Per fold: mean squared relative error of its prefill steps (mixed ones too), predicted without it, and its weight.

    Steps count as in the fit. Errors beyond _LARGEST_ERROR count as that: a stall must not decide about the form.
    """
    fold = np.unique(blocks, return_inverse=True)[1] % _FOLDS
    counts = design.balance(design.kinds(steps))
    losses = []
    for number in range(_FOLDS):
        chosen = (fold == number) & steps.is_prefill
        if chosen.any() and (fold != number).any():
            predicted = np.maximum(_without(steps, fold != number, ramp_tokens)[chosen], 1e-9)
            error = np.minimum(np.abs(np.log(steps.duration_s[chosen] / predicted)), _LARGEST_ERROR)
            weight = float(counts[chosen].sum())
            losses.append((float(counts[chosen] @ error**2) / weight, weight))
    return losses


def _mean(folds: list[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in folds)
    return sum(loss * weight for loss, weight in folds) / total if total else float("inf")


def _levelled(columns: Floats, duration_s: Floats, coefficients: Floats) -> tuple[Floats, float]:
    """The coefficients scaled to the measured time, stalls cut; and the factor."""
    predicted = np.maximum(columns @ coefficients, 1e-9)
    spread = max(design.robust_spread(np.log(duration_s / predicted)), _LEAST_SPREAD)
    level = float(np.minimum(duration_s, predicted * (1 + _STALL * spread)).sum() / predicted.sum())
    return coefficients * level, level


def _without(steps: StepFeatures, fitted: Bools, ramp_tokens: float | None) -> Floats:
    """All steps as predicted by a fit to the fitted ones."""
    columns = design.columns(steps, ramp_tokens)
    counts = design.balance(design.kinds(steps)[fitted])
    coefficients, _ = design.solve(columns[fitted], steps.duration_s[fitted], counts)
    coefficients, _ = _levelled(columns[fitted], steps.duration_s[fitted], coefficients)
    return np.asarray(columns @ coefficients)


def _by_regime(steps: StepFeatures, predicted: Floats) -> dict[str, Residuals]:
    prefill, decode = steps.is_prefill, steps.is_decode
    large = steps.prefill_tokens > SMALL_CHUNK_TOKENS
    regimes = {
        "all": np.ones(len(steps), np.bool_),
        "decode only": decode & ~prefill,
        "prefill only": prefill & ~decode,
        "mixed": prefill & decode,
        f"prefill of at most {SMALL_CHUNK_TOKENS} tokens": prefill & ~large,
        f"prefill of more than {SMALL_CHUNK_TOKENS} tokens": large,
    }
    return {name: Residuals.of(predicted[rows], steps.duration_s[rows]) for name, rows in regimes.items() if rows.any()}
