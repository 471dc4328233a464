"""`ppas serve`, `ppas doctor` and `ppas patch`: the tuned setting in a vLLM that people run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import console
from ppas_core.vllm import patching

Folder = Annotated[
    Path | None,
    typer.Option("--vllm", help="Package folder of vLLM, where it is not this environment's.", show_default=False),
]

patch = typer.Typer(
    help="P-PAS for images that cannot load plugins: a patch of vLLM 0.22.1 or 0.27.1 that reads the same variables "
    "and settings file.",
    no_args_is_help=True,
)


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
    app.command()(doctor)
    app.add_typer(patch, name="patch")


@console.reports_errors
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model name or folder, before all flags.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="`vllm.yaml` of an export.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
) -> None:
    """Start vLLM with an exported setting; every other flag is passed on to `vllm serve`.

    Prints the exact command, forwards signals, leaves no process behind. Example: ppas serve MODEL --config
    runs/demo/export/vllm.yaml --port 8000
    """
    from autotune import serve as launcher

    code = launcher.run_serve(
        model, config, context.args, dry_run=dry_run, show=lambda command: print(command, flush=True)
    )
    raise typer.Exit(code)


@console.reports_errors
def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Print what is installed, whether P-PAS can act in it, how it is switched on, and what to do.

    Exit code 1 when something keeps P-PAS from acting here.
    """
    from autotune import doctor as doctor_report

    if json_output:
        findings = doctor_report.examine(os.environ)
        console.print_json([asdict(finding) for finding in findings])
        raise typer.Exit(int(any(finding.ok is False for finding in findings)))
    raise typer.Exit(doctor_report.run_doctor(lambda line: print(line, flush=True)))


@patch.command("check")
@console.reports_errors
def patch_check(vllm: Folder = None) -> None:
    """Say whether vLLM's scheduler file is stock, patched or unknown; exit code 1 when unknown."""
    _report(patching.check, vllm)


@patch.command("apply")
@console.reports_errors
def patch_apply(vllm: Folder = None) -> None:
    """Patch a stock scheduler file, keeping a backup beside it."""
    _report(patching.apply, vllm)


@patch.command("revert")
@console.reports_errors
def patch_revert(vllm: Folder = None) -> None:
    """Put the stock scheduler file back."""
    _report(patching.revert, vllm)


def _report(act: Callable[[Path | None], patching.PatchReport], vllm: Path | None) -> None:
    report = act(vllm)
    version = f" (vLLM {report.version})" if report.version else ""
    print(f"{report.state}{version}{', changed just now' if report.changed else ''}: {report.file}")
    if report.state is patching.PatchState.UNKNOWN:
        raise typer.Exit(console.NO_RESULT)
