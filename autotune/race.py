"""When a live setting may stop before its last trace: its deficit against the best one is already certain.

A race is paired: a setting and the incumbent saw the same traces, so their difference per trace is a log ratio. As in
the objective, every load regime weighs alike, so nothing is said before each was seen. Of a regime's K traces k were
seen. Their mean differs from what is true of all K by two errors: the traces differ from each other, which counts for
those not seen (v (1/k - 1/K)), and both replays of each are noisy (2 n / k, with the variance n of one replay). How much
log ratios vary within a regime, v + 2 n, is learned from the settings that ran to the end. The incumbent is the best of
many, and owes a part of its lead to luck: what the largest of so many noises is expected to be is taken off. A setting
stops only when it loses in every objective, so that no end of a front is cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from autotune import metrics
from autotune.noise import variance_share
from autotune.records import FloatArray
from autotune.stats import student_quantile

CERTAIN_SE: Final = 3.0
"""Standard errors that a deficit must exceed: few settings as good as the incumbent in truth are lost by chance."""
_LEAST_COMPLETE: Final = 3
"""Settings beside the incumbent that must have run to the end before how much log ratios vary is known."""
_LEAST_TRACES: Final = 2

ByTrace = Mapping[str, Mapping[str, float]]
"""Trace name to metric name to value."""


@dataclass(slots=True)
class Race:
    """The settings that ran to the end, and the traces in the order in which a challenger meets them.

    objectives: metrics that all must be lost. order: trace names; regimes: the load regime of each of them, in order.
    noise: standard deviation of the log of one replay's metric.
    """

    objectives: Sequence[str]
    order: Sequence[str]
    regimes: Sequence[str]
    noise: float
    _complete: list[FloatArray] = field(default_factory=list)
    _scores: list[float] = field(default_factory=list)

    def finished(self, by_trace: ByTrace, score: float) -> None:
        """A setting ran to the end with this score; the lowest is the incumbent."""
        self._complete.append(self._logs(by_trace, self.order))
        self._scores.append(score)

    def deficit(self, by_trace: ByTrace) -> str | None:
        """Why a setting that saw these traces has certainly lost, in words; None while it may still win."""
        seen = [place for place, name in enumerate(self.order) if name in by_trace]
        groups = [[place for place in seen if self.regimes[place] == regime] for regime in dict.fromkeys(self.regimes)]
        too_few = not _LEAST_TRACES <= len(seen) < len(self.order) or not all(groups)
        if len(self._complete) <= _LEAST_COMPLETE or too_few:
            return None
        best = self._complete[int(np.argmin(self._scores))]
        behind = np.full(best.shape, np.nan)
        behind[:, seen] = self._logs(by_trace, [self.order[place] for place in seen]) - best[:, seen]
        mean = np.mean([behind[:, group].mean(axis=1) for group in groups], axis=0)
        seen_share = variance_share([len(group) for group in groups])
        all_share = variance_share(list(Counter(self.regimes).values()))
        of_replays = 2 * self.noise**2
        of_traces = np.maximum(self._spread(best) ** 2 - of_replays, 0)
        errors = np.sqrt(of_traces * (seen_share - all_share) + of_replays * seen_share)
        least = mean - self._luck(self.noise * np.sqrt(all_share)) - CERTAIN_SE * errors
        if not np.all(least > 0):  # also where a metric is zero or undefined: nothing is certain then
            return None
        return (
            f"stopped after {len(seen)} of {len(self.order)} traces: certainly behind the best setting in every "
            f"objective, by {100 * np.expm1(float(np.min(mean))):.1f} % or more so far (beyond {CERTAIN_SE:g} standard errors)"
        )

    def _luck(self, noise: float) -> float:
        """By how much the best score is expected to be too good, as a log, where a score has that noise."""
        near = sum(score <= min(self._scores) * np.exp(CERTAIN_SE * np.sqrt(2) * noise) for score in self._scores)
        # Expected largest of so many standard normals, after Blom (1958).
        return noise * student_quantile(np.inf, (near - 0.375) / (near + 0.25))

    def _spread(self, best: FloatArray) -> FloatArray:
        """float64[M]: how much log ratios to the incumbent vary within a regime, over the complete settings."""
        others = np.array([logs - best for logs in self._complete if logs is not best])
        squares, freedom = np.zeros(len(self.objectives)), 0
        for regime in dict.fromkeys(self.regimes):
            own = others[:, :, [place for place, other in enumerate(self.regimes) if other == regime]]
            squares += ((own - own.mean(axis=2, keepdims=True)) ** 2).sum(axis=(0, 2))
            freedom += len(others) * (own.shape[2] - 1)
        return np.sqrt(squares / freedom) if freedom else np.full(len(self.objectives), np.inf)

    def _logs(self, by_trace: ByTrace, names: Sequence[str]) -> FloatArray:
        """float64[M, K]: logs of the metrics, lower is better."""
        signs = np.array([[metrics.sign(metric)] for metric in self.objectives])
        values = np.array([[by_trace[name][metric] for name in names] for metric in self.objectives])
        logs = np.log(values, out=np.full(values.shape, np.nan), where=values > 0)
        return np.asarray(signs * logs, dtype=np.float64)


def in_turn(places: Sequence[int], regimes: Sequence[str]) -> list[int]:
    """`places` of traces, one of each regime in turn, each regime's in the order given. regimes: of every trace."""
    queues: dict[str, list[int]] = {}
    for place in places:
        queues.setdefault(regimes[place], []).append(place)
    turns = max(map(len, queues.values()), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues.values() if turn < len(queue)]
