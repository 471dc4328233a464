"""`ppas status` and `ppas top`: where a run stands, once or live, from its folder alone."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotune.cli import console
from ppas_core.errors import InvalidInput

if TYPE_CHECKING:
    from autotune.status import RunStatus, TrialLine

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo.", show_default=False)
]

_COLOURS: Final = {"running": "green", "starting": "green", "finished": "blue", "interrupted": "yellow"}
_REASONS_SHOWN: Final = 5
_SPARKS: Final = "▁▂▃▄▅▆▇█"


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command()(status)
    app.command()(top)


@console.reports_errors
def status(
    run: RunArgument,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the state alone, one word.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Say where a run stands: stage, trials, best so far, failures, ETA; running, stopped, killed or finished.

    Reads the run folder alone and changes nothing in it. Example: ppas status runs/demo
    """
    from autotune.status import Watch

    found = Watch(run).status()
    if json_output:
        console.print_json(found.to_dict())
    elif quiet:
        console.out.print(found.state)
    else:
        for name, value in _lines(found):
            console.out.print(f"{name:<9} {value}")


@console.reports_errors
def top(
    run: RunArgument,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=60.0)] = 1.0,
) -> None:
    """Watch a run live; q or Ctrl-C ends the watching, never the run.

    Works on a running, stopped or finished run. Without a terminal use `ppas status`.
    """
    if not console.out.is_terminal:
        raise InvalidInput("ppas top needs a terminal; in a pipe or a file use `ppas status RUN`, or its --json")
    from autotune.status import Watch

    watch = Watch(run)
    try:
        with _keys() as pressed, Live(console=console.out, screen=True, auto_refresh=False) as live:
            while True:
                found = watch.status()
                live.update(_screen(found), refresh=True)
                if pressed(every):
                    break
    except KeyboardInterrupt:
        raise typer.Exit(console.INTERRUPTED) from None
    for name, value in _lines(found):  # the last look stays on the terminal
        console.out.print(f"{name:<9} {value}")


def _lines(found: RunStatus) -> list[tuple[str, str]]:
    """The status as named lines in rich's markup."""
    colour = _COLOURS.get(found.state, "red")
    state = f"[bold {colour}]{found.state}[/]" + (f", {escape(found.message)}" if found.message else "")
    lines = [("study", f"[bold]{escape(found.name)}[/] ({found.backend}), {escape(found.path)}"), ("state", state)]
    if found.stage:
        lines.append(("stage", escape(f"{found.stage} {_count(found.stage_done, found.stage_total)}")))
    lines.append(("trials", _count(found.trials_done, found.trials_total)))
    if found.best is not None and found.outcome is None:
        gains = "the reference itself" if found.best_is_reference else _gains(found.best)
        lines.append(("best", escape(f"{found.best.label} {gains} ({found.best.folder})")))
    lines.append(("verdict", escape(found.verdict)))
    if found.outcome is not None:
        if found.outcome.by_load is not None:
            lines.append(("by load", escape(found.outcome.by_load)))
        lines.append(("pick", escape(found.outcome.pick)))
        lines += [("cost", f"[yellow]{escape(cost)}[/]") for cost in found.outcome.costs]
        lines += [("noise", escape(noise)) for noise in found.outcome.noise]
        lines += [("note", f"[yellow]{escape(note)}[/]") for note in found.outcome.notes]
        lines.append(("exported", escape(f"{found.outcome.exported_role}, {found.outcome.exported}")))
        lines += zip_longest(["serve"], map(escape, found.outcome.serve), fillvalue="")
    if found.trials_stopped:
        lines.append(("stopped", f"{found.trials_stopped} trials early, clearly behind the best"))
    for reason, number in list(found.failures.items())[:_REASONS_SHOWN]:
        lines.append(("failed", f"[yellow]{number} ×[/] {escape(reason)}"))
    if not found.is_over:
        lines.append(("ETA", _eta(found)))
    elif found.state != "finished":
        kept = "every finished trial is kept" if found.trials_done else "no trial is finished yet"
        lines.append(("next", f"give the same `ppas tune` command again: {kept}"))
    if found.updated_s_ago is not None:
        lines.append(("updated", f"{console.duration(found.updated_s_ago)} ago"))
    return lines


