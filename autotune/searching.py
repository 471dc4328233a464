"""One arm of a search: trials until there are enough, the time is up, or nothing more is to be gained."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from typing import Final

from autotune import aggregate, choose, interrupt, stages
from autotune.foresight.stage import Foresight
from autotune.measure import Measurement
from autotune.plan import REFERENCE_EVERY
from autotune.race import Race, in_turn
from autotune.records import Origin
from autotune.results import DriftPoint
from autotune.study import Outcome, Search, SearchTrial
from ppas_core.policy import PolicyParams

_PATIENCE: Final = 12
"""Trials without progress after which a search whose simulator says nothing counts as settled."""
_LEAST_TRIALS: Final = 8
"""Trials beyond the known settings before a search may end early."""


class Searching:
    """Runs arms of the study's search, and keeps what they say of themselves.

    drift: the reference measured again and again. cut: why the search ended before its last trial, if it did.
    """

    def __init__(self, study: Measurement, foresight: Foresight | None) -> None:
        self._study = study
        self._spec = study.plan.spec
        self._foresight = foresight
        self.drift: list[DriftPoint] = []
        self.cut: str | None = None
        self._hurried = False

    def search(self, search: Search, total: int) -> list[SearchTrial]:
        """The study's own search, up to `total` trials: guided, raced, watched for drift, within its time budget."""
        plan, progress = self._study.plan, self._study.progress
        done = search.trials()
        race = self._race(done)
        budget_s = self._spec.time_budget_s()
        spent_s = sum(trial.outcome.duration_s + trial.outcome.starting_s for trial in done)
        started = time.perf_counter()
        progress.begin(stages.SEARCH, total, len(done))
        best = self._best(done)
        for number in range(REFERENCE_EVERY, len(done) + 1, REFERENCE_EVERY):
            self._watch_drift(number)  # measured by an earlier process, and read back
        while len(done) < total:
            try:
                interrupt.check()
                if len(done) >= len(plan.in_space):
                    self.cut = self._ends(done, budget_s, spent_s + time.perf_counter() - started, total)
                    if self.cut is not None:
                        break
                    self._propose(search, done)
                # Known settings are measured whole: they are what a race is run against.
                done.append(search.step(partial(self._measure, race if len(done) >= len(plan.in_space) else None)))
                if race is not None:
                    note(race, done[-1], self._study.preferred)
                best = min(best, self._best(done[-1:]))
                progress.advance(self._best_note(best))
                if len(done) % REFERENCE_EVERY == 0:
                    self._watch_drift(len(done))
            except KeyboardInterrupt:
                done = search.trials()  # the last one may be told already: its writing was not torn apart
                if len(done) < len(plan.in_space):
                    raise  # there is nothing to compare yet
                self._hurry(f"Ctrl-C ended the search after {len(done)} of {total} settings; the same command goes on")
                self._study.run.forget_trial(f"trials/{len(done)}")  # kept, but not told: its number is another's now
                break
        progress.end()
        return done

    def _hurry(self, cut: str) -> None:
        """Heeds Ctrl-C: the study is finished with what there is. cut: that in words.

        Raises KeyboardInterrupt after SIGTERM and SIGHUP, which do not wait for that.
        """
        interrupt.forgive()
        self._hurried = True
        self.cut = cut
        self._study.progress.end()
        self._study.progress.begin("Ctrl-C: finishing with what there is; once more stops at once", 1)

    def _ends(self, done: list[SearchTrial], budget_s: float | None, spent_s: float, total: int) -> str | None:
        """Why the search ends before its last trial, in words; None while it goes on."""
        if budget_s is not None and spent_s >= budget_s:
            return f"the time budget ended the search after {len(done)} of {total} settings"
        settled = self._settled(done)
        return None if settled is None else f"the search ended after {len(done)} of {total} settings: {settled}"

    def random(self, search: Search, total: int) -> list[SearchTrial]:
        """The random arm, for comparison: plain trials; none more once Ctrl-C asked to finish."""
        progress = self._study.progress
        done = search.trials()
        total = len(done) if self._hurried else total
        progress.begin("Random search, for comparison", total, len(done))
        best = self._best(done)
        while len(done) < total:
            interrupt.check()
            done.append(search.step(lambda number, params: self._study.outcome(f"random/{number}", params)))
            best = min(best, self._best(done[-1:]))
            progress.advance(self._best_note(best))
        progress.end()
        return done

    def _measure(self, race: Race | None, number: int, params: PolicyParams) -> Outcome:
        return self._study.outcome(f"trials/{number}", params, race)

    def _propose(self, search: Search, done: list[SearchTrial]) -> None:
        if self._foresight is None or search.has_next():
            return
        if (params := self._foresight.suggestion(done)) is not None:
            search.propose("predicted", params)

    def _race(self, done: Iterable[SearchTrial]) -> Race | None:
        """The race of this study, with the trials that ran already; None where nothing varies or it is not wanted."""
        study, plan = self._study, self._study.plan
        if not (plan.evaluator.is_noisy and self._spec.race and len(plan.tuning) > 2 and study.base.by_trace):
            return None
        regimes = [trace.regime for trace in plan.tuning]
        if self._foresight is not None:
            order = self._foresight.forecast.trace_order(study.preferred)
        else:
            order = in_turn(range(len(regimes)), regimes)
        race = Race(
            objectives=study.objectives,
            order=[plan.tuning[place].name for place in order],
            regimes=[regimes[place] for place in order],
            noise=max(entry.replay_pct / 100 for entry in study.noise),
        )
        for trial in done:
            note(race, trial, study.preferred)
        return race

    def _settled(self, done: list[SearchTrial]) -> str | None:
        """Why another trial is not worth its time, in words; None while it may be."""
        study = self._study
        if study.plan.evaluator.origin is not Origin.LIVE:
            return None
        if not self._spec.stop_early or len(done) < len(study.plan.in_space) + _LEAST_TRIALS:
            return None
        floor_pct = max([self._spec.tie_pct, *(entry.objective_pct for entry in study.noise)])
        gain_pct = None if self._foresight is None else self._foresight.expected_gain_pct(done)
        if gain_pct is not None:
            if gain_pct >= floor_pct / 10 or _since_best(done, study, floor_pct) < _LEAST_TRIALS // 2:
                return None
            return (
                f"another trial is expected to gain {gain_pct:.2f} %, far below what can be told from noise "
                f"({floor_pct:.1f} %)"
            )
        idle = _since_best(done, study, floor_pct)
        if idle < _PATIENCE:
            return None
        return f"the last {idle} gained less than what can be told from noise ({floor_pct:.1f} %)"

    def _watch_drift(self, trials: int) -> None:
        if self._study.plan.evaluator.is_noisy:
            self.drift.append(self._study.drift(trials))

    def _best(self, trials: Iterable[SearchTrial]) -> float:
        """The best score of the complete ones; infinite where there is none."""
        preferred = self._study.preferred
        return min(
            (choose.score(t.outcome.objectives, preferred) for t in trials if t.outcome.is_complete), default=inf
        )

    def _best_note(self, best: float) -> str:
        """`best`, a score, in words."""
        study = self._study
        if best == inf:
            return "nothing measured so far"
        gain_pct = aggregate.improvement_pct(best)
        asked_pct = max([self._spec.min_gain_pct, *(entry.visible_pct for entry in study.noise)])
        verdict = "ahead" if gain_pct >= asked_pct else f"less than the {asked_pct:.1f} % that count"
        of = f"{self._spec.prefer}, tuning traces, {study.plan.evaluator.origin}"
        return f"best so far {gain_pct:+.1f} % on the reference: {verdict} ({of})"


def note(race: Race, trial: SearchTrial, preferred: Sequence[str]) -> None:
    """Tells the race of a trial, where it ran to the end."""
    if trial.outcome.is_complete and trial.outcome.by_trace:
        race.finished(trial.outcome.by_trace, choose.score(trial.outcome.objectives, preferred))


def _since_best(done: list[SearchTrial], study: Measurement, floor_pct: float) -> int:
    """Trials since one was better than every trial before it by more than `floor_pct`."""
    best, since = float("inf"), 0
    for trial in done:
        since += 1
        if trial.outcome.is_complete:
            score = choose.score(trial.outcome.objectives, study.preferred)
            if score < best * (1 - floor_pct / 100):
                since = 0
            best = min(best, score)
    return since
