"""`ppas fit`: a simulator profile from runs that were measured already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from autotune.cli import console, profile_file
from autotune.durations import parse_duration_s
from autotune.progress import Progress, Silent
from ppas_core.errors import InvalidInput

if TYPE_CHECKING:
    from ppas_core.sim.profile import Profile

_SHOWN: Final = {"avg_latency": "mean latency", "avg_ttft": "mean TTFT", "p95_latency": "P95 latency"}


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(fit)


@console.reports_errors
def fit(
    log: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG…",
            help="Published sweep logs, tables of runs (.csv), or run folders, all of one server.",
            show_default=False,
        ),
    ],
    output: profile_file.Output,
    name: profile_file.Name = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", help="What a run's name means, NAME=SETTING; repeat for more.", show_default=False),
    ] = None,
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=2, help="KV blocks that the server reported; default: found as far as the runs tell."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a KV block.", show_default=False)] = None,
    gpu: Annotated[str | None, typer.Option(help="What the server computed on; default: as the log says.")] = None,
    time_limit: Annotated[str, typer.Option(help="After it the best fit so far is taken.")] = "4m",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the starting points.")] = 0,
    quiet: profile_file.Quiet = False,
    json_output: profile_file.Json = False,
) -> None:
    """Fit a simulator profile to runs that were measured already, where no step log is at hand.

    Only runs with a static budget are fitted; adaptive ones are held out, and the error on them is the profile's. What
    such runs do not tell, one prompt length above all, is said. A server at hand is better calibrated: ppas calibrate.

    Example: ppas fit RTX5090_qwen_3b.txt -o mine.json
    """
    profile_file.check(output)
    limit_s = parse_duration_s(time_limit)
    from autotune.calibration.fit_runs import Server, fit_runs, with_held_out  # numba and scipy load here
    from autotune.calibration.runs_simulated import simulatable
    from autotune.runlogs.configs import parse_mapping
    from autotune.runlogs.read import read_runs

    found = read_runs(log)
    served = sorted({run.served for run in found.runs})
    if len(served) > 1:
        raise InvalidInput(f"the runs are of {len(served)} servers ({'; '.join(served[:3])}); fit one at a time")
    runs, left_out = simulatable(found.runs, parse_mapping(setting or ()))
    for note in left_out:
        console.err.print(f"[yellow]left out:[/] {escape(note)}")
    first = found.runs[0]
    progress: Progress = Silent() if quiet else console.Bar()
    profile = fit_runs(
        [run for run in runs if run.params.is_static],
        name=name or output.stem,
        server=Server(first.model, gpu or first.gpu, first.vllm, num_kv_blocks=kv_blocks, block_size=block_size),
        seed=seed,
        time_limit_s=limit_s,
        progress=progress,
    )
    if held_out := [run for run in runs if not run.params.is_static]:
        profile = with_held_out(profile, held_out)
    profile_file.write(profile, output, _show, quiet=quiet, as_json=json_output)


def _show(profile: Profile) -> None:
    say, notes = console.out.print, profile.fit
    about = ", ".join(part for part in (profile.gpu, f"vLLM {profile.vllm_version}") if part)
    console.table(
        f"{profile.model} on {about}: step time in seconds",
        ["coefficient", "value", "what the runs tell of it"],
        [
            (key, f"{value:.4g}", escape(notes["identified"]["in_words"].get(key, "–").partition(": ")[2] or "–"))
            for key, value in {**profile.cost.to_dict(), "frontend_delay_s": profile.frontend_delay_s}.items()
        ],
    )
    fitted = notes["fitted_error_per_run"]
    held = notes.get("held_out_ppas_error_per_regime", {}).get("mean_absolute", {})
    rows = [
        (label, *(_percent(side.get(key, side.get(other))) for side in (fitted, held)))
        for (key, label), other in zip(_SHOWN.items(), ("mean_latency_s", "mean_ttft_s", "p95_latency_s"), strict=True)
    ]
    console.table(
        "Error in % (mean absolute): fitted per run, held-out adaptive runs per regime",
        ["", "fitted", "held out"],
        rows,
    )
    for reason in notes["identified"]["because_of_the_runs"]:
        say(f"[yellow]note:[/] {escape(reason)}")
    for fact, reason in notes["assumed"].items():
        if isinstance(reason, str):
            say(f"[yellow]assumed:[/] {escape(f'{fact}: {reason}')}")
    if notes["stopped_early"]:
        say("[yellow]note:[/] the time limit ended the fit; a larger --time-limit may find a better one")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
