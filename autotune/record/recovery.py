"""Makes the trace of a recording that was killed, from what it had written. Needs no aiohttp."""

from __future__ import annotations

from pathlib import Path

from autotune.record.journal import Assembled, assemble
from traces.format import write_trace


def recover(journal: Path, output: Path, *, name: str | None = None, regime: str = "all") -> Assembled:
    """Makes the trace of the journal `journal`, writes it to `output` and removes the journal.

    Raises InvalidInput when `journal` is none, and NoResult when it holds no request.
    """
    made = assemble(journal, name=name or plain_name(output), regime=regime, facts={"ended": "recovered after a kill"})
    write_trace(made.trace, output)
    journal.unlink()
    return made


def plain_name(output: Path) -> str:
    """The name of a trace after its file."""
    return output.name.removesuffix(".gz").removesuffix(".jsonl") or output.name
