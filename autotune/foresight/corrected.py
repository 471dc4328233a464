"""The simulator's forecast, corrected by what was measured: where is the next live trial worth most?

A Gaussian process over the encoded knobs models the log of measured over predicted ratio. Where nothing was measured
nearby, its mean is the common error and its spread is wide; near a trial it follows the measurement. So a good
simulator decides alone at first, and a poor one is overruled by the trials, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtr

from autotune.records import FloatArray
from ppas_core.policy import PolicyParams
from search_spaces.space import Space

_LENGTH: Final = 0.35
"""Distance over which errors of the simulator resemble each other, in widths of a knob's range."""
_LEAST_SD: Final = 0.003
"""The errors' standard deviation is never taken for smaller than this."""


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """mean, sd: float64[S], the log of the score of every forecast setting after the correction."""

    mean: FloatArray
    sd: FloatArray

    def expected_gain(self, best_log: float) -> FloatArray:
        """float64[S]: by how much the log of the score is expected to fall below `best_log`, never less than 0."""
        gap = best_log - self.mean
        z = gap / self.sd
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        return np.asarray(gap * ndtr(z) + self.sd * density, dtype=np.float64)


def corrected(
    predicted: FloatArray,
    points: FloatArray,
    tried: FloatArray,
    tried_points: FloatArray,
    measured: FloatArray,
    noise: float,
) -> Corrected:
    """The forecast after N trials.

    predicted: float64[S], logs of the forecast score. points: float64[S, D], encoded knobs within 0 to 1.
    tried, tried_points: the same of the trials, float64[N] and float64[N, D]. measured: float64[N], logs of their
    measured scores. noise: the standard deviation of these.
    """
    error = measured - tried
    common = float(np.median(error))
    spread = float(np.std(error - common)) if len(error) > 1 else _LEAST_SD
    scale = max(spread, noise, _LEAST_SD)
    own = scale**2 * _kernel(tried_points, tried_points) + (noise**2 + 1e-10) * np.eye(len(error))
    factor = cho_factor(own, lower=True)
    across = scale**2 * _kernel(points, tried_points)
    mean = predicted + common + across @ cho_solve(factor, error - common)
    explained = np.einsum("sn,ns->s", across, cho_solve(factor, across.T))
    return Corrected(mean=mean, sd=np.sqrt(np.maximum(scale**2 - explained, 1e-12)))


def encoded_points(settings: Sequence[PolicyParams], space: Space) -> FloatArray:
    """float64[S, D]: the free knobs of the settings, scaled to 0..1; a setting outside the space lies in its middle."""
    bounds = space.encoded_bounds()
    middle = {name: (low + high) / 2 for name, (low, high) in bounds.items()}
    points = [space.encode(params) if space.contains(params) else middle for params in settings]
    rows = np.array([[point[name] for name in bounds] for point in points], dtype=np.float64)
    low, high = (np.array([pair[side] for pair in bounds.values()]) for side in (0, 1))
    return np.asarray((rows.reshape(len(points), len(bounds)) - low) / np.maximum(high - low, 1e-12), dtype=np.float64)


def _kernel(a: FloatArray, b: FloatArray) -> FloatArray:
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-distance / (2 * _LENGTH**2)), dtype=np.float64)
