"""How the command line speaks: errors with exit codes, progress with an ETA, tables or JSON."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from autotune import interrupt
from autotune.results import Effect
from ppas_core.errors import InvalidInput, PpasError

OK, NO_RESULT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_PIPE_WIDTH = 160
"""Columns of a table that goes into a pipe or a file; a terminal has its own."""

out = Console(highlight=False, soft_wrap=True)
if not out.is_terminal:
    out.width = _PIPE_WIDTH
err = Console(stderr=True, highlight=False, soft_wrap=True)

P = ParamSpec("P")
R = TypeVar("R")


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turns our own errors into one message on stderr and an exit code: 2 for bad input, 1 for no usable result."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with interrupt.remembered():
                return command(*args, **kwargs)
        except PpasError as error:
            err.print(f"[bold red]error:[/] {escape(str(error))}")
            raise typer.Exit(BAD_INPUT if isinstance(error, InvalidInput) else NO_RESULT) from None
        except KeyboardInterrupt:
            err.print("Interrupted. Every finished trial is kept; the same command goes on from there.")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output went away, as in `| head`
            sys.stderr.close()
            raise typer.Exit(OK) from None

    return run


def print_json(data: Any) -> None:
    """`data` as JSON on stdout, and nothing else."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; the first column is text, the others are numbers."""
    shown = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    out.print(shown)


def effect(found: Effect | None) -> str:
    """An improvement with its interval, in per cent; a dash where the metric is undefined."""
    if found is None:
        return "–"
    return f"{found.improvement_pct:+.1f} [{found.low_pct:+.1f}, {found.high_pct:+.1f}]"


def short(label: str) -> str:
    """A metric's label for the head of a column."""
    return label.replace("end-to-end ", "")


class Bar:
    """A progress bar on stderr with what is done, what is left and a note; one line per stage without a terminal."""

    def __init__(self) -> None:
        self._live = err.is_terminal
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=err,
            transient=False,
        )
        self._task: TaskID | None = None
        self._note = ""
        self._stage = ""

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Starts a line for `stage`; a stage without steps shows nothing."""
        self._stage, self._note, self._task = stage, "", None
        if total == 0:
            return
        if self._live:
            self._bar.start()
            self._task = self._bar.add_task(stage, total=total, completed=done, note="")
        else:
            already = f" ({done} done before)" if done else ""
            err.print(escape(f"{stage}: {total} steps{already} …"))

    def advance(self, note: str = "") -> None:
        """One step further."""
        self._note = note or self._note
        if self._task is not None:
            self._bar.update(self._task, advance=1, note=escape(self._note))

    def end(self) -> None:
        """Ends the line."""
        if self._task is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar.remove_task(self._task)
            self._task = None
        elif self._note and not self._live:
            err.print(escape(f"{self._stage}: done ({self._note})"))
