"""Which of many settings are worth a look: the Pareto front, and the hypervolume that it covers. Lower is better."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def on_front(points: ArrayLike) -> NDArray[np.bool_]:
    """bool[N] for float[N, M] points: True where no other point is at least as good everywhere and better somewhere."""
    values = np.asarray(points, dtype=np.float64)
    found = np.zeros(len(values), dtype=np.bool_)
    if values.size == 0:
        return found
    front = np.empty((0, values.shape[1]))
    for place in np.lexsort(values.T[::-1]):  # what dominates a point comes before it
        point = values[place]
        no_worse = front[(front <= point).all(axis=1)]
        if not (no_worse < point).any():
            found[place] = True
            front = np.vstack((front, point))
    return found


def hypervolume(points: ArrayLike, reference: Sequence[float]) -> float:
    """Volume between the front of float[N, M] `points` and the `reference` point; points beyond it add nothing."""
    bound = np.asarray(reference, dtype=np.float64)
    values = np.asarray(points, dtype=np.float64).reshape(-1, len(bound))
    values = values[(values < bound).all(axis=1)]
    return _volume(values, bound)


class GrowingFront:
    """A front that takes one point after another and knows its hypervolume against `reference` at any time.

    A point that the front dominates costs a comparison with it; another one the volume that it alone covers.
    """

    def __init__(self, reference: ArrayLike) -> None:
        self._bound = np.asarray(reference, dtype=np.float64)
        self._front = np.empty((0, len(self._bound)))
        self.volume = 0.0

    def add(self, point: ArrayLike) -> float:
        """Takes one more point, float[M]; the volume with it."""
        new = np.asarray(point, dtype=np.float64)
        if not (new < self._bound).all() or (self._front <= new).all(axis=1).any():
            return self.volume
        # What the others cover of the new point's own box is there already.
        shared = np.maximum(self._front, new)
        shared = shared[(shared < self._bound).all(axis=1)]
        self.volume += float(np.prod(self._bound - new)) - _volume(shared, self._bound)
        self._front = np.vstack((self._front[~(new <= self._front).all(axis=1)], new))
        return self.volume


def _volume(points: NDArray[np.float64], bound: NDArray[np.float64]) -> float:
    """Exact, in slices along the last objective; `points` lie below `bound`."""
    if len(points) == 0:
        return 0.0
    if len(bound) == 1:
        return float(bound[0] - points[:, 0].min())
    points = points[np.argsort(points[:, -1], kind="stable")]
    thickness = np.diff(points[:, -1], append=bound[-1])
    if len(bound) == 2:
        widths = bound[0] - np.minimum.accumulate(points[:, 0])
        return float(widths @ thickness)
    slices = GrowingFront(bound[:-1])
    return float(sum(slices.add(point[:-1]) * thick for point, thick in zip(points, thickness, strict=True)))
