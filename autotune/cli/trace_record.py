"""`ppas trace record`: a proxy before a running server that writes a trace of what passes, without its words."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from autotune.cli import console
from autotune.cli.trace import Output
from autotune.durations import parse_duration_s
from ppas_core.errors import InvalidInput

if TYPE_CHECKING:
    from autotune.record.run import Status

_LINE_EVERY_S = 60.0


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(record)


@console.reports_errors
def record(
    output: Output,
    to: Annotated[
        str | None, typer.Option(help="Address of the running server, as in http://127.0.0.1:8000.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8001,
    host: Annotated[str, typer.Option(help="Address to listen on; another one lets other machines in.")] = "127.0.0.1",
    duration: Annotated[
        str | None, typer.Option("--for", help="Record this long, as 90s, 10m or 2h; default: until Ctrl-C.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Prompt tokens per block hash; the server's is best.")] = 16,
    tokenize: Annotated[
        bool,
        typer.Option("--tokenize", help="Ask the server's /tokenize for the exact ids of texts, after the answer."),
    ] = False,
    untouched: Annotated[
        bool, typer.Option("--untouched", help="Change no request; streams that tell no lengths are then left out.")
    ] = False,
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Also write prompts, to OUTPUT.text.jsonl.")] = False,
    salt_file: Annotated[
        Path | None, typer.Option(help="Keep the salt here, so that recordings can be joined; default: forgotten.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the trace in tables; default: the file's.")] = None,
    regime: Annotated[str, typer.Option(help="Load regime that the trace is a sample of.")] = "all",
    recover: Annotated[
        Path | None, typer.Option(help="Make the trace of a recording that was killed, from its .part file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUTPUT.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the account as JSON on stdout.")] = False,
) -> None:
    """Record the traffic of a running server as a trace: arrivals, lengths and salted hashes of prompts, never text.

    Clients speak to the proxy instead of the server; every path, header and piece of an answer passes at once.

    Example: ppas trace record --to http://127.0.0.1:8000 --port 8001 --for 10m -o traffic.jsonl
    """
    if recover is not None:
        _recover(recover, output, name, regime, force, json_output)
        return
    if to is None:
        raise InvalidInput("--to is missing; give the address of the server, such as http://127.0.0.1:8000")
    if importlib.util.find_spec("aiohttp") is None:
        raise InvalidInput("recording needs aiohttp: pip install 'ppas-autotune[live]'")
    from autotune.record import run

    plan = run.RecordPlan(
        upstream=to,
        output=output,
        host=host,
        port=port,
        for_s=None if duration is None else parse_duration_s(duration, "--for"),
        block_size=block_size,
        name=name,
        regime=regime,
        keep_text=keep_text,
        salt_file=salt_file,
        tokenize=tokenize,
        untouched=untouched,
    )
    watch = _Watch(to, quiet)
    try:
        account = run.record(plan, watch, overwrite=force)
    finally:
        watch.end()
    _show(account, output, json_output)


def _recover(journal: Path, output: Path, name: str | None, regime: str, force: bool, json_output: bool) -> None:
    from autotune.record import recovery

    if output.exists() and not force:
        raise InvalidInput(f"{output} exists; name another file, or overwrite it with --force")
    made = recovery.recover(journal, output, name=name, regime=regime)
    account = {**made.ledger.provenance(), "recording": made.trace.provenance["recording"], "digest": made.trace.digest}
    _show({**account, "duration_s": made.trace.duration_s}, output, json_output)


def _show(account: dict[str, Any], output: Path, json_output: bool) -> None:
    if json_output:
        console.print_json({**account, "output": str(output)})
        return
    dropped, facts = account["dropped"], account["recording"]
    reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items())
    console.out.print(
        escape(
            f"requests {account['rows_read']} = recorded {account['kept']} + left out {sum(dropped.values())}"
            + (f" ({reasons})" if reasons else "")
        )
    )
    known = "; ".join(f"{count} by {how}" for how, count in facts["prompts_known_by"].items())
    console.out.print(escape(f"shared prefixes: {known}"))
    if account["without_block_hashes"]:
        console.out.print(f"{account['without_block_hashes']} requests are kept without block hashes")
    if facts.get("late_share"):
        console.out.print(
            f"the proxy was over 5 ms late for {100 * facts['late_share']:.1f} % of the time, at most "
            f"{1000 * facts['latest_s']:.0f} ms; arrivals then are stamped late"
        )
    console.out.print(escape(f"{output}: {account['kept']} requests, {account['digest']}"))


class _Watch:
    """Progress on stderr: a line that changes on a terminal, else one line a minute."""

    def __init__(self, upstream: str, quiet: bool) -> None:
        self._upstream = upstream
        self._quiet = quiet
        self._live = console.err.is_terminal
        self._stage = ""
        self._said_s = 0.0

    def __call__(self, status: Status) -> None:
        """Shows how it goes."""
        if self._quiet:
            return
        new = status.stage != self._stage
        self._stage = status.stage
        if new and status.stage == "recording":
            console.err.print(escape(f"recording {status.url} -> {self._upstream}; Ctrl-C ends"))
        if not self._live and not new and time.monotonic() - self._said_s < _LINE_EVERY_S:
            return
        self._said_s = time.monotonic()
        rate = status.requests / status.elapsed_s if status.elapsed_s > 0 else 0.0
        text = f"{status.elapsed_s:.0f} s: {status.requests} requests, {rate:.2f}/s, {status.failed} failed, "
        text += f"{status.open} open"
        if status.stage == "waiting":
            text += "; no new ones are taken, Ctrl-C cuts the open ones"
        elif status.stage == "writing":
            text += "; writing the trace"
        if self._live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            console.err.print(escape(text))

    def end(self) -> None:
        """Ends the line."""
        if self._live and self._stage:
            sys.stderr.write("\n")
