"""`ppas tune`, `ppas report` and `ppas export`: a study, and what is made from its run folder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from autotune.cli import console, server_block, worker
from autotune.cli.settings import profile_option
from autotune.progress import Progress, Silent, Together
from autotune.settings import parse_setting
from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean

if TYPE_CHECKING:
    from autotune.export.tables import Format
    from autotune.results import StudyResults
    from autotune.spec import StudySpec
    from ppas_core.policy import PolicyParams

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command()(tune)
    app.command()(sweep)
    app.command()(report)
    app.command()(export)


@console.reports_errors
def tune(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY.yaml", help="The study file; see examples/.", show_default=False)
    ],
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.", show_default=False)] = None,
    trials: Annotated[
        int | None, typer.Option(help="Search trials, instead of the file's.", show_default=False)
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(help="Stop the search after this long: 90s, 45m, 2h.", show_default=False)
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="auto, gp, tpe, cmaes, nsga2, qmc or random.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler.", show_default=False)] = None,
    prefer: Annotated[
        str | None, typer.Option(help="What decides the pick: mean, p95, balanced or an objective.", show_default=False)
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Simulator profile: name or file.", show_default=False)] = None,
    random_arm: Annotated[
        bool | None,
        typer.Option("--random-arm/--no-random-arm", help="Random search of the same size beside.", show_default=False),
    ] = None,
    simulate: Annotated[
        bool | None,
        typer.Option(
            "--simulate/--no-simulate",
            help="Live study: let a simulator calibrated on the server propose settings first.",
            show_default=False,
        ),
    ] = None,
    server_url: server_block.ServerUrl = None,
    settings_file: server_block.SettingsFile = None,
    token_file: server_block.TokenFile = None,
    restart_per_trial: server_block.RestartPerTrial = False,
    storage: worker.Storage = None,
    heartbeat: worker.HeartbeatEvery = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
    json_output: Json = False,
) -> None:
    """Search for the best settings, compare them on held-out traces, write report and export.

    The same command resumes a study that was interrupted or killed: every finished trial is kept. A larger --trials
    extends it, a smaller one finishes with what there is. With --storage the search is shared with `ppas worker`
    processes; this one works with them, and finishes the study.
    """
    from autotune.spec import load_spec

    spec = load_spec(study)
    spec = _override(
        spec,
        str(study),
        {
            "trials": trials, "time_budget": time_budget, "sampler": sampler, "seed": seed, "prefer": prefer,
            "profile": profile_option(profile) if profile else None, "random_arm": random_arm, "simulate": simulate,
            "server": server_block.as_block(spec, server_url, settings_file, token_file, restart_per_trial),
        },
    )  # fmt: skip
    path = run or Path("runs") / spec.name
    where = worker.storage_url(storage, heartbeat)
    from autotune.cli import pipeline  # Optuna, numba and Plotly load here, after the study file was checked

    progress: Progress = Silent() if quiet else console.Bar()
    results = pipeline.run_study(
        spec,
        path,
        base=study.parent,
        progress=progress,
        say=None if quiet else _say,
        shared=None if where is None else worker.make_shared(where, heartbeat),
    )
    if json_output:
        console.print_json(_summary(results, path))
    elif not quiet:
        _show(results, path)


@console.reports_errors
def sweep(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="See examples/.", show_default=False)],
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", "-s", help="A further setting; repeat for more.", show_default=False),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.", show_default=False)] = None,
    server_url: server_block.ServerUrl = None,
    settings_file: server_block.SettingsFile = None,
    token_file: server_block.TokenFile = None,
    restart_per_trial: server_block.RestartPerTrial = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    json_output: Json = False,
) -> None:
    """Measure the study's known settings on its tuning traces, without a search, and print the paper's table.

    Known are the reference, the published settings and the static budgets of the study file. The same command resumes.
    """
    from autotune.spec import load_spec

    spec = load_spec(study)
    server = server_block.as_block(spec, server_url, settings_file, token_file, restart_per_trial)
    spec = _override(spec, str(study), {"server": server})
    extra = [parse_setting(text) for text in setting or ()]
    from autotune import metrics
    from autotune.heartbeat import Heartbeat
    from autotune.plan import make_plan
    from autotune.sweep import PAPER_METRICS
    from autotune.sweep import sweep as run_sweep

    plan = make_plan(spec, study.parent)
    path = run or Path("runs") / spec.name
    with Heartbeat(path, "sweep") as heartbeat:
        swept = run_sweep(plan, path, extra, Together(Silent() if quiet else console.Bar(), heartbeat))
    if json_output:
        console.print_json({"origin": str(plan.evaluator.origin), "settings": [one.to_dict() for one in swept]})
        return
    tag = "simulated" if plan.evaluator.origin == "simulated" else "measured"
    console.table(
        f"Improvement of {swept[0].params.label()} over each setting in %, geometric mean over load regimes ({tag})",
        ["over", *(console.short(metrics.metric(name).label) for name in PAPER_METRICS)],
        [
            (other.params.label(), *(_percent(swept[0].improvement_pct(name, other)) for name in PAPER_METRICS))
            for other in swept[1:]
        ],
    )
    for one in swept:
        if one.outcome.reason is not None:
            console.out.print(f"[yellow]failed:[/] {escape(f'{one.params.label()}: {one.outcome.reason}')}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}"


@console.reports_errors
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run folder, such as runs/demo.", show_default=False)
    ],
    compare: Annotated[bool, typer.Option("--compare", help="One report of several studies, side by side.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to; default RUN/report.html, or compare.html.")
    ] = None,
    quiet: Quiet = False,
    json_output: Json = False,
) -> None:
    """Write the HTML report of a finished study again, from its run folder alone; or one report of several studies."""
    from autotune.results import StudyResults
    from autotune.runfolder import existing_run

    folders = [existing_run(run) for run in runs]
    if compare:
        from reports.compare import write_comparison

        target = output or Path("compare.html")
        write_comparison([StudyResults.load(folder.results) for folder in folders], target)
    elif len(folders) == 1:
        from reports.html import write_report

        target = output or folders[0].report
        write_report(StudyResults.load(folders[0].results), target)
        folders[0].write_manifest()
    else:
        raise InvalidInput(f"{len(folders)} run folders given; `ppas report --compare RUN RUN` reports several at once")
    _show_files([target], quiet=quiet, as_json=json_output)


@console.reports_errors
def export(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; default RUN/export, or RUN/export-trial-N.")
    ] = None,
    trial: Annotated[
        int | None, typer.Option(help="Export this trial's setting instead of the study's choice.", show_default=False)
    ] = None,
    results_only: Annotated[
        bool, typer.Option("--results", help="Write the study's results as tables instead; default RUN/tables.")
    ] = False,
    format_: Annotated[
        str | None, typer.Option("--format", help="With --results: parquet, csv; default both.", show_default=False)
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            help="Sign the export with this private Ed25519 key: a file, PEM or OpenSSH. `ppas verify --key` checks it.",
            show_default=False,
        ),
    ] = None,
    quiet: Quiet = False,
    json_output: Json = False,
) -> None:
    """Write the chosen setting for `vllm serve --config`, patched servers, Docker Compose, Kubernetes, Helm, and as JSON.

    With --results: all trials, the finalists' requests and the comparisons, as Parquet and CSV. With --sign the run
    folder is verified first, and nothing is written where something differs.
    """
    from autotune.cli import pipeline, signature
    from autotune.export import serve_lines
    from autotune.export.tables import write_tables
    from autotune.results import StudyResults
    from autotune.runfolder import existing_run

    folder = existing_run(run)
    results = StudyResults.load(folder.results)
    if results_only:
        if trial is not None:
            raise InvalidInput("--results writes all trials; leave out --trial")
        if sign is not None:
            raise InvalidInput("--sign signs an export, not tables; leave out --results")
        written = write_tables(results, output or run / "tables", _formats(format_))
        folder.write_manifest()
        _show_files(written, quiet=quiet, as_json=json_output)
        return
    if format_ is not None:
        raise InvalidInput("--format belongs to --results; give both")
    setting, target = None, output or folder.export
    if trial is not None:
        if not 0 <= trial < len(results.trials):
            raise InvalidInput(f"trial is {trial}; this study has 0 to {len(results.trials) - 1}")
        setting, target = results.trials[trial].setting, output or run / f"export-trial-{trial}"
    signer = None if sign is None else signature.prepare(sign, run)
    files = pipeline.write_exports(results, folder, target, setting)
    folder.write_manifest()
    if signer is not None:
        files = (*files, signature.write(signer, target, folder.path))
    _show_files(files, quiet=quiet, as_json=json_output)
    if not quiet and not json_output:
        for head, line in zip_longest(["serve"], serve_lines(results, target / "vllm.yaml"), fillvalue=""):
            console.err.print(f"{head:<9} {escape(line)}", soft_wrap=True)


def _formats(text: str | None) -> tuple[Format, ...]:
    from autotune.export.tables import FORMATS

    chosen = tuple(kind for kind in FORMATS if text in (None, kind))
    if not chosen:
        raise InvalidInput(f"format is {text!r}{did_you_mean(str(text), FORMATS)}")
    return chosen


def _show_files(files: Sequence[Path], *, quiet: bool, as_json: bool) -> None:
    if as_json:
        console.print_json({"files": [str(file) for file in files]})
    elif not quiet:
        for file in files:
            console.out.print(escape(str(file)))


def _say(text: str) -> None:
    console.err.print(f"[dim]{escape(text)}[/]")


def _override(spec: StudySpec, origin: str, options: dict[str, Any]) -> StudySpec:
    from autotune.spec import parse_spec

    given = {key: value for key, value in options.items() if value is not None}
    return parse_spec({**spec.model_dump(), **given}, f"{origin} with the command's options")


def _summary(results: StudyResults, path: Path) -> dict[str, Any]:
    return {
        "name": results.name,
        "origin": str(results.origin),
        "pick": results.pick.model_dump(),
        "exported": results.exported.model_dump(),
        "exported_role": results.exported_role,
        "comparisons": [comparison.model_dump(exclude={"regimes"}) for comparison in results.comparisons],
        "prediction": None if results.prediction is None else results.prediction.model_dump(),
        "robustness": [point.model_dump() for point in results.robustness],
        "warnings": results.warnings,
        "report": str(path / "report.html"),
        "export": str(path / "export"),
    }


def _show(results: StudyResults, path: Path) -> None:
    from autotune import choose
    from autotune.by_load import by_load
    from autotune.counts import measured_settings
    from autotune.export import serve_lines

    tag = " (simulated)" if results.origin == "simulated" else " (measured)"
    say = console.out.print
    say(f"\n[bold]Pick{tag}:[/] {escape(_describe(results.pick.to_params()))}")
    say(f"[dim]{escape(results.choice)}[/]")
    say(f"[dim]settings: {measured_settings(results)}[/]\n")
    confidence = f"{100 * results.comparisons[0].confidence:g}%"
    console.table(
        f"Improvement in % on held-out traces{tag}, {confidence} intervals",
        ["", *(console.short(objective.label) for objective in results.objectives), "faster end to end", "verdict"],
        [
            (
                f"{c.candidate} against {c.reference}",
                *(console.effect(c.overall.get(objective.metric)) for objective in results.objectives),
                f"{c.share_faster:.0%}",
                c.word(results.simulator_error_pct),
            )
            for c in results.comparisons
        ],
    )
    if (where := by_load(results)) is not None:
        say(f"by load: {escape(where)}")
    for comparison in results.comparisons[:2]:
        say(escape(comparison.sentence))
    if results.exported_role == results.comparisons[0].candidate:  # what nobody will use costs nobody anything
        for cost in results.comparisons[0].costs:
            say(f"[yellow]cost:[/] {escape(cost)}")
        if results.comparisons[0].costs:
            say(
                "[dim]to rule costs out: `protect: all` for load regimes, a metric among `objectives` with `prefer: balanced` "
                "for metrics[/]"
            )
    for noise in results.noise:
        say(
            f"noise: {choose.noise_words(noise)}"
            + (f" (widened by {noise.further} further measurements of what did the same)" if noise.further else "")
        )
    if results.prediction is not None:
        say(f"simulator beside it: {escape(results.prediction.sentence)}")
    for line in _robustness(results):
        say(line)
    if results.cold is not None:
        say(f"cold check: {escape(results.cold.reason)}")
    for warning in results.warnings:
        say(f"[yellow]note:[/] {escape(warning)}")
    for knob, reason in results.not_identified.items():
        say(f"[yellow]not identified:[/] {escape(f'{knob}: {reason}')}")
    say(f"\nexported  {escape(f'{results.exported_role}, {results.exported.label}')}")
    say(f"report    {escape(str(path / 'report.html'))}")
    say(f"export    {escape(str(path / 'export'))}")
    for head, line in zip_longest(["serve"], serve_lines(results, path / "export/vllm.yaml"), fillvalue=""):
        say(f"{head:<9} {escape(line)}", soft_wrap=True)


def _robustness(results: StudyResults) -> list[str]:
    """At other rates, on the preferred metric; nothing where the pick is not what is exported."""
    if results.exported_role != results.comparisons[0].candidate or not results.robustness:
        return []
    from autotune import metrics

    metric = results.comparisons[0].preferred_metric
    parts = [
        f"{point.overall[metric]:+.1f} % at {point.rate_factor:g}x{' (saturated)' if point.saturated else ''}"
        for point in results.robustness
        if metric in point.overall
    ]
    return [f"pick at other rates (simulated, {metrics.metric(metric).label}): {', '.join(parts)}"] if parts else []


def _describe(params: PolicyParams) -> str:
    if params.is_static:
        return f"static budget {params.b_max} (P-PAS off), max_num_seqs {params.max_num_seqs}"
    return ", ".join(f"{name} {value}" for name, value in params.to_dict().items() if value not in (None, False))
