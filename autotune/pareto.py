"""Which of many settings are worth a look: the Pareto front, and the hypervolume that it covers. Lower is better."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def on_front(points: ArrayLike) -> NDArray[np.bool_]:
    """bool[N] for float[N, M] points: True where no other point is at least as good everywhere and better somewhere."""
    values = np.asarray(points, dtype=np.float64)
    if values.size == 0:
        return np.zeros(len(values), dtype=np.bool_)
    no_worse = (values[:, None, :] <= values[None, :, :]).all(axis=2)
    better = (values[:, None, :] < values[None, :, :]).any(axis=2)
    return np.asarray(~(no_worse & better).any(axis=0), dtype=np.bool_)


def hypervolume(points: ArrayLike, reference: Sequence[float]) -> float:
    """Volume between the front of float[N, M] `points` and the `reference` point; points beyond it add nothing.

    Slices along the last objective; exact, and quick for the few dozen points that a front of a study has.
    """
    bound = np.asarray(reference, dtype=np.float64)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(bound))
    values = values[(values < bound).all(axis=1)]
    return _sliced_volume(values[on_front(values)], bound)


def _sliced_volume(points: NDArray[np.float64], bound: NDArray[np.float64]) -> float:
    if len(points) == 0:
        return 0.0
    if len(bound) == 1:
        return float(bound[0] - points[:, 0].min())
    points = points[np.argsort(points[:, -1], kind="stable")]
    tops = np.append(points[1:, -1], bound[-1])
    volume = 0.0
    for index, (bottom, top) in enumerate(zip(points[:, -1], tops, strict=True)):
        if top > bottom:
            below = points[: index + 1, :-1]
            volume += (top - bottom) * _sliced_volume(below[on_front(below)], bound[:-1])
    return float(volume)
