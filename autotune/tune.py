"""The main job: search on tuning traces, pick by rule, compare on held-out traces, keep everything in a run folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from autotune import aggregate, choose, landscape, metrics, pareto, provenance
from autotune.compare import COMPARED, compare_settings, held_out_result
from autotune.evaluate import Evaluator, SimulatedEvaluator
from autotune.noise import noise_floor
from autotune.progress import Progress, Silent
from autotune.records import Origin, Replay
from autotune.results import Arm, Comparison, NoiseInfo, Objective, Setting, StudyResults, TraceInfo, Trial
from autotune.runfolder import RunFolder, folder_name, open_run
from autotune.spec import StudySpec
from autotune.study import Outcome, Search, SearchTrial, resolve_sampler
from ppas_core import defaults
from ppas_core.errors import InvalidInput, NoResult, PpasError
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile
from search_spaces.space import Space, load_space
from traces.format import Trace

_NOISE_RUNS: Final = 3
"""How often the reference is measured to learn the noise."""
_RANDOM_STREAM: Final = 1_000_003
"""Keeps the random arm's seed away from the search's."""


@dataclass(frozen=True)
class Plan:
    """A study resolved and checked: everything that can be refused was refused before anything expensive runs."""

    spec: StudySpec
    space: Space
    evaluator: Evaluator
    tuning: tuple[Trace, ...]
    held_out: tuple[Trace, ...]
    reference: PolicyParams
    known: tuple[tuple[Arm, PolicyParams], ...]
    sampler: str

    @property
    def in_space(self) -> tuple[tuple[Arm, PolicyParams], ...]:
        """Known settings that the space contains: they are trials of the search itself."""
        return tuple((arm, params) for arm, params in self.known if self.space.contains(params))

    @property
    def outside(self) -> tuple[tuple[Arm, PolicyParams], ...]:
        """Known settings that the space does not contain: measured beside the search."""
        return tuple((arm, params) for arm, params in self.known if not self.space.contains(params))


def make_plan(spec: StudySpec, folder: Path = Path()) -> Plan:
    """Resolves a study; files that it names are looked for from `folder`. Raises InvalidInput."""
    reference = spec.reference_params()
    space = load_space(_from_folder(spec.space, folder))
    tuning, held_out = spec.build_traces(folder)
    evaluator = evaluator_for(spec, folder)
    for trace in (*tuning, *held_out):
        evaluator.check(trace)
    known: dict[PolicyParams, Arm] = {reference: "reference"}
    if spec.published is None:
        published = [params for params in defaults.PUBLISHED.values() if space.contains(params)]
    else:
        published = [defaults.published(name) for name in spec.published]
    for params in published:
        known.setdefault(params, "published")
    for budget in spec.static_budgets:
        known.setdefault(static_like(reference, budget), "static")
    return Plan(
        spec=spec,
        space=space,
        evaluator=evaluator,
        tuning=tuple(tuning),
        held_out=tuple(held_out),
        reference=reference,
        known=tuple((arm, params) for params, arm in known.items()),
        sampler=resolve_sampler(spec.sampler),
    )


def evaluator_for(spec: StudySpec, folder: Path = Path()) -> Evaluator:
    """What the study's trials run on. Raises InvalidInput."""
    profile = load_profile(str(folder / spec.profile) if spec.profile.endswith(".json") else spec.profile)
    return SimulatedEvaluator(profile, noise_sigma=spec.noise_sigma, seed=spec.seed)


def static_like(reference: PolicyParams, budget: int) -> PolicyParams:
    """A static budget with the reference's other knobs, none of which can act. Raises InvalidInput."""
    try:
        return replace(reference, b_max=budget, b_cap=budget)
    except InvalidInput as error:
        raise InvalidInput(f"static budget {budget}: {error}") from None


def tune(plan: Plan, path: Path, progress: Progress | None = None) -> StudyResults:
    """Runs the study in the run folder `path`, or what is left of it, and saves `results.json` there.

    Raises NoResult when the reference itself cannot be measured; KeyboardInterrupt leaves every finished trial behind.
    """
    progress = progress or Silent()
    with open_run(path, plan.spec, [*plan.tuning, *plan.held_out], plan.evaluator.describe()) as run:
        results = _Tuner(plan, run, progress).results()
        results.save(run.results)
        return results


