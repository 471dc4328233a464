"""The one thread that writes what leaves the engine: acknowledgements, state and step log.

The engine only sets an event or appends to a buffer. A disk that blocks, blocks this thread alone; one that fails is
tried again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ppas_core.files import write_atomically
from ppas_core.vllm.steplog import StepLog

WRITE_INTERVAL_S: Final = 0.1
STATE_INTERVAL_S: Final = 1.0


class Reporter:
    """Writes `step_log` and, to `state_file`, what `describe` returns.

    describe: called on the reporter's thread; must only read. The state is written at once after `publish`, and once
    a second while the engine makes steps (`describe()["step"]` grows).
    """

    def __init__(
        self, describe: Callable[[], dict[str, Any]], state_file: Path | None, step_log: StepLog | None
    ) -> None:
        self._describe = describe
        self._state_file = state_file
        self._step_log = step_log
        self._wake = threading.Event()
        self._stopping = False
        self._state_due = state_file is not None
        self._last_state_s = 0.0
        self._last_step = -1
        self.failed_writes = 0
        self._thread = threading.Thread(target=self._run, name="ppas-reporter", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Have the state written now. Does not wait for it."""
        self._state_due = True
        self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left and stop; give up after `timeout_s` where the disk hangs."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(WRITE_INTERVAL_S)
            self._wake.clear()
            self._write()
        self._state_due = self._state_file is not None
        self._write()
        if self._step_log is not None:
            self._step_log.close()

    def _write(self) -> None:
        if self._step_log is not None:
            self._step_log.write_out()
        if self._state_file is None:
            return
        now = time.monotonic()
        if not self._state_due and now - self._last_state_s < STATE_INTERVAL_S:
            return
        due, self._state_due = self._state_due, False
        state = self._describe()
        if not due and state["step"] == self._last_step:
            return
        try:
            write_atomically(self._state_file, (json.dumps(state) + "\n").encode())
        except OSError:
            self.failed_writes += 1
            self._state_due = due  # an acknowledgement is owed until it is on disk
            return
        self._last_state_s = now
        self._last_step = state["step"]
