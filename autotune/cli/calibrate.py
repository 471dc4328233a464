"""`ppas calibrate`: a simulator profile of the server that a study file names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from autotune.cli import console, profile_file
from autotune.durations import parse_duration_s
from autotune.progress import Progress, Silent

if TYPE_CHECKING:
    from ppas_core.sim.profile import Profile

_SHOWN: Final = {"mean_latency_s": "mean latency", "mean_ttft_s": "mean TTFT", "makespan_s": "makespan"}

_AGAINST_ITSELF: Final = (
    "this study runs on the simulator, which is so calibrated against itself: its own profile comes out again, and errors "
    "of 0 mean nothing. For your server the study needs `backend: vllm` and a `server:` block"
)


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(calibrate)


@console.reports_errors
def calibrate(
    study: Annotated[
        Path,
        typer.Argument(metavar="STUDY.yaml", help="The study whose server and workload are meant.", show_default=False),
    ],
    output: profile_file.Output,
    target: Annotated[str, typer.Option(help="Time of load to aim at; a server's start comes on top.")] = "90s",
    name: profile_file.Name = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="What the server computes on; default: asked of this machine.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the server's logs go; default runs/NAME-calibration/N.", show_default=False),
    ] = None,
    quiet: profile_file.Quiet = False,
    json_output: profile_file.Json = False,
) -> None:
    """Measure how long this server's steps take, and write a profile for `ppas simulate` and `ppas tune`.

    Starts the study's server, replays static budgets on it for a minute or two, fits the step time to its step log, and
    checks the profile on the study's reference setting, which is not fitted. Of a study on the simulator
    the profile plays the server: that tries the calibration out, and tells nothing of a machine.

    Example: ppas calibrate examples/live-cpu.yaml -o mine.json, then ppas tune STUDY.yaml --profile mine.json
    """
    profile_file.check(output)
    target_s = parse_duration_s(target)
    from autotune.spec import load_spec

    spec = load_spec(study)
    from autotune.calibration.calibrate import calibrate_plan  # loads numba, after the study file was checked
    from autotune.live import LiveEvaluator
    from autotune.plan import make_plan

    plan = make_plan(spec, study.parent)
    if isinstance(plan.evaluator, LiveEvaluator) and not quiet:
        plan.evaluator.say = lambda text: console.err.print(f"[dim]{escape(text)}[/]")
    if plan.evaluator.origin == "simulated":
        console.err.print(f"[yellow]note:[/] {_AGAINST_ITSELF}")
    progress: Progress = Silent() if quiet else console.Bar()
    with plan.evaluator.session(folder or _fresh_folder(Path("runs") / f"{spec.name}-calibration")):
        profile = calibrate_plan(plan, name=name or output.stem, device=gpu, target_s=target_s, progress=progress)
    profile_file.write(profile, output, _show, quiet=quiet, as_json=json_output)


def _fresh_folder(parent: Path) -> Path:
    """A folder that no earlier calibration used: its server may have been another one."""
    number = 1
    while (path := parent / str(number)).exists():
        number += 1
    return path


def _show(profile: Profile) -> None:
    say, fit = console.out.print, profile.fit
    tag = profile.provenance["origin"]
    console.table(
        f"{profile.model} on {profile.gpu}, vLLM {profile.vllm_version} ({tag}): step time in seconds",
        ["coefficient", "value", "from", "to", "share of time", "verdict"],
        [
            (
                entry["name"], f"{entry['value']:.4g}", f"{entry['low']:.4g}", f"{entry['high']:.4g}",
                f"{100 * entry['time_share']:.1f} %", entry["status"],
            )
            for entry in fit["coefficients"].values()
        ],
    )  # fmt: skip
    delay = fit["frontend_delay"]
    say(f"front-end delay {1000 * profile.frontend_delay_s:.2f} ms ({escape(delay.get('reason') or delay['how'])})")
    say(
        f"{profile.num_kv_blocks} KV blocks of {profile.block_size} tokens, at most {profile.max_model_len} tokens a "
        f"request, {'plans a step ahead' if profile.pipeline_depth == 2 else 'plans step by step'} (said by the server)"
    )
    for coefficient, reason in fit["not_identified"].items():
        say(f"[yellow]not identified:[/] {escape(f'{coefficient}: {reason}')}")
    ramp = fit["ramp"]
    say(f"ramp of small chunks: {'kept' if ramp['kept'] else 'not kept'}, {escape(ramp['reason'])}\n")
    console.table(
        "Error of a step's time in %, fitted steps and blocks held out of the fit",
        ["steps", "fitted", "mean error", "held out", "mean error"],
        [
            (regime, *_error(fit["residuals"].get(regime)), *_error(fit["held_out"].get(regime)))
            for regime in fit["residuals"]
        ],
    )
    rows = [("fitted", one) for one in fit["replays"]] + [("check", one) for one in fit.get("held_out_replays", ())]
    console.table(
        "Predicted against measured: the replays simulated on this profile",
        ["replay", "setting", "use", *(f"{label}, error in %" for label in _SHOWN.values())],
        [
            (one["trace"].removeprefix("calibration "), one["setting"], use, *(_cell(one, metric) for metric in _SHOWN))
            for use, one in rows
        ],
    )
    for trace, reason in profile.provenance["calibration"]["failed_replays"].items():
        say(f"[yellow]not measured:[/] {escape(f'{trace}: {reason}')}")
    took = profile.provenance["calibration"]["took_s"]
    say(
        f"\ntook      {took:.0f} s; noise of a step {100 * fit['noise_sigma']:.1f} %, {100 * fit['outlier_share']:.1f} % outliers"
    )


def _error(found: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("–", "–") if found is None else (str(found["steps"]), f"{100 * found['mean_absolute']:.1f}")


def _cell(one: Mapping[str, Any], metric: str) -> str:
    found = one.get(metric)
    if found is None:
        return "–"
    return f"{found['predicted']:.3g} s / {found['measured']:.3g} s ({100 * found['error']:+.1f})"
