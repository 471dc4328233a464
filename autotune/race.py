"""When a live setting may stop before its last trace: its deficit against the best one is already certain.

A race is paired: a setting and the incumbent saw the same traces, so their difference per trace is a log ratio. After k
of K traces the mean over all K is the mean so far within z standard errors, s * sqrt(1/k - 1/K), where s is how much
such log ratios vary from trace to trace: learned from the settings that ran to the end, never below what the replay
noise alone gives. A setting stops only when it loses in every objective, so that no end of a front is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from autotune import aggregate
from autotune.records import FloatArray

CERTAIN_SE: Final = 3.0
"""Standard errors that a deficit must exceed: 1 in 700 settings as good as the incumbent would be lost by chance."""
_LEAST_COMPLETE: Final = 3
"""Settings beside the incumbent that must have run to the end before how much log ratios vary is known."""
_LEAST_TRACES: Final = 2

ByTrace = Mapping[str, Mapping[str, float]]
"""Trace name to metric name to value."""


@dataclass(slots=True)
class Race:
    """The settings that ran to the end, and the traces in the order in which a challenger meets them.

    objectives: metrics that all must be lost. noise: standard deviation of the log of one replay's metric.
    """

    objectives: Sequence[str]
    order: Sequence[str]
    noise: float
    _complete: list[FloatArray] = field(default_factory=list)
    _scores: list[float] = field(default_factory=list)

    def finished(self, by_trace: ByTrace, score: float) -> None:
        """A setting ran to the end with this score; the lowest is the incumbent."""
        self._complete.append(self._logs(by_trace, self.order))
        self._scores.append(score)

    def deficit(self, by_trace: ByTrace) -> str | None:
        """Why a setting that saw these traces has certainly lost, in words; None while it may still win."""
        seen = [name for name in self.order if name in by_trace]
        if len(self._complete) <= _LEAST_COMPLETE or not _LEAST_TRACES <= len(seen) < len(self.order):
            return None
        best = self._complete[int(np.argmin(self._scores))]
        behind = self._logs(by_trace, seen) - best[:, [self.order.index(name) for name in seen]]
        sigma = np.maximum(self._spread(best), np.sqrt(2) * self.noise)
        error = sigma * np.sqrt(1 / len(seen) - 1 / len(self.order))
        mean = behind.mean(axis=1)
        if not np.all(mean > CERTAIN_SE * error):
            return None
        least = 100 * np.expm1(float(np.min(mean)))
        return (
            f"stopped after {len(seen)} of {len(self.order)} traces: {least:.1f} % or more behind the best setting in "
            f"every objective, beyond {CERTAIN_SE:g} standard errors"
        )

    def _spread(self, best: FloatArray) -> FloatArray:
        """float64[M]: how much log ratios to the incumbent vary from trace to trace, over the complete settings."""
        others = np.array([logs - best for logs in self._complete if logs is not best])
        return np.asarray(np.sqrt(others.var(axis=2, ddof=1).mean(axis=0)), dtype=np.float64)

    def _logs(self, by_trace: ByTrace, names: Sequence[str]) -> FloatArray:
        """float64[M, K]: logs of the metrics, lower is better."""
        signs = np.array([[1.0 if aggregate.ratio(metric, 2.0, 1.0) > 1 else -1.0] for metric in self.objectives])
        values = [[by_trace[name][metric] for name in names] for metric in self.objectives]
        return np.asarray(signs * np.log(values), dtype=np.float64)
