"""What the commands that write a simulator profile have in common: their options, and the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from autotune.cli import console
from ppas_core.errors import InvalidInput

if TYPE_CHECKING:
    from ppas_core.sim.profile import Profile

Output = Annotated[Path, typer.Option("--output", "-o", help="The profile to write, a JSON file.", show_default=False)]
Name = Annotated[str | None, typer.Option(help="Name of the profile; default: the file's.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")]
Json = Annotated[bool, typer.Option("--json", help="Print the profile as JSON on stdout, for pipes.")]


def check(output: Path) -> None:
    """Raises InvalidInput where `output` could not be given to `--profile` later."""
    if output.suffix != ".json":
        raise InvalidInput(f"{output}: a profile is a .json file, by which `--profile` knows it; name one")


def write(profile: Profile, output: Path, show: Callable[[Profile], None], *, quiet: bool, as_json: bool) -> None:
    """Writes the profile and says so: as JSON, or by `show` and the file's name."""
    profile.save(output)
    if as_json:
        console.print_json(profile.to_dict())
    elif not quiet:
        show(profile)
        console.out.print(f"profile   {escape(str(output))}")
