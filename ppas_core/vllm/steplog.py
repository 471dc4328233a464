"""The step log: one row per scheduler step, written as CSV without ever stalling the engine.

The engine appends a row to a bounded buffer and goes on. A thread of `reporter` writes the rows. When the disk is
slow the buffer fills and further rows are dropped and counted; when it is full (or gone) the rows at hand are
dropped and counted.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

BUFFERED_ROWS: Final = 65536


class StepRow(NamedTuple):
    """One step. Times are seconds of the system-wide monotonic clock; tokens and counts are of this step alone.

    step: the scheduler's count of steps, from 1. start_s: schedule() was called; scheduled_s: it returned; done_s: the
    model's output for this step came back (nan when it never did). settings_version, scope, branch: what set the
    budget. budget: decided tokens; step_budget: what vLLM was given for all tokens of the step.
    running_prefills … remaining_running_prefill_tokens: the queues at the start, as the policy saw them.
    prefill_tokens, decode_tokens: scheduled. prefill_pairs: chunk * context before + chunk * (chunk + 1) / 2 over the
    prefill chunks; decode_context_tokens: contexts with the new tokens over the scheduled decodes (both as in
    `ppas_core.sim.cost`). free_kv_blocks: after the step was scheduled. preemptions: requests put back in it.
    dropped_rows: rows lost before this one, in all.
    """

    step: int
    start_s: float
    scheduled_s: float
    done_s: float
    settings_version: int
    scope: str
    branch: str
    budget: int
    step_budget: int
    running_prefills: int
    running_decodes: int
    waiting_prefills: int
    remaining_running_prefill_tokens: int
    prefill_tokens: int
    decode_tokens: int
    prefill_chunks: int
    decodes: int
    prefill_pairs: int
    decode_context_tokens: int
    free_kv_blocks: int
    preemptions: int
    dropped_rows: int


DONE_S: Final = StepRow._fields.index("done_s")
"""The place of `done_s` in a row: the one value that is not known when the row is opened."""


class StepLog:
    """The buffer between the engine and the file, and the file with its rotation.

    `add` is called by the engine alone and `write_out` by the writer thread alone. written, dropped: rows, in all.
    """

    def __init__(self, path: Path, *, max_bytes: int, keep_files: int, buffered_rows: int = BUFFERED_ROWS) -> None:
        self.path = path
        self.written = 0
        self.dropped = 0
        self._max_bytes = max_bytes
        self._keep_files = keep_files
        self._buffered_rows = buffered_rows
        self._rows: deque[Sequence[object]] = deque()
        self._file: IO[str] | None = None

    def add(self, row: Sequence[object]) -> None:
        """Keep `row` for the writer, or count it as dropped where the buffer is full. Never blocks, never raises.

        row: the values of a `StepRow`, in its order; not to be changed afterwards.
        """
        if len(self._rows) >= self._buffered_rows:
            self.dropped += 1
        else:
            self._rows.append(row)

    def write_out(self) -> None:
        """Write all buffered rows. A failing disk costs the rows at hand; the next call tries again."""
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if not rows:
            return
        try:
            file = self._open()
            file.write("".join(",".join(map(_text, row)) + "\n" for row in rows))
            file.flush()
            self.written += len(rows)
            if file.tell() >= self._max_bytes:
                self._rotate()
        except (OSError, ValueError):
            self.dropped += len(rows)
            self._close()

    def close(self) -> None:
        """Write what is left and close the file."""
        self.write_out()
        self._close()

    def _open(self) -> IO[str]:
        if self._file is None:
            if self.path.exists() and self.path.stat().st_size:
                self._rotate()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="ascii")
            self._file.write(",".join(StepRow._fields) + "\n")
        return self._file

    def _rotate(self) -> None:
        self._close()
        for number in range(self._keep_files, 0, -1):
            older = self.path if number == 1 else _numbered(self.path, number - 1)
            if older.exists():
                os.replace(older, _numbered(self.path, number))
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                self.dropped += 1  # what the failed flush held; at least one row


def read_step_log(path: Path) -> pd.DataFrame:
    """The rows of `path` and of its rotated predecessors, oldest first, as a pandas frame. Needs pandas.

    A last line that was cut by a kill is left out. Raises FileNotFoundError where there is no log.
    """
    import pandas as pd

    numbered = []
    number = 1
    while _numbered(path, number).exists():
        numbered.append(_numbered(path, number))
        number += 1
    frames = []
    for file in [*reversed(numbered), path]:
        if file is path and numbered and not path.exists():
            continue
        text = file.read_text(encoding="ascii")
        complete = text[: text.rfind("\n") + 1]
        if complete:
            from io import StringIO

            frames.append(pd.read_csv(StringIO(complete)))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(StepRow._fields))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _text(value: object) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)
