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
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", help="Ask for a signature by this public key too: a file, PEM or OpenSSH.", show_default=False
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code tells.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Compute the digests again, from the traces to the export, and say what differs; exit code 1 where something does.

    Digests tell what was changed by accident or by hand; who can write the folder can write them anew. With --key each
    export must be signed by that key (`ppas export RUN --sign`), as it is and for this run.
    """
    from autotune.verify import verify as compute

    public = None
    if key is not None:
        from autotune.signing.keys import load_public_key

        public = load_public_key(key)
    found = compute(path, public)
    if json_output:
        console.print_json(found.to_dict())
    elif not quiet:
        for finding in found.findings:
            console.out.print(f"[yellow]{finding.what}:[/] {escape(f'{finding.path}: {finding.reason}')}")
        for one in found.signed:
            console.out.print(
                escape(f"{one.export}/: {one.label} of {one.study}, signed by {one.key} at {one.signed_at}")
            )
        verdict = f"{len(found.findings)} differ" if found.findings else "all as recorded"
        console.out.print(escape(f"{path}: {found.checked} digests computed again, {verdict}"))
    if found.findings:
        raise typer.Exit(console.NO_RESULT)
