"""A study with everything that is made from it: results, report, export, manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune import aggregate, choose
from autotune.export import write_export
from autotune.heartbeat import Heartbeat
from autotune.live import LiveEvaluator
from autotune.plan import Plan, make_plan
from autotune.planned import planned_stages_s
from autotune.progress import Progress, Together
from autotune.records import Origin
from autotune.results import Setting, StudyResults
from autotune.runfolder import RunFolder
from autotune.spec import StudySpec
from autotune.tune import SharedSearches, tune
from ppas_core.policy import PolicyParams
from reports.html import write_report


def run_study(
    spec: StudySpec,
    path: Path,
    *,
    base: Path,
    progress: Progress,
    say: Callable[[str], None] | None = None,
    shared: SharedSearches | None = None,
) -> StudyResults:
    """Runs the study in `path` and writes all its outputs there; files that it names are looked for from `base`.

    say: told what will be done and what a live server is up to, a line each. shared: a search that other processes share.
    """
    plan = make_plan(spec, base)
    if say is not None and isinstance(plan.evaluator, LiveEvaluator):
        plan.evaluator.say = say
        for line in plan_lines(plan):
            say(line)
    with Heartbeat(path, "tune", planned_s=planned_stages_s(plan)) as heartbeat:
        both = Together(progress, heartbeat)
        results = tune(plan, path, both, shared)
        run = RunFolder(path)
        both.begin("Writing report and export", 2)
        write_export(results, run.export, cost=_cost(plan, results.exported))
        both.advance()
        write_report(results, run.report)
        both.advance()
        both.end()
        run.write_manifest()
    return results


def write_exports(results: StudyResults, run: RunFolder, output: Path, setting: Setting | None) -> tuple[Path, ...]:
    """The export of a finished study, or of another `setting` of it, made again from its run folder."""
    spec = run.spec()
    # Of a live study no plan: the model that it names may be on another machine by now.
    cost = None if spec.backend == "vllm" else _cost(make_plan(spec, run.path), setting or results.exported)
    return write_export(results, output, setting=setting, cost=cost)


def _cost(plan: Plan, setting: Setting) -> Callable[[PolicyParams], float] | None:
    """None for a live study: what a setting would cost there, only a measurement could tell."""
    return _Cost(plan, setting) if plan.evaluator.origin is Origin.SIMULATED else None


def plan_lines(plan: Plan) -> list[str]:
    """What a live study will do and about how long, for people."""
    found, budget_s = plan.estimate(), plan.spec.time_budget_s()
    search_s = found.search_s if budget_s is None else min(found.search_s, budget_s)
    return [
        f"plan: {found.settings} settings on {len(plan.tuning)} tuning traces, the reference and the best again for noise and "
        f"drift, finalists on {len(plan.held_out)} held-out traces: up to {found.replays} replays",
        f"about {found.total_s(budget_s) / 60:.0f} minutes and {found.starts_in_words}: search {search_s / 60:.0f}, "
        f"again {found.reference_s / 60:.0f}, finalists {found.finalists_s / 60:.0f}"
        + (f", calibrating the simulator {found.calibration_s / 60:.0f}" if found.calibration_s else "")
        + (f" (search limited by the time budget of {plan.spec.time_budget})" if budget_s is not None else ""),
    ]


class _Cost:
    """Predicts, in the study's simulator, what another setting would cost: ratio to `setting`, above 1 is worse."""

    def __init__(self, plan: Plan, setting: Setting) -> None:
        self._plan = plan
        self._metrics = choose.preferred_metrics(plan.spec.prefer, plan.spec.objectives)
        self._base = self._means(setting.to_params())

    def __call__(self, params: PolicyParams) -> float:
        means = self._means(params)
        return aggregate.geometric_mean(aggregate.objective(name, means, self._base) for name in self._metrics)

    def _means(self, params: PolicyParams) -> aggregate.RegimeMeans:
        replays = [self._plan.evaluator.replay(params, trace) for trace in self._plan.tuning]
        return aggregate.regime_means(replays, self._metrics, self._plan.spec.metric_limits())
