"""How stdout and stderr behave where their reader is odd: gone, or of an encoding that lacks some characters.

Standard library alone: the command's entry needs it before anything is imported.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO


def make_lenient() -> None:
    """A character that the encoding of stdout or stderr lacks is written as a backslash and its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def reader_left(stream: TextIO | None) -> bool:
    """Whether nobody reads the pipe behind `stream` any more, as in `| head`."""
    if stream is None:
        return False
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):
        return False


def discard(stream: TextIO | None) -> None:
    """Sends the rest of `stream` nowhere, so that nothing that is still in its buffer can fail."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def flush() -> str | None:
    """Writes out what stdout still holds; the reason where that failed, None where it went well or nobody reads it."""
    if sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        gone = isinstance(error, BrokenPipeError)
        discard(sys.stdout)
        return None if gone else (error.strerror or str(error))
    return None
