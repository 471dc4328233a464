"""`ppas evaluate`: the paper's aggregates of measured sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from autotune.cli import console
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.naming import did_you_mean

if TYPE_CHECKING:
    from autotune.runlogs.improvement import Improvement
    from autotune.runlogs.model import RunResult

_SHOWN = ("mean_latency_s", "p95_latency_s", "mean_ttft_s", "mean_tpot_s", "makespan_s")
_NOTES_SHOWN = 20


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(evaluate)


@console.reports_errors
def evaluate(
    log: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG…",
            help="Published sweep logs, tables of runs (.csv), or run folders; several are read as one sweep.",
            show_default=False,
        ),
    ],
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline", "-b", help="Setting to compare with; repeat for more. Default: every static budget."
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", "-c", help="Setting to judge; repeat for more. Default: every adaptive one."),
    ] = None,
    metric: Annotated[str, typer.Option(help="Metric of the table by load regime.")] = "mean_latency_s",
    with_failed: Annotated[
        bool,
        typer.Option("--with-failed", help="Count runs that lost requests too, by the requests that completed."),
    ] = False,
    all_trials: Annotated[
        bool,
        typer.Option(
            "--all-trials",
            help="Of a finished study's run folder every tried setting, on its tuning traces too; default: its finalists "
            "on held-out traces.",
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Print the paper's aggregates of measured runs: improvement per baseline, over regimes and by regime.

    Runs are paired by trace. Per regime the ratio of the means over its traces, over regimes the geometric mean.

    Example: ppas evaluate RTX5090_qwen_3b.txt --baseline mbt-2048
    """
    from autotune.runlogs import improvement
    from autotune.runlogs.model import METRICS
    from autotune.runlogs.read import read_runs

    if metric not in METRICS:
        raise InvalidInput(f"no metric {metric!r} in runs{did_you_mean(metric, METRICS)}")
    found = read_runs(log)
    if not all_trials:
        found = replace(found, runs=_judged(found.runs))
    runs, lost = improvement.whole_runs(found.runs)
    if lost:
        fate = "count by those that completed" if with_failed else "are left out"
        _warn(f"{len(lost)} of {len(found.runs)} runs lost requests and {fate}", lost)
    runs = list(found.runs) if with_failed else runs
    for note in found.notes[:_NOTES_SHOWN]:
        console.err.print(f"[yellow]note:[/] {escape(note)}")
    if not runs:
        raise NoResult("every run lost requests; nothing can be compared")
    groups = {run.served: [r for r in runs if r.served == run.served] for run in runs}
    results = {served: _compare(own, baseline, candidate) for served, own in groups.items()}
    if not any(_says_anything(one) for compared in results.values() for one in compared):
        raise NoResult(
            "no figure can be compared: in every pair of runs each one is 0, or missing on one side; do the logs hold what "
            "was measured?"
        )
    if json_output:
        console.print_json(
            {
                "files": [str(path) for path in log],
                "runs": len(found.runs),
                "lost_requests": lost,
                "left_out": 0 if with_failed else len(lost),
                "notes": list(found.notes),
                "results": [
                    {"served": served, **_measured(groups[served]), "comparisons": [one.to_dict() for one in compared]}
                    for served, compared in results.items()
                ],
            }
        )
        return
    for served, compared in results.items():
        _show(served, groups[served], compared, metric)


def _judged(runs: Sequence[RunResult]) -> tuple[RunResult, ...]:
    """Of each finished study the finalists on held-out traces: figures of the search are flattered by selection."""
    finished = {run.file for run in runs if run.held_out}
    return tuple(run for run in runs if run.held_out or run.file not in finished)


