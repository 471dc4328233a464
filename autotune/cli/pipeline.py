"""A study with everything that is made from it: results, report, export, manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.counts import planned_settings
from autotune.export import write_export
from autotune.export.common import file_digest
from autotune.heartbeat import Heartbeat
from autotune.live import LiveEvaluator
from autotune.plan import Plan, make_plan
from autotune.planned import planned_stages_s
from autotune.predicted_cost import predicted_cost
from autotune.progress import Progress, Together
from autotune.results import Setting, StudyResults
from autotune.runfolder import RunFolder, require_room_for
from autotune.spec import StudySpec
from autotune.tune import SharedSearches, tune
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
    require_room_for(plan, path)
    if say is not None and isinstance(plan.evaluator, LiveEvaluator):
        plan.evaluator.say = say
        for line in plan_lines(plan):
            say(line)
    with Heartbeat(path, "tune", planned_s=planned_stages_s(plan)) as heartbeat:
        both = Together(progress, heartbeat)
        results = tune(plan, path, both, shared)
        run = RunFolder(path)
        both.begin("Writing report and export", 2)
        cost, note = predicted_cost(results, run, results.exported, plan)
        write_export(results, run.export, cost=cost, cost_note=note)
        both.advance()
        write_report(results, run.report)
        both.advance()
        both.end()
        run.write_manifest()
    return results


def write_exports(results: StudyResults, run: RunFolder, output: Path, setting: Setting | None) -> tuple[Path, ...]:
    """The export of a finished study, or of another `setting` of it, made again from its run folder."""
    cost, note = predicted_cost(results, run, setting or results.exported)
    digest = file_digest(run.results)
    return write_export(results, output, setting=setting, cost=cost, cost_note=note, results_digest=digest)


def plan_lines(plan: Plan) -> list[str]:
    """What a live study will do and about how long, for people."""
    found, budget_s = plan.estimate(), plan.spec.time_budget_s()
    search_s = found.search_s if budget_s is None else min(found.search_s, budget_s)
    return [
        f"plan: {planned_settings(plan)} on {len(plan.tuning)} tuning traces, the reference and the best again for noise and "
        f"drift, finalists on {len(plan.held_out)} held-out traces: up to {found.replays} replays"
        + (", and the calibration's" if found.calibration_s else ""),
        f"about {found.total_s(budget_s) / 60:.0f} minutes and {found.starts_in_words}: search {search_s / 60:.0f}, "
        f"again {found.reference_s / 60:.0f}, finalists {found.finalists_s / 60:.0f}"
        + (f", calibrating the simulator {found.calibration_s / 60:.0f}" if found.calibration_s else "")
        + (f" (search limited by the time budget of {plan.spec.time_budget})" if budget_s is not None else ""),
    ]
