"""Where a run stands, for whoever looks at its folder: `progress.json`, written whole, at most once a second.

A reader in another process needs no more than the folder; see `autotune.status`. What cannot be written is left out: no
study ends because its progress could not be told.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from autotune.progress import Pace
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json

FILE: Final = "progress.json"
VERSION: Final = 1
_STAGES_KEPT: Final = 50

State = Literal["running", "finished", "interrupted", "failed"]


class Heartbeat:
    """A `Progress` that keeps `progress.json` in the run folder up to date while its context lasts.

    command: the command's name, to tell a sweep from a study. every_s: the shortest time between two writes.
    planned_s: seconds that each stage to come will take, in their order, where the plan knows.
    Nothing is written before the first stage begins: until then the folder may not be there, or belong to another run.
    """

    def __init__(
        self,
        run: Path,
        command: str,
        *,
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        planned_s: Mapping[str, float] | None = None,
    ) -> None:
        self._file = run / FILE
        self._command = command
        self._every_s = every_s
        self._clock = clock
        self._planned_s = dict(planned_s or {})
        self._started_at = _now()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._over = threading.Event()
        self._stages: list[dict[str, Any]] = []
        self._pace: Pace | None = None
        self._note = ""
        self._writer = threading.Thread(target=self._write_changes, name="progress", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._writer.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._changed.set()
        self._writer.join()
        if self._stages:
            if error is None:
                self._write("finished", None)
            elif isinstance(error, KeyboardInterrupt):
                self._write("interrupted", None)
            else:
                self._write("failed", str(error) or type(error).__name__)

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """A stage starts."""
        with self._lock:
            self._pace = Pace(total, done, self._clock)
            self._stages = [
                *self._stages[-_STAGES_KEPT:],
                {"stage": stage, "total": total, "done": done, "seconds": 0.0},
            ]
            self._note = ""
        self._changed.set()

    def advance(self, note: str = "") -> None:
        """One more step."""
        with self._lock:
            if self._pace is not None:
                self._pace.step()
            self._note = note or self._note
        self._changed.set()

    def end(self) -> None:
        """The stage is over."""
        with self._lock:
            self._bring_up_to_date()
        self._changed.set()

    def _bring_up_to_date(self) -> None:
        if self._pace is not None:
            self._stages[-1]["done"] = self._pace.done
            self._stages[-1]["seconds"] = round(self._pace.elapsed_s, 3)

    def _write_changes(self) -> None:
        while not self._over.is_set():
            self._changed.wait()
            if self._over.is_set():
                return
            self._changed.clear()
            self._write("running", None)
            self._over.wait(self._every_s)

    def _write(self, state: State, message: str | None) -> None:
        with self._lock:
            self._bring_up_to_date()
            pace = self._pace
            data = {
                "version": VERSION,
                "state": state,
                "message": message,
                "command": self._command,
                "pid": os.getpid(),
                "process_start": process_start(os.getpid()),
                "started_at": self._started_at,
                "updated_at": _now(),
                "updated_monotonic_s": time.monotonic(),  # for a reader on this machine, whose clock may be set meanwhile
                "boot_id": boot_id(),
                "planned_s": self._planned_s,
                "stages": [dict(stage) for stage in self._stages],
                "note": self._note,
                "step_s": pace.step_s if pace else None,
                "eta_s": pace.eta_s if pace else None,
            }
        with contextlib.suppress(OSError, ValueError):
            write_atomically(self._file, dump_json(data, indent=1).encode() + b"\n")


def process_start(pid: int) -> str | None:
    """What tells the process `pid` from a later one of the same number; None where there is none, or no way to know."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def boot_id() -> str | None:
    """What tells this start of the machine from others: its monotonic clocks can be compared. None where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
