"""`ppas trace import | window | scale | split | resample | sessions`: foreign traces come in, and are shaped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from autotune.cli import console
from autotune.cli.trace import Force, Output, Seed, write
from ppas_core.errors import InvalidInput
from traces import session, shape
from traces.format import Trace, read_trace
from traces.importers import NAMES, TIME_UNITS, import_trace

File = Annotated[Path, typer.Argument(help="A trace file.", show_default=False)]
Name = Annotated[str | None, typer.Option(help="Name of the trace in tables; default: the source's.")]
Regime = Annotated[str | None, typer.Option(help="Load regime that the trace is a sample of; default: the source's.")]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command("import")(import_)
    for command in (window, scale, split, resample, sessions):
        app.command()(command)


@console.reports_errors
def import_(
    file: Annotated[Path, typer.Argument(help="A foreign trace or recorded run, plain or gzip.", show_default=False)],
    output: Output,
    format_name: Annotated[str | None, typer.Option("--format", help=f"{', '.join(NAMES)}. Default: detected.")] = None,
    time_unit: Annotated[str | None, typer.Option(help=f"{', '.join(TIME_UNITS)}. Default: the format's.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Prompt tokens per block id.")] = None,
    name: Name = None,
    regime: Regime = None,
    spread: Annotated[int | None, typer.Option(min=0, help="Seed: spread quantised arrivals in their tick.")] = None,
    unsorted: Annotated[bool, typer.Option("--unsorted", help="The rows are in no order of time; sort them.")] = False,
    benchmark: Annotated[int | None, typer.Option(min=1, help="Which benchmark of a guidellm report.")] = None,
    force: Force = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the account as JSON on stdout.")] = False,
) -> None:
    """Import a public trace format or a recorded run; every row is kept, dropped for a named reason, or refused.

    Example: ppas trace import conversation_trace.jsonl -o conversation.jsonl.gz
    """
    imported = import_trace(
        file,
        format_name=format_name,
        time_unit=time_unit,
        block_size=block_size,
        name=name,
        regime=regime,
        spread_seed=spread,
        any_order=unsorted,
        benchmark=benchmark,
    )
    if json_output:
        write(imported.trace, output, force=force, quiet=True)
        console.print_json({**imported.ledger.provenance(), "digest": imported.trace.digest, "output": str(output)})
        return
    for line in imported.ledger.lines():
        console.out.print(escape(line))
    write(imported.trace, output, force=force)


@console.reports_errors
def window(
    file: File,
    output: Output,
    from_s: Annotated[float, typer.Option("--from", min=0, help="First second that is kept.")] = 0.0,
    to_s: Annotated[float | None, typer.Option("--to", help="First second that is not; default: all.")] = None,
    name: Name = None,
    regime: Regime = None,
    force: Force = False,
) -> None:
    """Cut a window out of a trace; its beginning becomes second 0."""
    _write_named(shape.window(read_trace(file), from_s, to_s, name), regime, output, force)


@console.reports_errors
def scale(
    file: File,
    output: Output,
    time: Annotated[float | None, typer.Option(help="Factor on every arrival time; 0.5 is double speed.")] = None,
    rate: Annotated[float | None, typer.Option(help="Mean requests per second that the trace shall have.")] = None,
    name: Name = None,
    regime: Regime = None,
    force: Force = False,
) -> None:
    """Play a trace slower or faster; lengths stay as they are."""
    if (time is None) == (rate is None):
        raise InvalidInput("how to scale is not clear; give one of --time FACTOR and --rate REQUESTS_PER_SECOND")
    trace = read_trace(file)
    scaled = shape.scale_time(trace, time, name) if time is not None else shape.scale_rate(trace, rate or 0.0, name)
    _write_named(scaled, regime, output, force)


@console.reports_errors
def split(
    file: File,
    tuning: Annotated[Path, typer.Option(help="The file to write the tuning part to.", show_default=False)],
    held_out: Annotated[Path, typer.Option(help="The file to write the held-out part to.", show_default=False)],
    share: Annotated[float, typer.Option(help="The tuning part's share of the duration.")] = 0.5,
    gap: Annotated[float, typer.Option(min=0, help="Seconds after the cut that neither part has.")] = 0.0,
    force: Force = False,
) -> None:
    """Split a trace into a part to tune on and a part to judge on, which do not overlap."""
    if tuning.resolve() == held_out.resolve():
        raise InvalidInput(f"--tuning and --held-out are both {tuning}; give two files")
    for part, output in zip(shape.split(read_trace(file), share, gap), (tuning, held_out), strict=True):
        write(part, output, force=force)


@console.reports_errors
def resample(
    file: File,
    output: Output,
    window_s: Annotated[float, typer.Option("--window", help="Seconds of each stretch that is drawn.")] = 60.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of the result; default: the source's.")] = None,
    seed: Seed = 0,
    name: Name = None,
    regime: Regime = None,
    force: Force = False,
) -> None:
    """Draw another sample of the same traffic: stretches of it with their bursts, in a new order."""
    drawn = shape.resample(read_trace(file), seed, window_s, duration)
    _write_named(replace(drawn, name=name or drawn.name), regime, output, force)


@console.reports_errors
def sessions(
    file: File,
    output: Output,
    think: Annotated[
        float | None, typer.Option(min=0, help="Seconds before every later turn; default: the recorded gaps.")
    ] = None,
    first_token: Annotated[
        float, typer.Option(min=0, help="Seconds to a first token in the recording; taken off its gaps.")
    ] = 0.0,
    per_token: Annotated[
        float, typer.Option(min=0, help="Seconds per output token in the recording; taken off its gaps.")
    ] = 0.0,
    open_loop: Annotated[
        bool, typer.Option("--open-loop", help="The way back: every turn at its recorded arrival.")
    ] = False,
    name: Name = None,
    regime: Regime = None,
    force: Force = False,
) -> None:
    """Let each later turn of a session wait: it is sent a think time after the answer to the turn before.

    Example: ppas trace sessions chats.jsonl -o waiting.jsonl --first-token 0.5 --per-token 0.02
    """
    trace = read_trace(file)
    if open_loop:
        if think is not None or first_token or per_token:
            raise InvalidInput("--open-loop takes every turn at its recorded arrival; leave out the think times")
        _write_named(session.to_open_loop(trace, name), regime, output, force)
        return
    thinking = session.Thinking(think_s=think, first_token_s=first_token, token_s=per_token)
    _write_named(session.to_sessions(trace, thinking, name), regime, output, force)


def _write_named(trace: Trace, regime: str | None, output: Path, force: bool) -> None:
    write(trace if regime is None else replace(trace, regime=regime), output, force=force)
