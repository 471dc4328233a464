"""`ppas trace generate | validate`, and how every command writes a trace file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from autotune.cli import console
from ppas_core.errors import InvalidInput
from traces.format import Trace, read_trace, write_trace
from traces.generate import QWEN_PROMPT_TOKENS, heterogeneous, parse_phases, rag_bursts

app = typer.Typer(help="Traces: import, record, generate, look at, shape and check them.", no_args_is_help=True)

Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write; .gz compresses.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same file.")]
generate_app = typer.Typer(help="Generate one of the published workloads.", no_args_is_help=True)
app.add_typer(generate_app, name="generate")


@generate_app.command("rag-bursts")
@console.reports_errors
def generate_rag_bursts(
    output: Output,
    rate: Annotated[float, typer.Option(help="Burst rate λ in requests per second.")] = 1.0,
    seed: Seed = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 25_000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output length.")] = 32,
    force: Force = False,
) -> None:
    """The paper's RAG bursts: idle, burst, idle, burst, idle; ten seconds each."""
    write(rag_bursts(rate, seed, prompt_tokens=prompt_tokens, output_tokens=output_tokens), output, force=force)


@generate_app.command("heterogeneous")
@console.reports_errors
def generate_heterogeneous(
    output: Output,
    phases: Annotated[str, typer.Option(help="SECONDS:RATE,… of the load phases.")] = "20:0.05,20:0.4,20:0.05",
    seed: Seed = 0,
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="Prompt lengths; repeat for more.")] = None,
    output_tokens: Annotated[list[int] | None, typer.Option(help="Output lengths; repeat for more.")] = None,
    force: Force = False,
) -> None:
    """The published mixed shapes: every prompt and output length in equal shares."""
    trace = heterogeneous(
        parse_phases(phases),
        seed,
        prompt_tokens=prompt_tokens or QWEN_PROMPT_TOKENS,
        **({"output_tokens": output_tokens} if output_tokens else {}),
    )
    write(trace, output, force=force)


@app.command()
@console.reports_errors
def validate(
    files: Annotated[list[Path], typer.Argument(help="Trace files.", show_default=False)],
) -> None:
    """Check trace files; the first thing wrong with each is named. Exit code 2 when one is bad."""
    bad = 0
    for file in files:
        try:
            trace = read_trace(file)
        except InvalidInput as error:
            bad += 1
            console.err.print(f"[bold red]bad:[/] {escape(str(error))}")
        else:
            console.out.print(escape(f"ok: {file}: {len(trace.requests)} requests, {trace.digest}"))
    if bad:
        raise typer.Exit(console.BAD_INPUT)


def write(trace: Trace, output: Path, *, force: bool, quiet: bool = False) -> None:
    """Writes `trace` and says so on stdout, unless quiet.

    Raises InvalidInput when the file cannot be written, and, without force, when it is there already.
    """
    if output.is_file() and not force:
        raise InvalidInput(f"{output}: is there already; name another file, or overwrite it with --force")
    try:
        write_trace(trace, output)
    except OSError as error:
        raise InvalidInput(f"{output}: cannot be written: {error}") from None
    if not quiet:
        print(f"{output}: {len(trace.requests)} requests, {trace.digest}", file=sys.stdout)
