"""A MariaDB server, which speaks MySQL's protocol, that a test starts and stops."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from postgres import started_on_a_free_port

_TABLES = [Path(f"/usr/share/{name}/mysql_system_tables.sql") for name in ("mysql", "mariadb")]
"""What makes the server's own tables; comes with it."""
_START_S = 60.0


def program() -> str | None:
    """The server's program; None where it is not installed."""
    found = shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin:/usr/local/sbin")
    return found if any(file.exists() for file in _TABLES) else None


class MariaDb:
    """A server of our own, in a folder of its own, on the loopback interface, with a password that a URL must encode."""

    PASSWORD = "s3/cr@t:w0rd%20?#"  # noqa: S105 - of a server that lives as long as the test

    def __init__(self, folder: Path, program: str) -> None:
        self.folder = folder
        self.port = 0
        """Chosen when it starts, and kept."""
        self._program = program
        self._running: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir()
        tables = next(file for file in _TABLES if file.exists()).read_text()
        words = f"""
            CREATE DATABASE studies;
            CREATE USER 'ppas'@'127.0.0.1' IDENTIFIED BY '{self.PASSWORD}';
            GRANT ALL ON studies.* TO 'ppas'@'127.0.0.1';
        """
        subprocess.run(
            [*self._command(), "--bootstrap"], check=True, capture_output=True, text=True, timeout=_START_S,
            input=f"CREATE DATABASE mysql;\nUSE mysql;\n{tables}\nFLUSH PRIVILEGES;\n{words}",
        )  # fmt: skip

    def url(self) -> str:
        return f"mysql://ppas:{quote(self.PASSWORD, safe='')}@127.0.0.1:{self.port}/studies"

    def start(self) -> None:
        if self.port:
            self._start(self.port)
        else:
            self.port = started_on_a_free_port(self._start, RuntimeError)

    def _start(self, port: int) -> None:
        with (self.folder / "log").open("ab") as log:
            began = log.tell()
            self._running = subprocess.Popen(
                [
                    *self._command(), f"--port={port}", "--bind-address=127.0.0.1", "--skip-name-resolve",
                    f"--socket={self.folder / 'socket'}", "--innodb-flush-log-at-trx-commit=2",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while b"ready for connections" not in (self.folder / "log").read_bytes()[began:]:
            if self._running.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text())
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends it as a crash does."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def _command(self) -> list[str]:
        # It refuses to run as root unless told to.
        user = ["--user=root"] if os.geteuid() == 0 else []
        return [self._program, "--no-defaults", f"--datadir={self.folder / 'data'}", *user]


@contextlib.contextmanager
def mariadb() -> Iterator[MariaDb]:
    """A running server; the context needs MariaDB's program."""
    found = program()
    assert found is not None
    folder = Path(tempfile.mkdtemp(prefix="ppas-my-"))
    try:
        server = MariaDb(folder, found)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
