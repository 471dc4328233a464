"""Test servers, and recordings: in a thread, or in a process of its own as a user starts it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chat_server import Running

from autotune.record import run
from autotune.record.run import RecordPlan, Status

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "autotune.entry", "trace", "record")
Serve = Callable[..., str]


class Recording:
    """A recording in a thread. url: where it listens."""

    def __init__(self, upstream: str, output: Path, options: dict[str, Any]) -> None:
        self.output = output
        self.url = ""
        self._listening = threading.Event()
        self._ended = threading.Event()
        self._outcome: dict[str, Any] | BaseException = {}
        plan = RecordPlan(upstream, output, port=0, **options)
        self._thread = threading.Thread(target=self._run, args=(plan,), daemon=True)
        self._thread.start()
        assert self._listening.wait(30)
        if not self.url:
            self.end()

    def end(self) -> dict[str, Any]:
        """Ends it; the account. Raises what the recording raised."""
        self._ended.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)

    def _run(self, plan: RecordPlan) -> None:
        try:
            self._outcome = run.record(plan, self._watch, stop=self._ended.is_set)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever ends it
            self._outcome = error
        self._listening.set()

    def _watch(self, status: Status) -> None:
        self.url = status.url
        self._listening.set()


@dataclass
class Command:
    """One `ppas trace record`. url: where it listens."""

    process: subprocess.Popen[str]
    output: Path
    url: str

    def hear(self, words: str) -> None:
        """Waits until it says so."""
        said = ""
        assert self.process.stderr is not None
        while words not in said:
            line = self.process.stderr.readline()
            assert line, f"it ended without {words!r}: {said}"
            said += line

    def end(self, number: int = signal.SIGINT, code: int = 0) -> dict[str, Any]:
        """Ends it by a signal; what it printed."""
        self.process.send_signal(number)
        return self.wait(code)

    def wait(self, code: int = 0) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == code, err
        return dict(json.loads(out)) if out.strip() else {"stderr": err}


Record = Callable[..., Recording]
RunCommand = Callable[..., Command]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def serve(started: list[subprocess.Popen[str]]) -> Iterator[Serve]:
    """Starts a test server with the given behaviour; gives its address. ids: the replay tests' server for token ids."""
    running: list[Running] = []

    def start(ids: bool = False, **behaviour: Any) -> str:
        if not ids:
            running.append(Running(**behaviour))
            return f"http://127.0.0.1:{running[-1].port}"
        script = ROOT / "tests/live/openai_server.py"
        server = subprocess.Popen([sys.executable, script, json.dumps(behaviour)], stdout=subprocess.PIPE, text=True)
        started.append(server)
        assert server.stdout is not None
        return f"http://127.0.0.1:{int(server.stdout.readline())}"

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    """Starts a recording of the server at an address in a thread, with the given parts of its plan."""
    begun: list[Recording] = []

    def start(upstream: str, output: Path = tmp_path / "traffic.jsonl", **options: Any) -> Recording:
        begun.append(Recording(upstream, output, options))
        return begun[-1]

    yield start
    for recording in begun:
        recording.close()


@pytest.fixture
def run_command(started: list[subprocess.Popen[str]], tmp_path: Path) -> RunCommand:
    """Starts `ppas trace record` before the server at an address, with more options as typed."""

    def start(upstream: str, *options: object, file_limit_bytes: int | None = None) -> Command:
        output = tmp_path / "traffic.jsonl"
        argv = [*COMMAND, "--to", upstream, "--port", "0", "-o", str(output), "--json", *map(str, options)]
        if file_limit_bytes is not None:
            argv = ["prlimit", f"--fsize={file_limit_bytes}", *argv]
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        first = process.stderr.readline()
        match = re.match(r"recording (http://\S+) -> ", first)
        assert match, first + process.stderr.read()
        return Command(process, output, match[1])

    return start
