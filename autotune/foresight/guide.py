"""The simulator beside a live study: it proposes settings, and is judged by what the live trials measure.

It only proposes; measurements decide. Once its predictions are contradicted it proposes no more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import spearmanr

from autotune import choose
from autotune.foresight.corrected import corrected, encoded_points
from autotune.foresight.forecast import Forecast
from autotune.records import FloatArray
from ppas_core.policy import PolicyParams
from search_spaces.space import Space

PROPOSALS: Final = 5
"""Settings proposed before the search goes on: the predicted best, and others spread over the predicted good ones."""
LARGEST_ERROR_PCT: Final = 15.0
"""Mean absolute error of the predicted ratios beyond which the simulator is not trusted."""
LEAST_CONCORDANCE: Final = 0.8
"""Share of the clearly different pairs that it must rank rightly."""
_ONE_SIDED: Final = 2 / 3
"""Share of the mean absolute error that the mean error has, from which the error is said to be to one side."""
_NO_BOUND_PCT: Final = 50.0
"""An error that noise alone may give, above which being within it says little."""
_WORTH_A_TURN: Final = 0.25
"""Expected gain, in standard deviations of a measured score, from which a forecast setting is worth a trial."""
_NEAR_BEST: Final = 0.02
"""Settings predicted within this share of the best count as good."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A setting with its measured ratios: metric name to ratio to the reference."""

    params: PolicyParams
    objectives: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Judgement:
    """How far the simulator was off; see `autotune.results.Prediction` for the figures. allowed_pct: of error_pct."""

    num_trials: int
    error_pct: float
    concordance: float | None
    rank_correlation: float | None
    allowed_pct: float = LARGEST_ERROR_PCT
    bias_pct: float = 0.0

    @property
    def trusted(self) -> bool:
        """Whether both figures are within their bounds."""
        ranked = self.concordance is None or self.concordance >= LEAST_CONCORDANCE
        return ranked and not self.error_pct > self.allowed_pct

    @property
    def sentence(self) -> str:
        """The figures in words, beside their bounds."""
        pairs = (
            "no two of them differ by more than the noise"
            if self.concordance is None
            else f"{self.concordance:.0%} of the pairs that differ by more than the noise are ranked rightly "
            f"(at least {LEAST_CONCORDANCE:.0%} asked)"
        )
        allowed = f"at most {self.allowed_pct:.0f} % allowed"
        if self.allowed_pct > LARGEST_ERROR_PCT:
            allowed = f"in this noise a perfect simulator may be {self.allowed_pct:.0f} % off"
            allowed += ", so that little can be said of this one" if self.allowed_pct > _NO_BOUND_PCT else ""
        off = f"predicted ratios are {self.error_pct:.1f} % off in the mean over {self.num_trials} trials ({allowed})"
        if self.error_pct > 0 and abs(self.bias_pct) >= _ONE_SIDED * self.error_pct:
            words = ("high", "small") if self.bias_pct > 0 else ("low", "large")
            off += (
                f", mostly to one side: {abs(self.bias_pct):.1f} % too {words[0]}, so gains are foretold too {words[1]}"
            )
            return f"{off}; proposals rest on the ranking: {pairs}"
        return f"{off}; {pairs}"


