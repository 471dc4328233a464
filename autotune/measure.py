"""Measuring settings within one study: each on all tuning traces, kept in the run folder, never twice."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from typing import Any

from autotune import aggregate, choose
from autotune.compare import COMPARED
from autotune.noise import noise_floor
from autotune.plan import NOISE_RUNS, Plan
from autotune.progress import Progress
from autotune.records import Replay
from autotune.results import DriftPoint, NoiseInfo
from autotune.runfolder import RunFolder
from autotune.study import Outcome
from ppas_core.errors import NoResult, PpasError
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams


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
        self.base = self._reference()
        self.noise = self._noise() if plan.evaluator.is_noisy else []

    def outcome(self, folder: str, params: PolicyParams) -> Outcome:
        """`params` on all tuning traces, kept under `folder` of the run; a failure is an outcome with its reason."""
        if params != self.plan.reference:
            return self._measure(folder, params, self.base)
        self.run.copy_trial("references/reference", folder)
        return self.base

    def remembered(self, folder: str, params: PolicyParams) -> Outcome:
        """As `outcome`, or what an earlier process kept under `folder`."""
        return self.run.load_trial(folder, params) or self.outcome(folder, params)

    def drift(self, after_trial: int) -> DriftPoint:
        """The reference measured once more: its preferred objective's ratio to the first measurement, in per cent."""
        folder = f"references/again-{after_trial}"
        reference = self.plan.reference
        found = self.run.load_trial(folder, reference) or self._measure(folder, reference, self.base, after_trial)
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

    def _measure(self, folder: str, params: PolicyParams, base: Outcome | None, repeat: int = 0) -> Outcome:
        started = time.perf_counter()
        replays: list[Replay] = []
        try:
            for trace in self.plan.tuning:
                replays.append(self.plan.evaluator.replay(params, trace, repeat))
            means = aggregate.regime_means(replays, self.metrics, self.limits)
            reference = base.regimes if base is not None else means
            objectives = {name: aggregate.objective(name, means, reference) for name in self.objectives}
            outcome = Outcome(objectives, means, aggregate.sum_branches(replays), time.perf_counter() - started)
        except PpasError as error:
            if error.stops_study:
                raise
            outcome = Outcome({}, {}, {}, time.perf_counter() - started, reason=str(error))
        outcome = replace(outcome, client=aggregate.client_lag(replays))
        self.run.save_trial(folder, params, outcome, replays)
        return outcome

    def _noise(self) -> list[NoiseInfo]:
        """The reference measured again and again, against itself: an A/A test before anything is searched."""
        plan, file = self.plan, self.run.path / "references" / "noise.json"
        if file.exists():
            return [NoiseInfo(**entry) for entry in load_json(file.read_bytes())]
        self.progress.begin("Measuring the noise (reference against itself)", NOISE_RUNS * len(plan.tuning))
        runs: list[list[Replay]] = [[] for _ in range(NOISE_RUNS)]
        for trace in plan.tuning:
            for repeat, run in enumerate(runs, start=1):
                run.append(plan.evaluator.replay(plan.reference, trace, repeat))
                self.progress.advance()
        self.progress.end()
        fewer = math.sqrt(len(plan.tuning) / len(plan.held_out))
        floors = [
            noise_floor(runs, metric, wanted_pct=plan.spec.min_gain_pct, limits=self.limits)
            for metric in self.preferred
        ]
        found = [NoiseInfo(visible_held_out_pct=floor.visible_pct * fewer, **asdict(floor)) for floor in floors]
        entries: list[dict[str, Any]] = [entry.model_dump() for entry in found]
        write_atomically(file, dump_json(entries, indent=1).encode())
        return found
