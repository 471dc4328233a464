"""`ppas verify`: whether a run folder or an export is still what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from autotune.cli import console


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(verify)


@console.reports_errors
def verify(
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder, or an export.", show_default=False)],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code tells.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Compute the digests again, from the traces to the export, and say what differs; exit code 1 where something does.

    Digests tell what was changed by accident or by hand. They are no signature: who can write the folder can write them.
    """
    from autotune.verify import verify as compute

    found = compute(path)
    if json_output:
        console.print_json(found.to_dict())
    elif not quiet:
        for finding in found.findings:
            console.out.print(f"[yellow]{finding.what}:[/] {escape(f'{finding.path}: {finding.reason}')}")
        verdict = f"{len(found.findings)} differ" if found.findings else "all as recorded"
        console.out.print(escape(f"{path}: {found.checked} digests computed again, {verdict}"))
    if found.findings:
        raise typer.Exit(console.NO_RESULT)
