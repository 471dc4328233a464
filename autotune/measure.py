"""Measuring settings within one study: each on all tuning traces, kept in the run folder, never twice."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from autotune import aggregate, choose, metrics, stages, study_noise
from autotune.compare import COMPARED
from autotune.live import LiveEvaluator
from autotune.machine_load import LoadWatch
from autotune.noise import HOPELESS_PCT
from autotune.plan import NOISE_RUNS, Plan
from autotune.progress import Progress
from autotune.race import Race
from autotune.records import Origin, Replay
from autotune.results import DriftPoint, NoiseInfo
from autotune.runfolder import RunFolder, folder_name
from autotune.study import Outcome, SearchTrial
from autotune.study_noise import StudyNoise
from ppas_core.errors import NoResult, PpasError
from ppas_core.policy import PolicyParams
from traces.format import Trace


class _NoiseTest(NamedTuple):
    """An A/A test. runs: its values. load: of the machine meanwhile, in words. repeats: the reference, again and again."""

    found: StudyNoise
    runs: study_noise.Runs
    load: str
    repeats: list[Outcome]


_FAILED_IN_A_ROW: Final = 4
"""Settings of a live study that may fail one after the other before the reference is asked whether it is their doing."""


class Measurement:
    """What a study has measured so far, and how it measures on.

    base: the reference on the tuning traces, where measurements vary the mean of all of the A/A test; every objective is a
    ratio to it. study_noise: that test, None where measurements do not vary. Both are taken from the run folder when an
    earlier process measured them.
    Raises NoResult when the reference cannot be measured, or nothing could be told from noise: nothing could be said of
    any other setting.
    """

    def __init__(self, plan: Plan, run: RunFolder, progress: Progress) -> None:
        self.plan = plan
        self.run = run
        self.progress = progress
        self.limits = plan.spec.metric_limits()
        self.objectives = plan.spec.objectives
        self.metrics = tuple(dict.fromkeys([*COMPARED, *self.objectives]))
        self.preferred = choose.preferred_metrics(plan.spec.prefer, self.objectives)
        self._failed_in_a_row: list[PolicyParams] = []
        self._again: list[tuple[PolicyParams, Outcome]] = []
        if isinstance(plan.evaluator, LiveEvaluator):
            plan.evaluator.spare(plan.reference)
        self.base = self._reference()
        self.study_noise = self._noise() if plan.evaluator.is_noisy else None

    @property
    def noise(self) -> list[NoiseInfo]:
        """The noise of the preferred metrics as far as it is known; empty where measurements do not vary."""
        return [] if self.study_noise is None else self.study_noise.infos

    def widen_noise(self, trials: Sequence[SearchTrial], held_out: Iterable[Sequence[Replay]] = ()) -> None:
        """Takes `trials`, all that was measured again, and finalists' replays as further A/A samples where they are."""
        if self.study_noise is not None:
            measured = [(trial.params, trial.outcome) for trial in trials if trial.params != self.plan.reference]
            self.study_noise.widen([*measured, *self._again], held_out)

    def outcome(self, folder: str, params: PolicyParams, race: Race | None = None) -> Outcome:
        """`params` on all tuning traces, kept under `folder` of the run; a failure is an outcome with its reason.

        race: stops the setting once its deficit is certain; the traces then come in the race's order.
        """
        if params != self.plan.reference:
            return self._measure(folder, params, self.base, race=race)
        self.run.copy_trial("references/reference", folder)
        return self.base

    def again(self, folder: str, params: PolicyParams, repeat: int) -> Outcome:
        """`params` measured once more on all tuning traces, or what an earlier process kept of that under `folder`."""
        found = self._kept(folder, params) or self._measure(folder, params, self.base, repeat)
        self._again.append((params, found))
        return found

    def averaged(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Complete measurements of one setting as one: means of their metrics, and objectives of these."""
        regimes = {
            regime: {name: fmean(o.regimes[regime].get(name, nan) for o in outcomes) for name in values}
            for regime, values in outcomes[0].regimes.items()
        }
        by_trace = {
            trace: {name: fmean(o.by_trace[trace][name] for o in outcomes) for name in values}
            for trace, values in outcomes[0].by_trace.items()
            if all(trace in o.by_trace for o in outcomes)
        }
        return replace(
            outcomes[0],
            objectives={name: aggregate.objective(name, regimes, self.base.regimes) for name in self.objectives},
            regimes=regimes,
            by_trace=by_trace,
            measurements=len(outcomes),
        )

    def remembered(self, folder: str, params: PolicyParams) -> Outcome:
        """As `outcome`, or what an earlier process kept under `folder`."""
        return self._kept(folder, params) or self.outcome(folder, params)

    def drift(self, after_trial: int) -> DriftPoint:
        """The reference measured once more: its preferred objective's ratio to the first measurement, in per cent."""
        folder = f"references/again-{after_trial}"
        reference = self.plan.reference
        found = self.again(folder, reference, after_trial)
        if found.reason is not None:
            return DriftPoint(after_trial=after_trial, change_pct=None, reason=found.reason)
        change = choose.score(found.objectives, self.preferred) - 1
        return DriftPoint(after_trial=after_trial, change_pct=100 * change, reason=None)

    def _reference(self, *, anew: bool = False) -> Outcome:
        folder, reference = "references/reference", self.plan.reference
        found = None if anew else self._kept_reference(folder)
        if found is None:
            self.progress.begin("Measuring the reference", 1)
            found = self._measure(folder, reference, None)
            self.progress.end()
        if found.reason is not None:
            raise self._without_reference(found.reason)
        return found

    def _kept(self, folder: str, params: PolicyParams) -> Outcome | None:
        """What an earlier process kept of `params` under `folder`; None where it is not of all tuning traces."""
        found = self.run.load_trial(folder, params)
        if found is None or found.reason is not None:
            return found
        traces, wanted = self.plan.tuning, set(self.objectives)
        means = [found.regimes.get(trace.regime, {}).get(name, nan) for trace in traces for name in wanted]
        names = [found.by_trace.get(trace.name, {}).keys() for trace in traces] if found.by_trace else []
        whole = found.objectives.keys() == wanted and all(mean > 0 for mean in means)
        whole = whole and all(wanted <= known for known in names)  # earlier releases kept nothing by trace
        return found if whole else None

    def _kept_reference(self, folder: str) -> Outcome | None:
        """What an earlier process measured; also from the trial that is a copy of it, where it is damaged itself."""
        reference = self.plan.reference
        for kept in (folder, "trials/0", f"references/{folder_name(reference.label())}"):
            found = self._kept(kept, reference)
            if found is not None and found.reason is None:
                if kept != folder:
                    self.run.copy_trial(kept, folder)
                return found
        return None

    def _without_reference(self, reason: object) -> NoResult:
        return NoResult(f"the reference {self.plan.reference.label()} cannot be measured: {reason}")

    def _measure(
        self, folder: str, params: PolicyParams, base: Outcome | None, repeat: int = 0, race: Race | None = None
    ) -> Outcome:
        started_s, starting_s = time.perf_counter(), self._starting_s()
        replays: dict[str, Replay] = {}
        traces = {trace.name: trace for trace in self.plan.tuning}
        by_trace: dict[str, dict[str, float]] = {}
        stopped = None
        try:
            for name in race.order if race is not None else traces:
                replays[name] = self.plan.evaluator.replay(params, traces[name], repeat)
                by_trace[name] = self._values(replays[name])
                if race is not None and (stopped := race.deficit(by_trace)) is not None:
                    break
            in_order = [replays[name] for name in traces if name in replays]
            means = aggregate.regime_means(in_order, self.metrics, self.limits)
            reference = means if base is None else base.regimes
            if base is not None and stopped is not None:
                reference = aggregate.means_of_traces(
                    base.by_trace, {replay.trace_name: replay.regime for replay in in_order}
                )
            outcome = Outcome(
                {name: aggregate.objective(name, means, reference) for name in self.objectives},
                means,
                aggregate.sum_branches(in_order),
                0.0,
                by_trace=by_trace,
                stopped=stopped,
            )
        except PpasError as error:
            if error.stops_study:
                raise
            outcome = Outcome({}, {}, {}, 0.0, reason=str(error))
        told = list(replays.values())
        starting_s = self._starting_s() - starting_s
        outcome = replace(
            outcome,
            duration_s=time.perf_counter() - started_s - starting_s,
            starting_s=starting_s,
            client=aggregate.client_lag(told),
            cached_share=aggregate.cached_share(told),
            server_memory_bytes=told[-1].server_memory_bytes if told else None,
        )
        self.run.save_trial(folder, params, outcome, list(replays.values()))
        if params != self.plan.reference:
            self._failed_in_a_row = [] if outcome.reason is None else [*self._failed_in_a_row, params]
            self._ask_reference(outcome.reason)
        return outcome

    def _starting_s(self) -> float:
        """Seconds that starts of servers took so far."""
        evaluator = self.plan.evaluator
        return evaluator.starting_s if isinstance(evaluator, LiveEvaluator) else 0.0

    def _ask_reference(self, reason: str | None) -> None:
        """After many failures in a row on a server: whether the reference still can be measured, on one trace.

        Raises NoResult, which stops the study, when it cannot: then the settings are not to blame, and further ones would
        be burned. They may be measured again then, although they ended servers; trials that were told as failed stay so.
        """
        evaluator, reference, failed = self.plan.evaluator, self.plan.reference, self._failed_in_a_row
        if len(failed) < _FAILED_IN_A_ROW or not isinstance(evaluator, LiveEvaluator):
            return
        self._failed_in_a_row = []
        try:
            self._values(evaluator.replay(reference, self.plan.tuning[0]))
        except PpasError as error:
            evaluator.forget_deaths(failed)
            stop = NoResult(
                f"{len(failed)} settings in a row could not be measured (the last: {reason}), and now the reference "
                f"{reference.label()} cannot be either, which could at the beginning: {error}; see to the server and its "
                "machine, then give the same command again"
            )
            stop.stops_study = True
            raise stop from None

    def _values(self, replay: Replay) -> dict[str, float]:
        """The objectives' metrics of one replay. Raises NoResult when a request failed."""
        (means,) = aggregate.regime_means([replay], self.objectives, self.limits).values()
        return means

    def _noise(self) -> StudyNoise:
        """The reference measured again and again, against itself: an A/A test before anything is searched.

        Raises NoResult, which stops the study, where a live one could see no gain below `stop_at_noise_pct`, twice.
        """
        plan, folder = self.plan, self.run.path / "references"
        if (known := study_noise.kept(folder, self.preferred, len(plan.tuning))) is not None:
            return StudyNoise(plan, self.preferred, self.base.branch_steps, known[1], known[0])
        test = self._measure_noise()
        if self._is_too_noisy(test.found):
            self._say("the noise is measured once more, and the reference with it where nothing else was measured yet")
            if not (self.run.path / "trials").exists():
                self.base = self._reference(anew=True)
            test = self._measure_noise()
        if self._is_too_noisy(test.found):
            if not (self.run.path / "trials").exists():
                self.run.forget_trial("references/reference")
            stop = NoResult(
                f"measurements vary so much here that no gain below {_visible_pct(test.found):.0f} % could be seen, above "
                f"the bound of {plan.spec.stop_at_noise_pct:g} % (stop_at_noise_pct in the study file), and {test.load}: "
                "nothing was searched. End what else runs here, or take a quieter machine, longer traces or more held-out ones; "
                "then give the same command again. `stop_at_noise_pct: null` goes on in spite of the noise"
            )
            stop.stops_study = True
            raise stop
        self._average_reference(test.repeats)
        study_noise.keep(folder, test.found.infos, test.runs)
        return test.found

    def _average_reference(self, repeats: Sequence[Outcome]) -> None:
        """Has the base be the mean of its first measurement and `repeats`: every ratio rests on it, and one may be off.

        Not where trials were told already: their ratios rest on what it was.
        """
        if self.base.measurements == 1 and not (self.run.path / "trials").exists():
            base = self.averaged([self.base, *repeats])
            self.base = replace(base, objectives=dict.fromkeys(self.objectives, 1.0))
            self.run.save_trial("references/reference", self.plan.reference, self.base, ())

    def _measure_noise(self) -> _NoiseTest:
        plan, watch = self.plan, LoadWatch()
        self.progress.begin(stages.NOISE, NOISE_RUNS * len(plan.tuning) + 1)
        rows: dict[str, list[list[float]]] = {
            name: [[self.base.by_trace[trace.name][name] for trace in plan.tuning]]
            if self.base.by_trace and self.base.measurements == 1
            else []
            for name in self.objectives
        }
        repeats = []
        for repeat in range(1, NOISE_RUNS + 1):  # every trace once, then again: noise comes in bursts
            run = []
            for trace in plan.tuning:
                run.append(self._reference_again(trace, repeat))
                self.progress.advance()
            for name in self.metrics:
                values = [metrics.value(name, replay.requests, self.limits) for replay in run]
                rows.setdefault(name, []).append(values)
            means = aggregate.regime_means(run, self.metrics, self.limits)
            by_trace = {replay.trace_name: self._values(replay) for replay in run}
            repeats.append(replace(self.base, regimes=means, by_trace=by_trace))
        runs = {name: np.array(values) for name, values in rows.items()}
        found = StudyNoise(plan, self.preferred, self.base.branch_steps, runs)
        worst = max(found.infos, key=lambda entry: entry.visible_held_out_pct)
        self.progress.advance(f"a gain below {worst.visible_held_out_pct:.1f} % ({worst.metric}) will not be seen")
        self.progress.end()
        load = watch.words()
        if worst.visible_held_out_pct > HOPELESS_PCT:
            self._say(
                f"note: measurements vary so much that no gain below {worst.visible_held_out_pct:.0f} % will be seen; {load}"
            )
        return _NoiseTest(found, runs, load, repeats)

    def _reference_again(self, trace: Trace, repeat: int) -> Replay:
        """One more replay of the reference. Raises NoResult as its first measurement does, also when a request failed."""
        try:
            found = self.plan.evaluator.replay(self.plan.reference, trace, repeat)
            aggregate.regime_means([found], ())
        except PpasError as error:
            if error.stops_study:
                raise
            self.progress.end()
            raise self._without_reference(error) from None
        return found

    def _is_too_noisy(self, found: StudyNoise) -> bool:
        bound_pct = self.plan.spec.stop_at_noise_pct
        is_live = self.plan.evaluator.origin is Origin.LIVE
        return is_live and bound_pct is not None and _visible_pct(found) > bound_pct

    def _say(self, text: str) -> None:
        """Says something at once, where there is somebody to listen."""
        if isinstance(self.plan.evaluator, LiveEvaluator):
            self.plan.evaluator.say(text)


def _visible_pct(found: StudyNoise) -> float:
    """The smallest difference that the held-out comparison can see in every preferred metric."""
    return max(entry.visible_held_out_pct for entry in found.infos)
