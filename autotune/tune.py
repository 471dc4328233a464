"""The main job: search on tuning traces, pick by rule, compare on held-out traces, keep everything in a run folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from autotune import choose, interrupt, landscape, metrics, pareto, provenance
from autotune.alike import behaviour
from autotune.compare import held_out_result
from autotune.confirm import confirm
from autotune.evaluate import Evaluator, SimulatedEvaluator
from autotune.finalists import FinalistFailed, check_cold, compare_finalists, replay_held_out
from autotune.foresight.stage import Foresight, foresee
from autotune.live import LiveEvaluator
from autotune.measure import Measurement
from autotune.noise import variance_share
from autotune.plan import Plan
from autotune.progress import Progress, Silent
from autotune.records import Origin
from autotune.remarks import remarks
from autotune.results import (
    Arm,
    ClientLateness,
    Objective,
    RobustnessPoint,
    ServerMemory,
    Setting,
    StudyResults,
    TraceInfo,
    Trial,
)
from autotune.robustness import regimes_at, robustness, saturated_regimes
from autotune.runfolder import RunFolder, folder_name, open_run
from autotune.searching import Searching
from autotune.study import Search, SearchTrial
from autotune.timeline import make_timeline
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from traces.format import Trace

_RANDOM_STREAM: Final = 1_000_003
"""Keeps the random arm's seed away from the search's."""


class SharedSearches(Protocol):
    """A search in which other processes take part; see `autotune.distributed.work.Shared`."""

    def search(self, study: Measurement) -> Search:
        """This process's part in it; its reference has been measured."""
        ...

    def searching(self, study: Measurement, foresight: Foresight | None) -> Searching:
        """What runs it."""
        ...


def tune(
    plan: Plan, path: Path, progress: Progress | None = None, shared: SharedSearches | None = None
) -> StudyResults:
    """Runs the study in the run folder `path`, or what is left of it, and saves `results.json` there.

    shared: a search that other processes share; this one works with them, and finishes the study when all is measured.
    Raises NoResult when the reference itself cannot be measured; KeyboardInterrupt leaves every finished trial behind.
    """
    with open_run(path, plan) as run, plan.evaluator.session(path / "servers"):
        if shared is None and run.results.exists() and not (run.database.exists() and run.database.stat().st_size):
            raise InvalidInput(
                f"{run.database}: the trials of this finished study are gone; put the file back, or name another --run"
            )
        results = _Tuner(plan, run, progress or Silent(), shared).results()
        results.save(run.results)
        return results


