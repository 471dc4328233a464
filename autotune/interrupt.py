"""Ctrl-C that cannot get lost: an interrupt raised inside a library's callback may be swallowed there.

Python raises KeyboardInterrupt wherever it happens to be; in a finaliser or a weak reference's callback it is printed and
forgotten. So the wish is remembered as well, and long loops ask for it. SIGTERM may be heeded in the same way; it is not
forgiven, since who sends it waits for the end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_requested = threading.Event()
_for_good = threading.Event()


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
        _for_good.clear()


def check() -> None:
    """Raises KeyboardInterrupt when one was asked for and got lost."""
    if _requested.is_set():
        raise KeyboardInterrupt


def is_asked() -> bool:
    """Whether an interrupt was asked for that nobody forgave."""
    return _requested.is_set()


def is_for_good() -> bool:
    """Whether the process is to end at once, and not to finish with what there is."""
    return _for_good.is_set()


def heed_sigterm() -> None:
    """From now on SIGTERM raises KeyboardInterrupt too. For the main thread; else does nothing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def forgive() -> None:
    """Forgets an interrupt that was heeded; the next one counts anew."""
    _requested.clear()


def _on_sigint(_number: int, _frame: FrameType | None) -> None:
    _requested.set()
    raise KeyboardInterrupt


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    _for_good.set()
    _requested.set()
    raise KeyboardInterrupt
