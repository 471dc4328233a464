"""Ctrl-C that cannot get lost: an interrupt raised inside a library's callback may be swallowed there.

Python raises KeyboardInterrupt wherever it happens to be; in a finaliser or a weak reference's callback it is printed and
forgotten. So the wish is remembered as well, and long loops ask for it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_requested = threading.Event()


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remembers SIGINT within the context, and raises KeyboardInterrupt as usual. For the main thread; else does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _requested.clear()


def check() -> None:
    """Raises KeyboardInterrupt when one was asked for and got lost."""
    if _requested.is_set():
        raise KeyboardInterrupt


def forgive() -> None:
    """Forgets an interrupt that was heeded; the next one counts anew."""
    _requested.clear()


def _on_sigint(_number: int, _frame: FrameType | None) -> None:
    _requested.set()
    raise KeyboardInterrupt
