"""A command on a real terminal of 100 columns by 30 lines."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "autotune.entry"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def on_a_terminal(
    arguments: list[str],
    keys: Sequence[tuple[str, bytes]] = (),
    *,
    cwd: Path | None = None,
    **environment: str,
) -> tuple[int, str]:
    """Exit code and all output, control sequences included; each key of `keys` is pressed once its text shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env={**ENVIRONMENT, "TERM": "xterm-256color", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    waiting, screen, looked_at = list(keys), "", 0
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux tells the end of a terminal so
            break
        if not data:
            break
        screen += data.decode(errors="replace")
        if waiting and waiting[0][0] in plain(screen)[looked_at:]:
            looked_at = plain(screen).index(waiting[0][0], looked_at) + len(waiting[0][0])
            time.sleep(0.3)  # as a person: a key in the instant in which a prompt appears may be lost
            os.write(ours, waiting.pop(0)[1])
    os.close(ours)
    if process.poll() is None and time.monotonic() >= deadline:
        process.kill()
    return process.wait(), screen


def plain(screen: str) -> str:
    """What a terminal showed, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