class _Tuner:
    """One run of a plan in its folder; the methods follow the order of the work."""

    def __init__(self, plan: Plan, run: RunFolder, progress: Progress, shared: SharedSearches | None) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.run = run
        self.progress = progress
        self.study = Measurement(plan, run, progress)
        self.objectives = self.study.objectives
        self.preferred = self.study.preferred
        self.foresight, self.unforeseen = foresee(self.study)
        self.shared = shared
        self.searching = (shared.searching if shared is not None else Searching)(self.study, self.foresight)

    def results(self) -> StudyResults:
        plan, spec, study = self.plan, self.spec, self.study
        outside = self._measure_outside()
        search = (
            self._search("search", plan.sampler, spec.seed, plan.in_space)
            if self.shared is None
            else self.shared.search(study)
        )
        if self.shared is not None and self.run.results.exists() and not search.trials():
            raise InvalidInput(
                f"{self.run.path}: the storage holds no trial of this finished study; name the storage that it was measured "
                "in, or another --run"
            )
        measured = self.searching.search(search, len(plan.in_space) + spec.trials)
        if self.foresight is not None:
            self.foresight.conclude(measured)
        random: list[SearchTrial] = []
        if spec.random_arm:
            arm = self._search("random", "random", spec.seed + _RANDOM_STREAM, ())
            random = self.searching.random(arm, sum(trial.arm in ("search", "predicted") for trial in measured))
        here = [*measured, *outside, *random] if self.shared is None else []  # machines differ by more than noise
        study.widen_noise(here)
        confirmed = confirm(study, [*measured, *outside])
        found, outside = confirmed[: len(measured)], confirmed[len(measured) :]
        study.widen_noise(here)

        unusable: set[PolicyParams] = set()
        while True:
            trials = self._list_trials(found, outside, random)
            choice, pick, not_identified = self._choose(trials, unusable)
            best_static = self._best_static(trials)
            finalists = {"tuned": pick, plan.reference_role: plan.reference, "best static": best_static}
            if plan.evaluator.origin is Origin.LIVE:
                finalists |= self._runner_up(trials, finalists.values(), trials[choice.index])
            try:
                held_out = replay_held_out(study, finalists)
                break
            except FinalistFailed as failure:  # it is out, and the others are chosen from again
                unusable.add(failure.params)
                found, outside = (_without(arm, failure.params, str(failure)) for arm in (found, outside))
        study.widen_noise(here, held_out.values())
        saturated = saturated_regimes([*held_out["tuned"], *held_out[plan.reference_role]])
        comparisons = compare_finalists(study, held_out, saturated)
        role = choose.exported_role(*(comparison.verdict for comparison in comparisons[:3]))
        exported_role = plan.reference_role if role == "reference" else role
        exported = finalists[exported_role]
        cold = check_cold(study, exported, held_out[exported_role])
        self.progress.begin("Mapping the landscape", 1)
        surface = landscape.plane(
            plan.evaluator, plan.tuning, plan.space, pick, self.preferred[0], study.base.regimes, study.limits
        )
        self.progress.end()
        results = StudyResults(
            name=spec.name,
            origin=plan.evaluator.origin,
            created_at=provenance.now(),
            objectives=[_objective(name) for name in self.objectives],
            prefer=spec.prefer,
            space=plan.space.describe(),
            traces=[
                *(_trace_info(trace, "tuning") for trace in plan.tuning),
                *(_trace_info(trace, "held-out") for trace in plan.held_out),
            ],
            trials=trials,
            reference_trial=next(trial.number for trial in trials if trial.arm == "reference"),
            pick_trial=trials[choice.index].number,
            choice=choice.sentence,
            exported=Setting.of(exported),
            exported_role=exported_role,
            best_static=Setting.of(best_static),
            held_out=[held_out_result(role, replays, study.limits) for role, replays in held_out.items()],
            comparisons=comparisons,
            importance=search.importance(),
            importance_method="PED-ANOVA (share of the variance among the better trials)",
            hypervolume=self._hypervolume(trials),
            landscape=surface,
            maps=[] if self.foresight is None else self.foresight.forecast.maps(self.preferred[0]),
            prediction=None if self.foresight is None else self.foresight.prediction(measured),
            robustness=self._robustness(pick),
            saturated=saturated,
            timeline=make_timeline(
                plan.evaluator, plan.held_out, held_out, ("tuned", plan.reference_role, "best static")
            ),
            simulator_error_pct=plan.evaluator.error_pct,
            not_identified=not_identified,
            warnings=[],
            noise=study.noise,
            noise_beside=[] if study.study_noise is None else study.study_noise.beside(self.objectives),
            drift=self.searching.drift,
            cold=cold,
            server_memory=self._server_memory(),
            provenance=provenance.collect(plan.evaluator.describe(), spec.model_dump(mode="json"), plan.sampler),
        )
        noise_before_pct = None if study.study_noise is None else study.study_noise.before_pct
        more = remarks(
            results, plan, pick, self.preferred[0], noise_before_pct, simulated=self._simulator() is not None
        )
        return results.model_copy(update={"warnings": [*self._doubts_of_the_search(), *more]})

    def _measure_outside(self) -> list[SearchTrial]:
        self.progress.begin("Measuring known settings outside the space", len(self.plan.outside))
        measured = []
        for arm, params in self.plan.outside:
            outcome = self.study.remembered(f"references/{folder_name(params.label())}", params)
            measured.append(SearchTrial(-1, arm, params, outcome))
            self.progress.advance(params.label())
        self.progress.end()
        return measured

    def _search(self, arm: Arm, sampler: str, seed: int, first: Sequence[tuple[Arm, PolicyParams]]) -> Search:
        return Search(
            self.run.database,
            self.spec.name if arm == "search" else f"{self.spec.name}.{arm}",
            space=self.plan.space,
            objectives=self.objectives,
            sampler=sampler,
            seed=seed,
            deterministic=not self.plan.evaluator.is_noisy,
            arm=arm,
            first=first,
        )

    def _list_trials(
        self,
        found: Sequence[SearchTrial],
        outside: Sequence[SearchTrial],
        random: Sequence[SearchTrial],
    ) -> list[Trial]:
        """All trials in one list with one numbering: the search's own, then known settings outside it, then random."""
        entries = [(trial.arm, trial.params, trial.outcome) for trial in (*found, *outside, *random)]
        good = [i for i, (arm, _, outcome) in enumerate(entries) if outcome.is_complete and arm != "random"]
        points = [[entries[i][2].objectives[name] for name in self.objectives] for i in good]
        front = {i for i, keep in zip(good, pareto.on_front(points), strict=True) if keep}
        return [
            Trial(
                number=number,
                arm=arm,
                setting=Setting.of(params),
                state="ok" if outcome.is_complete else "failed" if outcome.reason else "stopped",
                reason=outcome.reason or outcome.stopped,
                objectives=outcome.objectives,
                by_trace=outcome.by_trace,
                predicted={} if self.foresight is None else self.foresight.forecast.ratio(params),
                regimes=outcome.regimes,
                branch_steps=outcome.branch_steps,
                dimensions=self.plan.space.coordinates(params) if self.plan.space.contains(params) else {},
                on_front=number in front,
                duration_s=outcome.duration_s,
                client=None if outcome.client is None else ClientLateness.model_validate(outcome.client),
                cached_share=outcome.cached_share,
                server_memory_bytes=outcome.server_memory_bytes,
                measurements=outcome.measurements,
            )
            for number, (arm, params, outcome) in enumerate(entries)
        ]

    def _choose(
        self, trials: Sequence[Trial], unusable: Container[PolicyParams]
    ) -> tuple[choose.Choice, PolicyParams, dict[str, str]]:
        """Applies the choice rule to the search's trials; the random arm is a yardstick, not a candidate.

        unusable: what failed on a held-out trace, and so is not settled for.
        """
        eligible = [trial for trial in trials if trial.state == "ok" and trial.arm != "random"]
        candidates = [
            choose.Candidate(t.setting.to_params(), t.objectives, t.regimes, t.measurements) for t in eligible
        ]
        reference = next(i for i, trial in enumerate(eligible) if trial.arm == "reference")
        candidates, protect = self._protect(candidates, reference)
        noise_pct = None if self.study.study_noise is None else self.study.study_noise.alike_pct
        choice = choose.choose(
            candidates,
            reference,
            self.preferred,
            protect=protect,
            tie_pct=self.spec.tie_pct,
            noise_pct=noise_pct,
        )
        picked = eligible[choice.index]
        pick = picked.setting.to_params()
        settled, reasons = choose.settle(pick, picked.branch_steps, self.plan.reference)
        if settled in unusable:
            fate = "the pick's value is kept, since with the reference's a held-out trace failed"
            reasons = {knob: f"{reason}; {fate}" for knob, reason in reasons.items()}
        elif settled != pick:
            measured = self.study.remembered(f"references/settled-{folder_name(settled.label())}", settled)
            tie_pct = max([self.spec.tie_pct, *(noise.visible_pct for noise in self.study.noise)])
            bound = choose.score(picked.objectives, self.preferred) * (1 + tie_pct / 100)
            if measured.reason is None and choose.score(measured.objectives, self.preferred) <= bound:
                pick, fate = settled, "the reference's value is taken"
                choice = replace(
                    choice,
                    sentence=f"{choice.sentence} What never acted there takes the reference's value, so the pick is "
                    f"{settled.label()}.",
                )
            else:
                fate = "the pick's value is kept, since the reference's would make a difference"
            reasons = {knob: f"{reason}; {fate}" for knob, reason in reasons.items()}
        return choose.Choice(trials.index(picked), choice.sentence), pick, reasons

    def _protect(
        self, candidates: list[choose.Candidate], reference: int
    ) -> tuple[list[choose.Candidate], dict[str, float]]:
        """The candidates, and the regimes in which they must not harm with the difference that says nothing there.

        With `everywhere` both hold simulated other rates as well.
        """
        own = Counter(trace.regime for trace in self.plan.tuning)
        visible_pct = max((noise.visible_pct for noise in self.study.noise), default=0.0)
        protect = {
            regime: max(self.spec.tie_pct, visible_pct / math.sqrt(own[regime] * variance_share(list(own.values()))))
            for regime in self.spec.protected(list(own))
        }
        evaluator = self._simulator()
        if self.spec.protect != "everywhere" or evaluator is None:
            return candidates, protect
        widened = []
        self.progress.begin("Simulating the settings at other rates", len(candidates))
        for candidate in candidates:
            interrupt.check()
            more = regimes_at(
                evaluator,
                self.plan.tuning,
                self.spec.robustness_rates,
                candidate.params,
                self.objectives,
                self.study.limits,
            )
            widened.append(replace(candidate, regimes={**candidate.regimes, **more}))
            self.progress.advance(candidate.params.label())
        self.progress.end()
        other = [regime for regime in widened[reference].regimes if regime not in own]
        return widened, protect | dict.fromkeys(other, self.spec.tie_pct)

    def _simulator(self) -> Evaluator | None:
        """What simulates this study, without noise: its own profile, or the one beside a live study while it is trusted."""
        if isinstance(self.plan.evaluator, SimulatedEvaluator):
            return replace(self.plan.evaluator, noise_sigma=0.0)
        if self.foresight is None or self.foresight.dropped is not None:
            return None
        return SimulatedEvaluator(self.foresight.forecast.profile)

    def _robustness(self, pick: PolicyParams) -> list[RobustnessPoint]:
        evaluator, plan, study = self._simulator(), self.plan, self.study
        if evaluator is None or not self.spec.robustness_rates:
            return []
        self.progress.begin("Simulating the pick at other rates", 1)
        points = robustness(
            evaluator, plan.held_out, self.spec.robustness_rates, pick, plan.reference, self.objectives, study.limits
        )
        self.progress.end()
        return points

    def _best_static(self, trials: Sequence[Trial]) -> PolicyParams:
        """The static budget with the best preferred objective on the tuning traces."""
        statics = [t for t in trials if t.state == "ok" and t.arm != "random" and t.setting.to_params().is_static]
        if not statics:
            raise NoResult(
                "every static budget failed, so there is nothing to compare with; see the trials' reasons, and start a "
                "study with other static_budgets"
            )
        return min(statics, key=lambda t: (choose.score(t.objectives, self.preferred), t.number)).setting.to_params()

    def _server_memory(self) -> ServerMemory | None:
        memory = self.plan.evaluator.memory if isinstance(self.plan.evaluator, LiveEvaluator) else None
        seen = None if memory is None else memory.summary()
        return None if seen is None else ServerMemory.model_validate(seen)

    def _runner_up(
        self, trials: Sequence[Trial], taken: Collection[PolicyParams], picked: Trial
    ) -> dict[str, PolicyParams]:
        """The best setting that did something else than every finalist, under its role; nothing where there is none."""
        acted = {
            behaviour(trial.setting.to_params(), trial.branch_steps) for trial in trials if _setting(trial) in taken
        }
        acted |= {behaviour(_setting(picked), picked.branch_steps)} | {behaviour(params, {}) for params in taken}
        others = [
            trial
            for trial in trials
            if trial.state == "ok"
            and trial.arm != "random"
            and _setting(trial) not in taken
            and behaviour(_setting(trial), trial.branch_steps) not in acted - {None}
        ]
        if not others:
            return {}
        best = min(others, key=lambda trial: (choose.score(trial.objectives, self.preferred), trial.number))
        return {"runner-up": best.setting.to_params()}

    def _hypervolume(self, trials: Sequence[Trial]) -> dict[str, list[float]]:
        """Arm to the hypervolume after each of its trials; both arms begin with the known settings."""
        known = [t for t in trials if t.state == "ok" and t.arm not in ("search", "random")]
        bound = [1.01 * max(t.objectives[name] for t in known) for name in self.objectives]
        volumes: dict[str, list[float]] = {}
        for arm in ("search", "random"):
            front = pareto.GrowingFront(bound)
            for trial in known:
                front.add([trial.objectives[name] for name in self.objectives])
            history = [front.volume]
            for trial in trials:
                if trial.arm == arm:
                    if trial.state == "ok":
                        front.add([trial.objectives[name] for name in self.objectives])
                    history.append(front.volume)
            if len(history) > 1:
                volumes[arm] = history
        return volumes

    def _doubts_of_the_search(self) -> list[str]:
        dropped = None if self.foresight is None else self.foresight.dropped
        gone = dropped and f"the simulator was dropped, since the live trials contradict it: {dropped}"
        return [note for note in (self.searching.cut, self.unforeseen, gone) if note]


def _without(trials: Sequence[SearchTrial], params: PolicyParams, reason: str) -> list[SearchTrial]:
    """`trials`, with those of the setting `params` failed for `reason`."""
    return [
        replace(trial, outcome=replace(trial.outcome, objectives={}, regimes={}, reason=reason))
        if trial.params == params
        else trial
        for trial in trials
    ]


def _setting(trial: Trial) -> PolicyParams:
    return trial.setting.to_params()


def _objective(name: str) -> Objective:
    definition = metrics.metric(name)
    return Objective(metric=name, label=definition.label, better=definition.better)


def _trace_info(trace: Trace, purpose: str) -> TraceInfo:
    span_s = max(trace.duration_s, 1e-9)
    return TraceInfo(
        name=trace.name,
        regime=trace.regime,
        purpose="tuning" if purpose == "tuning" else "held-out",
        seed=trace.seed,
        digest=trace.digest,
        num_requests=len(trace.requests),
        duration_s=trace.duration_s,
        rate_per_s=len(trace.requests) / span_s if len(trace.requests) > 1 else 0.0,
    )