def _eta(found: RunStatus) -> str:
    """When the run will be over, and when its stage."""
    parts = [
        f"about {console.duration(seconds)} to the end of {what}"
        for seconds, what in ((found.eta_s, "the run"), (found.stage_eta_s, "this stage"))
        if seconds is not None
    ]
    if found.eta_s is None:
        parts.append("of the run not known yet")
    return ", ".join(parts)


def _screen(found: RunStatus) -> RenderableType:
    """What `ppas top` shows, as many trials as the terminal has room for."""
    head = Table.grid(padding=(0, 1))
    lines = [line for line in _lines(found) if line[0] != "updated"]
    for name, value in lines:
        head.add_row(Text(name, style="dim"), Text.from_markup(value))
    parts: list[RenderableType] = [head]
    if found.stage_total:
        parts.append(ProgressBar(total=found.stage_total, completed=found.stage_done, width=60))
    if spark := _spark([line.gain_pct for line in found.trials]):
        parts.append(Text.assemble(("best so far  ", "dim"), spark))
    taken = sum(len(console.out.render_lines(part)) for part in parts)
    rows = max(0, console.out.height - taken - 2)  # its head, and the last line
    if found.trials and rows:
        parts.append(_trials(found.trials[-rows:]))
    parts.append(Text("q to leave", style="dim"))
    return Group(*parts)


def _trials(lines: list[TrialLine]) -> Table:
    """The latest trials, newest first."""
    shown = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("trial", "setting", "gain %", "took", ""):
        shown.add_column(column, justify="right" if column in ("gain %", "took") else "left", no_wrap=True)
    for line in reversed(lines):
        gain = "–" if line.gain_pct is None else f"{line.gain_pct:+.1f}"
        style = "yellow" if line.reason else ("green" if (line.gain_pct or 0) > 0 else "")
        shown.add_row(
            line.folder.rpartition("/")[2],
            escape(line.label),
            gain,
            "–" if line.duration_s is None else _took(line.duration_s),
            escape(line.reason or line.stopped or ""),
            style=style,
        )
    return shown


def _spark(gains: list[float | None], width: int = 60) -> str:
    """The best gain after each trial, as one line of bars from the first to the best; empty with fewer than two."""
    best: list[float] = []
    for gain in gains:
        if gain is not None:
            best.append(max(gain, best[-1]) if best else gain)
    if len(best) < 2:
        return ""
    step = max(1, len(best) // width)
    shown = [*best[::step], best[-1]]
    low, high = min(shown), max(shown)
    return "".join(_SPARKS[round((value - low) / ((high - low) or 1) * (len(_SPARKS) - 1))] for value in shown)


def _gains(line: TrialLine) -> str:
    each = ", ".join(f"{name} {gain:+.1f} %" for name, gain in line.objectives_pct.items())
    return f"{line.gain_pct:+.1f} % over the reference on tuning traces ({each})"


def _took(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else console.duration(seconds)


def _count(done: int, total: int | None) -> str:
    return f"{done} of {total}" if total else str(done)


class _Pressed:
    """Asks whether q was pressed, waiting at most so many seconds."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, seconds: float) -> bool:
        if self._descriptor is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return False
        keys = os.read(self._descriptor, 64)
        if not keys:  # the terminal hung up
            return True
        return b"q" in keys.lower() or keys == b"\x1b"


@contextlib.contextmanager
def _keys() -> Iterator[_Pressed]:
    """Keys of the terminal one by one and unseen within the context, as it was before afterwards."""
    if not sys.stdin.isatty():
        yield _Pressed(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before: list[Any] = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Pressed(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
