"""A PostgreSQL server that a test starts, stops and starts again, and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote


def programs() -> Path | None:
    """The folder of PostgreSQL's own programs; None where it is not installed."""
    folders = [
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
        Path(shutil.which("initdb") or "/").parent,
    ]
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started_on_a_free_port(start: Callable[[int], object], taken: type[Exception]) -> int:
    """Calls `start` with a free port; up to three times, since another process may take it before. The port."""
    for tries_left in (2, 1, 0):
        port = free_port()
        try:
            start(port)
            break
        except taken:
            if not tries_left:
                raise
    return port


class Postgres:
    """A server of our own, in a folder of its own, on the loopback interface, with a password that a URL must encode."""

    PASSWORD = "s3/cr@t:w0rd%20?#"  # noqa: S105 - of a server that lives as long as the test

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self.folder = folder
        self.port = 0
        """Chosen when it starts, and kept."""
        self._bin = bin_folder
        # PostgreSQL refuses to run as root.
        self._user = {"user": "postgres", "group": pwd.getpwnam("postgres").pw_gid} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(folder, "postgres")
        (folder / "password").write_text(self.PASSWORD)
        self._call("initdb", "-D", "data", "-U", "ppas", "-A", "scram-sha-256", "--pwfile=password", "--no-sync")

    def url(self, port: int | None = None) -> str:
        return f"postgresql://ppas:{quote(self.PASSWORD, safe='')}@127.0.0.1:{port or self.port}/postgres"

    def start(self) -> None:
        if self.port:
            self._start(self.port)
        else:
            self.port = started_on_a_free_port(self._start, subprocess.CalledProcessError)

    def _start(self, port: int) -> None:
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self._call("pg_ctl", "-D", "data", "-o", options, "-l", "log", "-w", "start")

    def stop(self, mode: str = "fast") -> None:
        """Mode `immediate` ends it as a crash does: it recovers when it starts again."""
        self._call("pg_ctl", "-D", "data", "-m", mode, "-w", "stop")

    def _call(self, name: str, *words: str) -> None:
        subprocess.run(
            [str(self._bin / name), *words], cwd=self.folder, check=True, stdout=subprocess.DEVNULL, timeout=60,
            **self._user,
        )  # fmt: skip


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A running server; the context needs PostgreSQL's programs."""
    found = programs()
    assert found is not None
    # Not below pytest's own folder, which belongs to root alone.
    folder = Path(tempfile.mkdtemp(prefix="ppas-pg-"))
    try:
        server = Postgres(folder, found)
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Wire:
    """Passes connections on to a port until it is cut; then every connection breaks, and no new one is taken."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def mend(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self._open.is_set():
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # the server is away
                    near.close()
                    continue
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
