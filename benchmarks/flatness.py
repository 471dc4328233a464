"""Whether something that was sampled over a long run stayed flat: a slope with its interval, held against a stated bound.

The first half of the samples is warm-up. Over the second half the Theil-Sen slope (the median of the slopes between all
pairs of samples, which a few outliers do not move) times the span gives the growth, with a 95 % interval. Flat is said only
where the whole interval is below the bound: growth that is not excluded is not flat. Neighbouring samples of one process
resemble each other more than the interval assumes, so it is a little too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import theilslopes

LEAST_SAMPLES = 4
"""In the second half; fewer say nothing."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a quantity may grow over the second half.

    Either absolute in its own unit, or in per cent of its median there, or absolute per step (per trial); none of them
    for what is told only, not judged.
    """

    absolute: float | None = None
    percent: float | None = None
    per_step: float | None = None

    def value(self, level: float, steps: float) -> float | None:
        """The bound in the quantity's unit."""
        if self.percent is not None:
            return abs(level) * self.percent / 100
        return self.absolute if self.per_step is None else self.per_step * steps

    def words(self) -> str:
        if self.percent is not None:
            return f"{self.percent:g} %"
        if self.per_step is not None:
            return f"{self.per_step:.4g} a trial"
        return "–" if self.absolute is None else f"{self.absolute:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """level: median of the second half; growth with its interval: over the second half; steps: its span in trials."""

    name: str
    unit: str
    samples: int
    steps: float
    first: float
    level: float
    growth: float
    low: float
    high: float
    bound: float | None
    bound_words: str

    @property
    def flat(self) -> bool:
        return self.bound is None or (self.samples >= LEAST_SAMPLES and self.high <= self.bound)

    @property
    def growth_pct(self) -> float:
        return 100 * self.growth / self.level if self.level else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "growth_pct": self.growth_pct, "flat": self.flat}


def judge(name: str, unit: str, steps: Sequence[float], values: Sequence[float], bound: Bound) -> Verdict:
    """The verdict on `values`, sampled after `steps` trials each; NaN where nothing was sampled."""
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value == value]
    half = known[len(known) // 2 :]
    if len(half) < LEAST_SAMPLES:
        level = float(np.median([value for _, value in half])) if half else float("nan")
        nothing = float("nan")
        return Verdict(
            name, unit, len(half), 0.0, level, level, nothing, nothing, nothing, bound.value(0, 0), bound.words()
        )
    x, y = (np.array(column, float) for column in zip(*half, strict=True))
    span, level = float(x[-1] - x[0]), float(np.median(y))
    slope, _, low, high = theilslopes(y, x, alpha=0.95)
    return Verdict(
        name=name,
        unit=unit,
        samples=len(half),
        steps=span,
        first=known[0][1],
        level=level,
        growth=float(slope) * span,
        low=float(low) * span,
        high=float(high) * span,
        bound=bound.value(level, span),
        bound_words=bound.words(),
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """For a terminal: a line per quantity."""
    head = f"{'':34} {'first':>9} {'level':>9}  {'growth over the second half, 95 %':>36} {'bound':>14}"
    lines = [head]
    for v in verdicts:
        name = f"{v.name}, {v.unit}" if v.unit else v.name
        if v.samples < LEAST_SAMPLES:
            lines.append(f"{name:34} too few samples ({v.samples})")
            continue
        growth = f"{v.growth:+.4g} [{v.low:+.4g}, {v.high:+.4g}] ({v.growth_pct:+.1f} %)"
        said = "flat" if v.flat else "not shown flat" if v.low <= (v.bound or 0.0) else "NOT FLAT"
        said = "" if v.bound is None else said
        lines.append(f"{name:34} {v.first:9.4g} {v.level:9.4g}  {growth:>36} {v.bound_words:>14}  {said}".rstrip())
    return "\n".join(lines)
