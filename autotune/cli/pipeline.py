"""A study with everything that is made from it: results, report, export, manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune import aggregate, choose
from autotune.export import write_export
from autotune.plan import Plan, make_plan
from autotune.progress import Progress
from autotune.records import Origin
from autotune.results import Setting, StudyResults
from autotune.runfolder import RunFolder
from autotune.spec import StudySpec
from autotune.tune import tune
from ppas_core.policy import PolicyParams
from reports.html import write_report


def run_study(spec: StudySpec, path: Path, *, base: Path, progress: Progress) -> StudyResults:
    """Runs the study in `path` and writes all its outputs there; files that it names are looked for from `base`."""
    plan = make_plan(spec, base)
    results = tune(plan, path, progress)
    run = RunFolder(path)
    progress.begin("Writing report and export", 2)
    write_export(results, run.export, cost=_cost(plan, results.exported))
    progress.advance()
    write_report(results, run.report)
    progress.advance()
    progress.end()
    run.write_manifest()
    return results


def write_exports(results: StudyResults, run: RunFolder, output: Path, setting: Setting | None) -> tuple[Path, ...]:
    """The export of a finished study, or of another `setting` of it, made again from its run folder."""
    plan = make_plan(run.spec(), run.path)
    return write_export(results, output, setting=setting, cost=_cost(plan, setting or results.exported))


def _cost(plan: Plan, setting: Setting) -> Callable[[PolicyParams], float] | None:
    """None for a live study: what a setting would cost there, only a measurement could tell."""
    return _Cost(plan, setting) if plan.evaluator.origin is Origin.SIMULATED else None


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
