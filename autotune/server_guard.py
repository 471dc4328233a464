"""A process between the tuner and a server: ends the server when the tuner asks or is gone, however it went.

`python -m autotune.server_guard GRACE_S COMMAND…`. Each byte on standard input is one request to end: the first is
passed on as SIGTERM, the second kills the server's process group, as does `GRACE_S` without an end. End of file, which
the kernel brings about even when the tuner is killed, is a request to end. The exit code is the server's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from autotune.serve import supervise


def main() -> int:
    """Runs the command until it ends."""
    requests = os.dup(0)  # not inherited: the server must not hold or read it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

    def obey() -> None:
        while os.read(requests, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=obey, daemon=True).start()
    return supervise(sys.argv[2:], os.environ, grace_s=float(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
