"""The life of a vLLM server that the tuner started: until healthy, while it serves, and until nothing of it is left.

A server runs under a guard (`autotune.server_guard`), in a process group of its own, bound to loopback, with a log of
its own. It ends with the tuner, even a killed one. What vLLM resolved (KV blocks, budget, flags) is read back from its
metrics and its log, since flags alone do not say what was measured. Does not import vLLM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from autotune.replay.run import base_url
from autotune.serve import DEFAULT_GRACE_S, ServeCommand, serve_command
from autotune.server_facts import ServerFacts, read_facts
from autotune.server_failures import Diagnosis, StartFailure, diagnose, failure
from ppas_core.errors import InvalidInput

HOST: Final = "127.0.0.1"
DEFAULT_START_TIMEOUT_S: Final = 900.0
SERVING_FLAGS: Final = ("--enable-prompt-tokens-details", "--uvicorn-log-level", "warning")
"""What a measured server gets beside its own flags: it tells cached tokens and logs no line per request. Neither
reaches the engine."""

_POLL_S: Final = 0.2
_PORT_TRIES: Final = 3
_LOG_READ_BYTES: Final = 4 * 2**20
_TAIL_LINES: Final = 10


@dataclass(eq=False)
class Server:
    """A server that answers at `url`. One that the tuner started has a guard and a log; one given by URL has neither.

    command: as it could be typed. start_s: seconds from its start until it was healthy.
    """

    url: str
    facts: ServerFacts
    command: str | None = None
    log: Path | None = None
    start_s: float | None = None
    _launched: _Launched | None = field(default=None, repr=False)

    @property
    def leader(self) -> int | None:
        """The process that leads the server's session, where the tuner started it and the system tells (Linux)."""
        return None if self._launched is None else self._launched.leader

    def ended(self) -> str | None:
        """None while it runs; else how it ended, with the end of its log. Cheap, and never a request to the server: of
        one given by URL it is only known whether somebody listens.
        """
        if self._launched is not None:
            return self._launched.ended()
        return None if _is_listening(self.url) else f"nobody listens at {self.url} any more"

    def stop(self) -> None:
        """Ends a server that the tuner started, and all that it started; a server given by URL goes on."""
        if self._launched is not None:
            self._launched.stop()

    def describe(self) -> dict[str, Any]:
        """What was measured on, as plain JSON values."""
        return {"url": self.url, "command": self.command, "start_s": self.start_s, **self.facts.to_dict()}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def existing_server(url: str, *, api_key: str | None = None) -> Server:
    """The server at `url`, which somebody else started. Raises InvalidInput when none answers there."""
    base = base_url(url)
    try:
        return Server(base, read_facts(base, "", api_key=api_key))
    except OSError as error:
        raise InvalidInput(f"no server answers at {base} ({error}); start one, or give its address") from None


def start_server(
    model: str,
    *,
    log: Path,
    config: Path | None = None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    port: int | None = None,
    needs_ppas: bool = False,
    timeout_s: float = DEFAULT_START_TIMEOUT_S,
    grace_s: float = DEFAULT_GRACE_S,
    waiting: Callable[[float, str], None] | None = None,
) -> Server:
    """Starts vLLM and returns when it is healthy.

    config: an export, as for `vllm serve --config`. flags: further flags, passed on as they are.
    environment: beyond this process's own. wrapper: a command that goes before the server's, such as a profiler.
    port: None takes a free one. needs_ppas: it is a failure when P-PAS is not the scheduler.
    waiting: called about once a second with the seconds waited and the log's last line.

    Raises ServerInputError (bad flag, port taken, model not found) or ServerFailed (out of memory, scheduler not
    loaded, died, hung), with the cause, the remedy and the end of the log; nothing is left running.
    """
    if _names_a_folder(model) and not Path(model).expanduser().exists():
        raise failure(StartFailure.MODEL_NOT_FOUND, f"there is no {model}")
    if wrapper and shutil.which(wrapper[0]) is None:
        raise InvalidInput(f"the wrapper command {wrapper[0]!r} is not installed here")
    for attempt in range(_PORT_TRIES):
        chosen = free_port() if port is None else port
        network = ("--host", HOST, "--port", str(chosen))
        command = serve_command(model, config, [*flags, *SERVING_FLAGS, *network])
        wrapped = ServeCommand((*wrapper, *command.argv), {**command.environment, **(environment or {})})
        try:
            return launch(
                wrapped,
                chosen,
                log=log,
                needs_ppas=needs_ppas,
                timeout_s=timeout_s,
                grace_s=grace_s,
                waiting=waiting,
            )
        except InvalidInput as error:
            taken = getattr(error, "kind", None) is StartFailure.PORT_TAKEN
            if port is not None or not taken or attempt == _PORT_TRIES - 1:
                raise
    raise AssertionError  # the last try returns or raises


