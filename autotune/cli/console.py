"""How the command line speaks: errors with exit codes, progress with an ETA, tables or JSON."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Column, Table
from rich.text import Text

from autotune import interrupt, streams
from autotune.progress import Pace
from ppas_core.errors import InvalidInput, PpasError
from ppas_core.plain_json import dump_json

if TYPE_CHECKING:
    from autotune.results import Effect

OK, NO_RESULT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_PIPE_WIDTH = 160
"""Columns of a table that goes into a pipe or a file; a terminal has its own."""


class _Console(Console):
    """Writes no control character of a text that comes from a file, and outlives its reader."""

    def render_str(self, text: str, **options: Any) -> Text:
        """As inherited, with what would not print shown as an escape."""
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        """Progress that nobody reads is dropped and the work goes on; a result that nobody reads ends the command."""
        if not self.stderr:
            raise
        self.quiet = True
        streams.discard(sys.stderr)


def visible(text: str) -> str:
    """`text` with every character that would not print, or would act on a terminal, as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


out = _Console(highlight=False, soft_wrap=True, emoji=False)
if not out.is_terminal:
    out.width = _PIPE_WIDTH
err = _Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

P = ParamSpec("P")
R = TypeVar("R")

_KEPT = "give the same command again: a study keeps every finished trial"
_OF_THE_USER: Final = {
    errno.EACCES: "check its permissions, or name another place",
    errno.EPERM: "check its permissions, or name another place",
    errno.EROFS: "name a place that can be written to",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "a part of the name is no folder; name another place",
    errno.EEXIST: "name another place",
    errno.ENOTEMPTY: "name another place",
    errno.ENOENT: "check the name",
    errno.ELOOP: "the links lead nowhere; name another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EINVAL: "check the name",
}
"""Errors of the system that come from what the user named, with the remedy. All others are of a run that failed."""


_TOLD: Final = (PpasError, OSError, MemoryError, UnicodeEncodeError, typer.Exit)
"""What a command may end with besides success; any other error is a defect, or an interrupt in disguise."""


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turns errors into one message on stderr and an exit code: 2 for what the user gave, 1 for a run that failed."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with interrupt.remembered(), interrupt.recognised(_TOLD):
                return command(*args, **kwargs)
        except PpasError as error:
            raise _failed(str(error), BAD_INPUT if isinstance(error, InvalidInput) else NO_RESULT) from None
        except KeyboardInterrupt:
            try:
                err.print("Interrupted. What was finished is kept; the same command goes on from there.")
            except OSError:  # the terminal is gone, which was the interrupt
                streams.discard(sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            if isinstance(error, BrokenPipeError) and streams.reader_left(sys.stdout):
                streams.discard(sys.stdout)  # as in `| head`
                raise typer.Exit(OK) from None
            raise _failed(*_of_the_system(error)) from None
        except UnicodeEncodeError as error:
            found = error.object[error.start : error.end]
            what = f"{found!r} cannot be written as {error.encoding}; remove it from the names and files of the study"
            raise _failed(what, BAD_INPUT) from None
        except MemoryError:
            raise _failed(f"out of memory; use shorter or fewer traces, or free some and {_KEPT}", NO_RESULT) from None

    return run


def _failed(message: str, code: int) -> typer.Exit:
    err.print(f"[bold red]error:[/] {escape(message)}")
    return typer.Exit(code)


def _of_the_system(error: OSError) -> tuple[str, int]:
    """An error of the system in words, with the exit code."""
    reason = error.strerror or str(error) or type(error).__name__
    what = f"{error.filename}: {reason}" if error.filename else reason
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}; free some space and {_KEPT}", NO_RESULT
    if error.errno not in _OF_THE_USER:
        return f"{what}; {_KEPT}", NO_RESULT
    return (what if ";" in reason else f"{what}; {_OF_THE_USER[error.errno]}"), BAD_INPUT


def print_json(data: Any) -> None:
    """`data` as JSON on stdout, and nothing else."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    print(dump_json(data, indent=1, ensure_ascii=not encoding.lower().startswith("utf")))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; the first column is text, the others are numbers."""
    shown = Table(title=escape(title), title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        shown.add_column(escape(column), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    out.print(shown)


def effect(found: Effect | None) -> str:
    """An improvement with its interval, in per cent; a dash where the metric is undefined, words where it says nothing."""
    if found is None:
        return "–"
    if not found.is_measurable:
        from autotune.choose import NOT_MEASURABLE

        return NOT_MEASURABLE
    return f"{found.improvement_pct:+.1f} [{found.low_pct:+.1f}, {found.high_pct:+.1f}]"


def short(label: str) -> str:
    """A metric's label for the head of a column."""
    return label.replace("end-to-end ", "")


def duration(seconds: float | None) -> str:
    """A time span for people, such as `0.4 s`, `12 s`, `3 min 20 s` or `1 h 05 min`; a dash where it is not known."""
    if seconds is None:
        return "–"
    if 0 < seconds < 1:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class _TwoLines(RichProgress):
    """The bar, and below it the note of the newest task in the whole width: on one line they would crowd each other."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The two lines."""
        yield self.make_tasks_table(self.tasks)
        if self.tasks and (note := self.tasks[-1].fields["note"]):
            yield Text(visible(f"  {note}"), style="dim", no_wrap=True, overflow="ellipsis")


class Bar:
    """A progress bar on stderr with what is done, what is left and a note.

    Without a terminal a line where a stage begins and ends, with the time that it took, and one a minute in between.
    """

    _EVERY_S: Final = 60.0

    def __init__(self) -> None:
        self._live = err.is_terminal
        self._bar = _TwoLines(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("ETA {task.fields[eta]}", table_column=Column(no_wrap=True)),
            console=err,
            transient=False,
        )
        self._task: TaskID | None = None
        self._note = ""
        self._stage = ""
        self._pace = Pace(0)
        self._said_s = 0.0
        self._is_open = False

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Starts a line for `stage`; a stage without steps shows nothing."""
        self._stage, self._note, self._task = stage, "", None
        self._pace, self._said_s = Pace(total, done), 0.0
        self._is_open = total > 0
        if total == 0:
            return
        if self._live:
            self._bar.start()
            self._task = self._bar.add_task(stage, total=total, completed=done, note="", eta="–")
        else:
            already = f" ({done} done before)" if done else ""
            err.print(escape(f"{stage}{f': {total} steps{already}' if total > 1 else ''} …"))

    def advance(self, note: str = "") -> None:
        """One step further."""
        self._note = note or self._note
        self._pace.step()
        if self._task is not None:
            self._bar.update(self._task, advance=1, note=self._note, eta=duration(self._pace.eta_s))
        elif not self._live and self._pace.elapsed_s - self._said_s >= self._EVERY_S and self._pace.eta_s:
            self._said_s = self._pace.elapsed_s
            left = f"about {duration(self._pace.eta_s)} left"
            told = f"{self._pace.done} of {self._pace.total}, {left}{f', {self._note}' if self._note else ''}"
            err.print(escape(f"{self._stage}: {told}"))

    def end(self) -> None:
        """Ends the line."""
        if self._task is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar.remove_task(self._task)
            self._task = None
        elif self._is_open and not self._live:
            took_s = self._pace.elapsed_s
            if self._note or took_s >= 1:
                took = duration(took_s) if took_s >= 1 else "under 1 s"
                ended = f"done in {took}"
                if 0 < self._pace.done < self._pace.total:
                    ended = f"stopped at {self._pace.done} of {self._pace.total} after {took}"
                err.print(escape(f"{self._stage}: {ended}{f' ({self._note})' if self._note else ''}"))
        self._is_open = False