class Guide:
    """Proposals from a forecast of the whole space, for one preference.

    known: settings that are measured before any proposal. noise: standard deviation of the log of a measured score.
    visible: smallest log difference that is not noise.
    """

    def __init__(
        self,
        forecast: Forecast,
        space: Space,
        preferred: Sequence[str],
        *,
        known: Collection[PolicyParams],
        noise: float,
        visible: float,
    ) -> None:
        self.forecast = forecast
        self._preferred = tuple(preferred)
        self._noise = noise
        self._visible = visible
        self._space = space
        self._log_score = np.log(forecast.score(preferred))
        self._points = encoded_points(forecast.settings, space)
        self._allowed = np.array([space.contains(params) for params in forecast.settings])
        # Settings that the simulator cannot tell apart on any trace are one and the same to it.
        _, self._alike = np.unique(
            np.concatenate(list(forecast.by_trace.values()), axis=1), axis=0, return_inverse=True
        )
        self.first = self.proposals(known)

    def suggestion(self, tried: Collection[PolicyParams], measured: Sequence[Measured]) -> PolicyParams | None:
        """What to measure next: the first proposals, then the setting of the highest expected gain.

        None where that gain is small against the noise: the forecast has said what it knows, and it is the sampler's
        turn. tried: settings of all trials, `measured` or not.
        """
        if pending := [params for params in self.first if params not in tried]:
            return pending[0]
        found = self.next(measured)
        if found is None or found[0] in tried or found[1] < 100 * _WORTH_A_TURN * self._noise:
            return None
        return found[0]

    def proposals(self, taken: Collection[PolicyParams], count: int = PROPOSALS) -> list[PolicyParams]:
        """The predicted best, the best in each single objective, then predicted good ones far from all these.

        None of them is, to the simulator, the same as one of `taken` or another proposal.
        """
        free = self._free(taken)
        if not len(free):
            return []
        rankings = [self._log_score, *(np.log(self.forecast.ratios[name]) for name in self.forecast.ratios)]
        bests: dict[int, int] = {}
        for ranking in rankings:
            best = int(free[np.argmin(ranking[free])])
            bests.setdefault(int(self._alike[best]), best)
        chosen = list(bests.values())[:count]
        good = free[self._log_score[free] <= self._log_score[free].min() + _NEAR_BEST]
        distance = np.full(len(good), math.inf)
        for place in chosen:
            distance = np.minimum(distance, self._distance(good, place))
        while len(chosen) < count and len(good):
            distance[np.isin(self._alike[good], self._alike[chosen])] = -1.0
            if distance.max() < 0:
                break
            chosen.append(int(good[np.argmax(distance)]))
            distance = np.minimum(distance, self._distance(good, chosen[-1]))
        return [self.forecast.settings[place] for place in chosen]

    def next(self, measured: Sequence[Measured]) -> tuple[PolicyParams, float] | None:
        """The untried setting of the highest expected gain, and that gain in per cent; None when all were tried.

        One that the simulator cannot tell from a tried one counts as tried.
        """
        free = self._free({trial.params for trial in measured})
        inside = [trial for trial in measured if self._space.contains(trial.params)]
        if not len(free) or not inside:
            return None
        tried, logs = self._predicted(inside), self._logs(inside)
        tried_points = encoded_points([trial.params for trial in inside], self._space)
        belief = corrected(
            np.concatenate([self._log_score[free], tried]),
            np.concatenate([self._points[free], tried_points]),
            tried,
            tried_points,
            logs,
            self._noise,
        )
        # The incumbent's own noise is taken out: the belief at the trials, not the luckiest measurement.
        gain = belief.expected_gain(float(belief.mean[len(free) :].min()))[: len(free)]
        best = int(np.argmax(gain))
        return self.forecast.settings[int(free[best])], 100 * float(gain[best])

    def judge(self, measured: Sequence[Measured]) -> Judgement:
        """Predictions against the measurements. The reference is 1 by definition, and not counted."""
        known = [trial for trial in measured if any(value != 1.0 for value in trial.objectives.values())]
        predicted, logs = self._predicted(known), self._logs(known)
        errors = np.expm1(predicted - logs)
        apart = np.subtract.outer(logs, logs)
        upper = np.triu(np.abs(apart) > self._visible, 1)
        ranked = np.sign(np.subtract.outer(predicted, predicted)[upper]) == np.sign(apart[upper])
        vary = len(known) > 2 and np.ptp(logs) > 0 and np.ptp(predicted) > 0
        return Judgement(
            num_trials=len(known),
            error_pct=100 * float(np.mean(np.abs(errors))) if known else math.nan,
            bias_pct=100 * float(np.mean(errors)) if known else math.nan,
            concordance=float(ranked.mean()) if len(ranked) else None,
            # A perfect prediction errs by the noise of the setting and of the reference together.
            allowed_pct=max(LARGEST_ERROR_PCT, 100 * 2 * math.sqrt(2) * self._noise),
            rank_correlation=float(spearmanr(predicted, logs).statistic) if vary else None,
        )

    def _free(self, taken: Collection[PolicyParams]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        places = [self.forecast.places[params] for params in taken if params in self.forecast.places]
        return np.flatnonzero(self._allowed & ~np.isin(self._alike, self._alike[places]))

    def _distance(self, places: np.ndarray[tuple[int], np.dtype[np.intp]], other: int) -> FloatArray:
        return np.asarray(np.linalg.norm(self._points[places] - self._points[other], axis=1), dtype=np.float64)

    def _predicted(self, measured: Sequence[Measured]) -> FloatArray:
        return np.log([choose.score(self.forecast.ratio(trial.params), self._preferred) for trial in measured])

    def _logs(self, measured: Sequence[Measured]) -> FloatArray:
        return np.log([choose.score(trial.objectives, self._preferred) for trial in measured])