def launch(
    command: ServeCommand,
    port: int,
    *,
    log: Path,
    needs_ppas: bool = False,
    timeout_s: float = DEFAULT_START_TIMEOUT_S,
    grace_s: float = DEFAULT_GRACE_S,
    waiting: Callable[[float, str], None] | None = None,
) -> Server:
    """Starts `command`, which serves on loopback at `port`, and waits for its health; see `start_server`."""
    _require_free(port)
    log.parent.mkdir(parents=True, exist_ok=True)
    launched = _Launched.start(command, log, grace_s)
    start_s = time.monotonic()
    url = f"http://{HOST}:{port}"
    try:
        _wait_until_healthy(launched, url, timeout_s, waiting)
        healthy_s = time.monotonic() - start_s
        facts = _facts(launched, url)
        if needs_ppas and facts.scheduler is None:
            raise failure(StartFailure.SCHEDULER_NOT_LOADED, "its log names no P-PAS scheduler", log=log)
    except BaseException:
        launched.stop()
        raise
    return Server(url, facts, command.shown(), log, healthy_s, launched)


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _require_free(port: int) -> None:
    # vLLM may share a port with another vLLM of the same user, and the kernel would deal the requests out to both.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just given up is free
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise failure(StartFailure.PORT_TAKEN, f"port {port}: {error}") from None


def _wait_until_healthy(
    launched: _Launched, url: str, timeout_s: float, waiting: Callable[[float, str], None] | None
) -> None:
    start_s = told_s = time.monotonic()
    while not is_healthy(url):
        launched.find_leader()
        if launched.ended() is not None:
            raise failure(*diagnose(launched.log_text(), launched.exit_code), log=launched.log)
        now_s = time.monotonic()
        if now_s - start_s > timeout_s:
            tail = launched.tail()
            raise failure(StartFailure.HUNG, f"not healthy after {timeout_s:g} s", tail, log=launched.log)
        if waiting is not None and now_s - told_s >= 1:
            told_s = now_s
            waiting(now_s - start_s, launched.tail(1).strip())
        time.sleep(_POLL_S)
    launched.find_leader()  # a quick server was healthy before the first look


def _facts(launched: _Launched, url: str) -> ServerFacts:
    try:
        return read_facts(url, launched.log_text())
    except OSError as error:
        found = Diagnosis(StartFailure.HUNG, f"it was healthy and then did not answer ({error})", launched.tail())
        if launched.ended() is not None:
            found = diagnose(launched.log_text(), launched.exit_code)
        raise failure(*found, log=launched.log) from None


def is_healthy(url: str) -> bool:
    """Whether the vLLM server at `url` says that it and its engine live."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:  # noqa: S310 - base_url checked the scheme
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def _is_listening(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=5):
            return True
    except TimeoutError:
        return True  # busy, as far as one can tell
    except OSError:
        return False


def _names_a_folder(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))


@dataclass(eq=False)
class _Launched:
    """A guard and the log of its server, from where this server's part begins.

    leader: the process that leads the server's group, once it is known; ended by us where the guard was killed.
    """

    guard: subprocess.Popen[bytes]
    log: Path
    log_from: int
    grace_s: float
    leader: int | None = None

    @classmethod
    def start(cls, command: ServeCommand, log: Path, grace_s: float) -> _Launched:
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "VLLM_LOGGING_LEVEL": "INFO",  # the facts are read from it
            **command.environment,
        }
        with log.open("ab") as file:
            file.write(f"$ {command.shown()}\n".encode())
            file.flush()
            log_from = file.tell()
            guard = subprocess.Popen(  # noqa: S603 - the user's own command
                [sys.executable, "-m", "autotune.server_guard", str(grace_s), *command.argv],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**environment, "PYTHONPATH": _with_this_source(environment.get("PYTHONPATH"))},
                start_new_session=True,  # Ctrl-C is for the tuner, which ends the server
            )
        return cls(guard, log, log_from, grace_s)

    @property
    def exit_code(self) -> int | None:
        return self.guard.poll()

    def ended(self) -> str | None:
        code = self.guard.poll()
        if code is None:
            return None
        how = f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        return f"the server {how}; the end of its log {self.log}:\n{self.tail()}"

    def stop(self) -> None:
        for wait_s in (self.grace_s + 10, 10.0):
            if self.guard.poll() is not None:
                break
            with contextlib.suppress(BrokenPipeError):
                self._ask()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.guard.wait(timeout=wait_s)
        else:
            self.guard.kill()  # it then has the kernel end the server
        if self.guard.wait() < 0 and self.leader is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader, signal.SIGKILL)
        if self.guard.stdin is not None:
            self.guard.stdin.close()

    def find_leader(self) -> None:
        """Learns who leads the server's group, where this system tells (Linux)."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            children = Path(f"/proc/{self.guard.pid}/task/{self.guard.pid}/children").read_text()
            self.leader = self.leader or int(children.split()[0])

    def _ask(self) -> None:
        if self.guard.stdin is not None:
            self.guard.stdin.write(b"x")
            self.guard.stdin.flush()

    def log_text(self) -> str:
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # Facts stand at the beginning, causes of a failure at the end; a start seldom writes as much as this.
            file.seek(max(self.log_from, size - _LOG_READ_BYTES))
            return file.read().decode(errors="replace")

    def tail(self, lines: int = _TAIL_LINES) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])


def _with_this_source(path: str | None) -> str:
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(part for part in (root, path) if part)