class _Tuner:
    """One run of a plan in its folder; the methods follow the order of the work."""

    def __init__(self, plan: Plan, run: RunFolder, progress: Progress) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.run = run
        self.progress = progress
        self.limits = plan.spec.metric_limits()
        self.objectives = plan.spec.objectives
        self.metrics = tuple(dict.fromkeys([*COMPARED, *self.objectives]))
        self.preferred = choose.preferred_metrics(plan.spec.prefer, self.objectives)
        self.base = self._measure_reference()
        self.noise = self._measure_noise() if plan.evaluator.is_noisy else []

    def results(self) -> StudyResults:
        plan, spec = self.plan, self.spec
        outside = self._measure_outside()
        search = self._search("search", plan.sampler, spec.seed, plan.in_space)
        found = self._run_arm(search, "Searching", len(plan.in_space) + spec.trials, "trials", timed=True)
        random: list[SearchTrial] = []
        if spec.random_arm:
            arm = self._search("random", "random", spec.seed + _RANDOM_STREAM, ())
            num_searched = sum(trial.arm == "search" for trial in found)
            random = self._run_arm(arm, "Random search, for comparison", num_searched, "random", timed=False)

        trials = self._list_trials(found, outside, random)
        choice, pick, not_identified = self._choose(trials)
        best_static = self._best_static(trials)
        held_out = self._replay_held_out(
            {"tuned": pick, self._reference_role(): plan.reference, "best static": best_static}
        )
        comparisons = self._compare(held_out)
        exported_role = "tuned" if comparisons[0].verdict == "better" else "reference"
        exported = pick if exported_role == "tuned" else plan.reference
        self.progress.begin("Mapping the landscape", 1)
        surface = landscape.plane(
            plan.evaluator, plan.tuning, plan.space, pick, self.preferred[0], self.base.regimes, self.limits
        )
        self.progress.end()
        return StudyResults(
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
            exported_role=exported_role if exported_role == "tuned" else self._reference_role(),
            best_static=Setting.of(best_static),
            held_out=[held_out_result(role, replays, self.limits) for role, replays in held_out.items()],
            comparisons=comparisons,
            importance=search.importance(),
            importance_method="PED-ANOVA (share of the variance among the better trials)",
            hypervolume=self._hypervolume(trials),
            landscape=surface,
            not_identified=not_identified,
            warnings=self._warnings(trials, pick, comparisons[0]),
            noise=self.noise,
            provenance=provenance.collect(plan.evaluator.describe(), spec.model_dump(mode="json"), plan.sampler),
        )

    def _measure_reference(self) -> Outcome:
        """The reference on the tuning traces: what every ratio is taken to. Raises NoResult when it cannot be."""
        outcome = self._try("references/reference", self.plan.reference, None)
        if outcome.reason is not None:
            raise NoResult(f"the reference {self.plan.reference.label()} cannot be measured: {outcome.reason}")
        return outcome

    def _measure_noise(self) -> list[NoiseInfo]:
        """The reference measured again and again, against itself: an A/A test before anything is searched."""
        plan = self.plan
        self.progress.begin("Measuring the noise (reference against itself)", _NOISE_RUNS * len(plan.tuning))
        runs: list[list[Replay]] = [[] for _ in range(_NOISE_RUNS)]
        for trace in plan.tuning:
            for repeat, run in enumerate(runs, start=1):
                run.append(plan.evaluator.replay(plan.reference, trace, repeat))
                self.progress.advance()
        self.progress.end()
        fewer = math.sqrt(len(plan.tuning) / len(plan.held_out))
        floors = [
            noise_floor(runs, metric, wanted_pct=self.spec.min_gain_pct, limits=self.limits)
            for metric in self.preferred
        ]
        return [NoiseInfo(visible_held_out_pct=floor.visible_pct * fewer, **asdict(floor)) for floor in floors]

    def _measure_outside(self) -> list[tuple[Arm, PolicyParams, Outcome]]:
        self.progress.begin("Measuring known settings outside the space", len(self.plan.outside))
        measured: list[tuple[Arm, PolicyParams, Outcome]] = []
        for arm, params in self.plan.outside:
            outcome = self._try(f"references/{folder_name(params.label())}", params, self.base)
            measured.append((arm, params, outcome))
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
            deterministic=self.plan.evaluator.origin is Origin.SIMULATED and self.spec.noise_sigma == 0,
            arm=arm,
            first=first,
        )

    def _run_arm(self, search: Search, stage: str, total: int, folder: str, *, timed: bool) -> list[SearchTrial]:
        done = search.trials()
        budget_s = self.spec.time_budget_s() if timed else None
        spent_s = sum(trial.outcome.duration_s for trial in done)
        started = time.perf_counter()
        self.progress.begin(stage, total, len(done))
        while len(done) < total:
            beyond_known = len(done) >= len(self.plan.in_space)
            if budget_s is not None and beyond_known and spent_s + time.perf_counter() - started >= budget_s:
                break
            done.append(search.step(lambda number, params: self._try(f"{folder}/{number}", params, self.base)))
            self.progress.advance(self._best_note(done))
        self.progress.end()
        return done

    def _best_note(self, trials: Iterable[SearchTrial]) -> str:
        scores = [choose.score(t.outcome.objectives, self.preferred) for t in trials if t.outcome.reason is None]
        return f"best {aggregate.improvement_pct(min(scores)):+.1f} % on the reference" if scores else ""

    def _try(self, folder: str, params: PolicyParams, base: Outcome | None) -> Outcome:
        """One setting on all tuning traces, kept under `folder`; a failure is an outcome with its reason."""
        started = time.perf_counter()
        replays: list[Replay] = []
        try:
            replays = [self.plan.evaluator.replay(params, trace) for trace in self.plan.tuning]
            means = aggregate.regime_means(replays, self.metrics, self.limits)
            reference = base.regimes if base is not None else means
            objectives = {name: aggregate.objective(name, means, reference) for name in self.objectives}
            outcome = Outcome(objectives, means, aggregate.sum_branches(replays), time.perf_counter() - started)
        except PpasError as error:
            outcome = Outcome({}, {}, {}, time.perf_counter() - started, reason=str(error))
        self.run.save_trial(folder, params, outcome, replays)
        return outcome

    def _list_trials(
        self,
        found: Sequence[SearchTrial],
        outside: Sequence[tuple[Arm, PolicyParams, Outcome]],
        random: Sequence[SearchTrial],
    ) -> list[Trial]:
        """All trials in one list with one numbering: the search's own, then known settings outside it, then random."""
        entries = [(trial.arm, trial.params, trial.outcome) for trial in (*found, *_as_trials(outside), *random)]
        good = [i for i, (arm, _, outcome) in enumerate(entries) if outcome.reason is None and arm != "random"]
        points = [[entries[i][2].objectives[name] for name in self.objectives] for i in good]
        front = {i for i, keep in zip(good, pareto.on_front(points), strict=True) if keep}
        return [
            Trial(
                number=number,
                arm=arm,
                setting=Setting.of(params),
                state="ok" if outcome.reason is None else "failed",
                reason=outcome.reason,
                objectives=outcome.objectives,
                regimes=outcome.regimes,
                branch_steps=outcome.branch_steps,
                dimensions=self.plan.space.coordinates(params) if self.plan.space.contains(params) else {},
                on_front=number in front,
                duration_s=outcome.duration_s,
            )
            for number, (arm, params, outcome) in enumerate(entries)
        ]

    def _choose(self, trials: Sequence[Trial]) -> tuple[choose.Choice, PolicyParams, dict[str, str]]:
        """Applies the choice rule to the search's trials; the random arm is a yardstick, not a candidate."""
        eligible = [trial for trial in trials if trial.state == "ok" and trial.arm != "random"]
        candidates = [choose.Candidate(t.setting.to_params(), t.objectives, t.regimes) for t in eligible]
        reference = next(i for i, trial in enumerate(eligible) if trial.arm == "reference")
        protect = list(self.base.regimes) if self.spec.protect == "all" else self.spec.protect
        choice = choose.choose(candidates, reference, self.preferred, protect=protect, tie_pct=self.spec.tie_pct)
        picked = eligible[choice.index]
        pick, reasons = choose.settle(picked.setting.to_params(), picked.branch_steps, self.plan.reference)
        return choose.Choice(trials.index(picked), choice.sentence), pick, reasons

    def _best_static(self, trials: Sequence[Trial]) -> PolicyParams:
        """The static budget with the best preferred objective on the tuning traces."""
        statics = [t for t in trials if t.state == "ok" and t.arm != "random" and t.setting.to_params().is_static]
        if not statics:
            raise NoResult("no static budget was measured without a failure; see the trials' reasons")
        return min(statics, key=lambda t: (choose.score(t.objectives, self.preferred), t.number)).setting.to_params()

    def _replay_held_out(self, finalists: dict[str, PolicyParams]) -> dict[str, list[Replay]]:
        """Role to replays on the held-out traces: the finalists, then every other static budget that works."""
        replays: dict[str, list[Replay]] = {}
        others = [static_like(self.plan.reference, budget) for budget in self.spec.static_budgets]
        others = [params for params in others if params.b_max != finalists["best static"].b_max]
        self.progress.begin("Replaying held-out traces", len(finalists) + len(others))
        for role, params in finalists.items():
            replays[role] = [self.plan.evaluator.replay(params, trace) for trace in self.plan.held_out]
            self.progress.advance(role)
        for params in others:
            with contextlib.suppress(PpasError):  # it is there for the picture only; the search recorded why it fails
                replays[params.label()] = [self.plan.evaluator.replay(params, trace) for trace in self.plan.held_out]
            self.progress.advance(params.label())
        self.progress.end()
        return replays

    def _compare(self, held_out: dict[str, list[Replay]]) -> list[Comparison]:
        reference = self._reference_role()
        pairs = [("tuned", reference), ("tuned", "best static"), (reference, "best static")]
        self.progress.begin("Comparing on held-out traces", len(pairs))
        comparisons = []
        for candidate, against in pairs:
            comparisons.append(
                compare_settings(
                    (candidate, held_out[candidate]),
                    (against, held_out[against]),
                    self.spec,
                    self.preferred,
                    min_gain_pct=max([self.spec.min_gain_pct, *(noise.visible_held_out_pct for noise in self.noise)]),
                )
            )
            self.progress.advance(f"{candidate} against {against}")
        self.progress.end()
        return comparisons

    def _reference_role(self) -> str:
        return "paper default" if self.plan.reference in defaults.PUBLISHED.values() else "reference"

    def _hypervolume(self, trials: Sequence[Trial]) -> dict[str, list[float]]:
        """Arm to the hypervolume after each of its trials; both arms begin with the known settings."""
        known = [t for t in trials if t.state == "ok" and t.arm not in ("search", "random")]
        bound = [1.01 * max(t.objectives[name] for t in known) for name in self.objectives]
        volumes: dict[str, list[float]] = {}
        for arm in ("search", "random"):
            points = [[t.objectives[name] for name in self.objectives] for t in known]
            history = [pareto.hypervolume(points, bound)]
            for trial in trials:
                if trial.arm == arm:
                    if trial.state == "ok":
                        points.append([trial.objectives[name] for name in self.objectives])
                    history.append(pareto.hypervolume(points, bound))
            if len(history) > 1:
                volumes[arm] = history
        return volumes

    def _warnings(self, trials: Sequence[Trial], pick: PolicyParams, comparison: Comparison) -> list[str]:
        notes = []
        if failed := [t for t in trials if t.state == "failed"]:
            notes.append(f"{len(failed)} of {len(trials)} trials failed; the first: {failed[0].reason}")
        notes += self.plan.evaluator.doubts(pick, [*self.plan.tuning, *self.plan.held_out])
        gain_pct = comparison.overall[self.preferred[0]].improvement_pct
        error_pct = self.plan.evaluator.error_pct
        if comparison.verdict == "better" and error_pct is not None and gain_pct < error_pct:
            notes.append(
                f"the gain of {gain_pct:.1f} % is below the simulator's own error of {error_pct:.1f} % on published "
                "runs: confirm it on a live server"
            )
        return notes


def _as_trials(outside: Iterable[tuple[Arm, PolicyParams, Outcome]]) -> list[SearchTrial]:
    return [SearchTrial(-1, arm, params, outcome) for arm, params, outcome in outside]


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


def _from_folder(space: str | dict[str, object], folder: Path) -> str | dict[str, object]:
    """A space file is looked for beside the study file; presets and inline spaces stay as they are."""
    if isinstance(space, str) and space.endswith((".yaml", ".yml")):
        return str(folder / space)
    return space
