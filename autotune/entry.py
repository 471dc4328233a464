"""The `ppas` command before anything is imported: says which extra is missing. Standard library alone."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from autotune import streams

_OURS = ("autotune", "ppas_core", "reports", "search_spaces", "traces")
_INTERRUPTED = 130


def main() -> None:
    """Runs the command line; exits with 2 and the remedy where its packages are not installed."""
    streams.make_lenient()
    # The imports take a second; an interrupt within one may surface as any error, and there is nothing to tidy up yet.
    # SIGTERM and SIGHUP are the command's own while it runs, and ours again once it has tidied up: told twice, as by a
    # process manager, or by a terminal that closes, `ppas` still ends with the exit code of an interrupt.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        from autotune.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _OURS:
            raise
        print(
            f"ppas: the package {error.name!r} is not installed; this environment has the scheduler alone.\n"
            "For the tuner: pip install 'ppas-autotune[tune]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        if not ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except SystemExit as end:
        code = _code(end)
        if (
            code == _INTERRUPTED
        ):  # all is tidied up; while Python tears itself down a further signal would say otherwise
            os._exit(_INTERRUPTED)
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def _code(end: SystemExit) -> int | str | None:
    """The exit code with which the command ended, its output written out: a reader who left is no failure."""
    if isinstance(end.__context__, BrokenPipeError):  # raised while help was shown; commands look after themselves
        streams.discard(sys.stdout)
        return 0
    if (reason := streams.flush()) is not None:
        print(f"error: the output cannot be written: {reason}", file=sys.stderr)
        return end.code or 1
    return end.code


if __name__ == "__main__":
    main()
