"""Measuring settings within one study: each on all tuning traces, kept in the run folder, never twice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from autotune import aggregate, choose
from autotune.compare import COMPARED
from autotune.live import LiveEvaluator
from autotune.noise import noise_floor
from autotune.plan import NOISE_RUNS, Plan
from autotune.progress import Progress
from autotune.race import Race
from autotune.records import Replay
from autotune.results import DriftPoint, NoiseInfo
from autotune.runfolder import RunFolder
from autotune.study import Outcome
from ppas_core.errors import NoResult, PpasError
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams

_FAILED_IN_A_ROW: Final = 4
"""Settings of a live study that may fail one after the other before the reference is asked whether it is their doing."""


class Measurement:
    """What a study has measured so far, and how it measures on.

    base: the reference on the tuning traces; every objective is a ratio to it. noise: the A/A measurement, empty where
    measurements do not vary. Both are taken from the run folder when an earlier process measured them.
    Raises NoResult when the reference cannot be measured: nothing could be said of any other setting.
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
        self.base = self._reference()
        self.noise = self._noise() if plan.evaluator.is_noisy else []

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
        return self.run.load_trial(folder, params) or self._measure(folder, params, self.base, repeat)

    def averaged(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Complete measurements of one setting as one: means of their metrics, and objectives of these."""
        regimes = {
            regime: {name: fmean(o.regimes[regime][name] for o in outcomes) for name in values}
            for regime, values in outcomes[0].regimes.items()
        }
        by_trace = {
            trace: {name: fmean(o.by_trace[trace][name] for o in outcomes) for name in values}
            for trace, values in outcomes[0].by_trace.items()
        }
        return replace(
            outcomes[0],
            objectives={name: aggregate.objective(name, regimes, self.base.regimes) for name in self.objectives},
            regimes=regimes,
            by_trace=by_trace,
        )

    def remembered(self, folder: str, params: PolicyParams) -> Outcome:
        """As `outcome`, or what an earlier process kept under `folder`."""
        return self.run.load_trial(folder, params) or self.outcome(folder, params)

    def drift(self, after_trial: int) -> DriftPoint:
        """The reference measured once more: its preferred objective's ratio to the first measurement, in per cent."""
        folder = f"references/again-{after_trial}"
        reference = self.plan.reference
        found = self.again(folder, reference, after_trial)
        if found.reason is not None:
            return DriftPoint(after_trial=after_trial, change_pct=None, reason=found.reason)
        change = choose.score(found.objectives, self.preferred) - 1
        return DriftPoint(after_trial=after_trial, change_pct=100 * change, reason=None)

    def _reference(self) -> Outcome:
        folder, reference = "references/reference", self.plan.reference
        found = self.run.load_trial(folder, reference)
        if found is None or found.reason is not None:
            self.progress.begin("Measuring the reference", 1)
            found = self._measure(folder, reference, None)
            self.progress.end()
        if found.reason is not None:
            raise NoResult(f"the reference {reference.label()} cannot be measured: {found.reason}")
        return found

    def _measure(
        self, folder: str, params: PolicyParams, base: Outcome | None, repeat: int = 0, race: Race | None = None
    ) -> Outcome:
        started = time.perf_counter()
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
                time.perf_counter() - started,
                by_trace=by_trace,
                stopped=stopped,
            )
        except PpasError as error:
            if error.stops_study:
                raise
            outcome = Outcome({}, {}, {}, time.perf_counter() - started, reason=str(error))
        told = list(replays.values())
        outcome = replace(
            outcome,
            client=aggregate.client_lag(told),
            cached_share=aggregate.cached_share(told),
            server_memory_bytes=told[-1].server_memory_bytes if told else None,
        )
        self.run.save_trial(folder, params, outcome, list(replays.values()))
        if params != self.plan.reference:
            self._failed_in_a_row = [] if outcome.reason is None else [*self._failed_in_a_row, params]
            self._ask_reference(outcome.reason)
        return outcome

    def _ask_reference(self, reason: str | None) -> None:
        """After many failures in a row on a server: whether the reference still can be measured, on one trace.

        Raises NoResult, which stops the study, when it cannot: then the settings are not to blame, and further ones would
        be burned. Servers that they ended are then not held against them.
        """
        evaluator, reference, failed = self.plan.evaluator, self.plan.reference, self._failed_in_a_row
        if len(failed) < _FAILED_IN_A_ROW or not isinstance(evaluator, LiveEvaluator):
            return
        self._failed_in_a_row = []
        try:
            self._values(evaluator.replay(reference, self.plan.tuning[0]))
        except PpasError as error:
            evaluator.forget_deaths([*failed, reference])
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

    def _noise(self) -> list[NoiseInfo]:
        """The reference measured again and again, against itself: an A/A test before anything is searched."""
        plan, file = self.plan, self.run.path / "references" / "noise.json"
        if (known := _kept_noise(file, self.preferred)) is not None:
            return known
        self.progress.begin("Measuring the noise (reference against itself)", NOISE_RUNS * len(plan.tuning) + 1)
        runs: list[list[Replay]] = [[] for _ in range(NOISE_RUNS)]
        for trace in plan.tuning:
            for repeat, run in enumerate(runs, start=1):
                run.append(plan.evaluator.replay(plan.reference, trace, repeat))
                self.progress.advance()
        fewer = math.sqrt(len(plan.tuning) / len(plan.held_out))
        floors = [
            noise_floor(runs, metric, wanted_pct=plan.spec.min_gain_pct, limits=self.limits)
            for metric in self.preferred
        ]
        found = [NoiseInfo(visible_held_out_pct=floor.visible_pct * fewer, **asdict(floor)) for floor in floors]
        worst = max(found, key=lambda entry: entry.visible_held_out_pct)
        self.progress.advance(f"a gain below {worst.visible_held_out_pct:.1f} % ({worst.metric}) will not be seen")
        self.progress.end()
        entries: list[dict[str, Any]] = [entry.model_dump() for entry in found]
        write_atomically(file, dump_json(entries, indent=1).encode())
        return found


def _kept_noise(file: Path, preferred: Sequence[str]) -> list[NoiseInfo] | None:
    """What an earlier process kept of the noise of these metrics; None where it kept nothing that can be read."""
    try:
        found = [NoiseInfo.model_validate(entry) for entry in load_json(file.read_bytes())]
    except (OSError, ValueError, TypeError):
        return None
    return found if [entry.metric for entry in found] == list(preferred) else None
