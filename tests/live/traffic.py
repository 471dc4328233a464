"""Small traces, and looking at processes."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from traces.format import Trace, TraceRequest


def trace(lengths: Sequence[tuple[int, int]], gap_s: float = 0.01) -> Trace:
    """One request per (prompt tokens, output tokens), `gap_s` apart."""
    return Trace("small", tuple(TraceRequest(i * gap_s, prompt, output) for i, (prompt, output) in enumerate(lengths)))


def children(parent: int, having: str) -> list[int]:
    """Processes whose parent is `parent` and whose command line holds `having`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if int(stat[1]) == parent and having in command:
                found.append(int(folder.name))
    return found


def clients() -> list[int]:
    return children(os.getpid(), "autotune.replay.client")


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def has_ended(child: int) -> bool:
    """Whether a wait for our child would return: only once its last thread is gone, later than `is_gone`."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # it was waited for


def wait_until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