def _compare(runs: list[RunResult], baseline: list[str] | None, candidate: list[str] | None) -> list[Improvement]:
    from autotune.runlogs import improvement

    adaptive, static = improvement.settings_of(runs)
    names = [*adaptive, *static]
    candidates = [improvement.find_setting(text, names) for text in candidate] if candidate else adaptive
    baselines = [improvement.find_setting(text, names) for text in baseline] if baseline else static
    if not candidates:
        raise InvalidInput(f"all settings are static budgets: {', '.join(names)}; name one with --candidate")
    if not baselines:
        raise InvalidInput(f"no setting is a static budget: {', '.join(names)}; name one with --baseline")
    pairs = [(one, against) for one in candidates for against in baselines if one != against]
    if not pairs:
        raise InvalidInput(f"{candidates[0]} would be compared with itself; name another with --baseline")
    return [improvement.improvement(runs, one, against) for one, against in pairs]


def _says_anything(one: Improvement) -> bool:
    return any(value is not None for by_name in (one.overall, *one.regimes.values()) for value in by_name.values())


def _measured(runs: list[RunResult]) -> dict[str, Any]:
    return {"origin": sorted({str(run.origin) for run in runs}), "whole_runs": len(runs)}


def _show(served: str, runs: list[RunResult], compared: list[Improvement], metric: str) -> None:
    from autotune import metrics
    from autotune.runlogs import improvement
    from autotune.stats import TIE_S

    origin = ", ".join(_measured(runs)["origin"])
    matched = any(one.matched for one in compared)
    by_candidate: dict[str, list[Improvement]] = {}
    for one in compared:
        by_candidate.setdefault(one.candidate, []).append(one)
    for candidate, own in by_candidate.items():
        console.table(
            f"{candidate}: improvement in %, {served} ({origin}), geometric mean over {len(own[0].regimes)} load regimes",
            [
                "against",
                *(console.short(metrics.metric(name).label) for name in _SHOWN),
                *(["faster", "requests"] if matched else []),
                "traces",
            ],
            [
                (
                    one.baseline,
                    *(_percent(one.overall[name]) for name in _SHOWN),
                    *(_share(one) if matched else ()),
                    str(one.num_traces),
                )
                for one in own
            ],
        )
        if len(own) > 1 and (best := improvement.best_baseline(own)) is not None:
            console.out.print(escape(f"best baseline in mean latency: {best.baseline}"))
        regimes = list(dict.fromkeys(regime for one in own for regime in one.regimes))
        console.table(
            f"{candidate}: {metrics.metric(metric).label} by load regime, improvement in %",
            ["regime", *(f"{one.baseline}" for one in own)],
            [
                (regime, *(_percent(one.regimes[regime][metric]) if regime in one.regimes else "–" for one in own))
                for regime in regimes
            ],
        )
    undefined = [name for name in _SHOWN if all(one.overall[name] is None for one in compared)]
    if undefined:
        console.out.print(f"[yellow]note:[/] {', '.join(undefined)}: not in every run of these logs")
    for one in compared:
        if one.unpaired:
            _note(
                f"{one.candidate} against {one.baseline}: {one.unpaired} traces were run under one of them only; left out"
            )
        if one.matched is not None and one.matched.unmatched:
            _note(f"{one.candidate} against {one.baseline}: {one.matched.unmatched} requests have no match")
    if matched:
        tied = max(one.matched.tied for one in compared if one.matched)
        _note(f"faster: share of matched requests with the lower latency; up to {tied:.1%} differ by under {TIE_S:g} s")


def _note(text: str) -> None:
    console.out.print(f"[yellow]note:[/] {escape(text)}")


def _warn(title: str, lines: list[str]) -> None:
    console.err.print(f"[bold yellow]warning:[/] {escape(title)}:")
    for line in lines[:_NOTES_SHOWN]:
        console.err.print(escape(f"  {line}"))
    if len(lines) > _NOTES_SHOWN:
        console.err.print(f"  … and {len(lines) - _NOTES_SHOWN} more; --json lists all")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}"


def _share(one: Improvement) -> tuple[str, str]:
    return ("–", "0") if one.matched is None else (f"{one.matched.faster:.1%}", str(one.matched.requests))
