"""The command line. Only this package prints and exits; each command resolves its input, calls the library, shows."""

from __future__ import annotations

from typing import Annotated

import typer

from autotune.cli import (
    calibrate,
    evaluate,
    fit,
    init,
    replay,
    serving,
    settings,
    status,
    study,
    trace,
    trace_import,
    trace_record,
    trace_show,
    verify,
    worker,
)
from ppas_core import __version__

app = typer.Typer(
    name="ppas",
    help="Auto-tuner for the P-PAS and P-PAS+ adaptive schedulers of vLLM.\n\n"
    "Start with: ppas tune examples/demo.yaml\n\n"
    "Exit codes: 0 ok, 1 no usable result, 2 bad input, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ppas-autotune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


init.add_to(app)
study.add_to(app)
worker.add_to(app)
status.add_to(app)
settings.add_to(app)
calibrate.add_to(app)
fit.add_to(app)
evaluate.add_to(app)
verify.add_to(app)
replay.add_to(app)
serving.add_to(app)
trace_import.add_to(trace.app)
trace_record.add_to(trace.app)
trace_show.add_to(trace.app)
app.add_typer(trace.app, name="trace")
