"""Servers and recordings in processes of their own, driven as a user does."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "autotune.entry", "trace", "record")
Serve = Callable[..., str]


@dataclass
class Recording:
    """One `ppas trace record`. url: where it listens."""

    process: subprocess.Popen[str]
    output: Path
    url: str

    def end(self, number: int = signal.SIGINT, code: int = 0) -> dict[str, Any]:
        """Ends it by a signal; what it printed."""
        self.process.send_signal(number)
        return self.wait(code)

    def wait(self, code: int = 0) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == code, err
        return dict(json.loads(out)) if out.strip() else {"stderr": err}


Record = Callable[..., Recording]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def serve(started: list[subprocess.Popen[str]]) -> Serve:
    """Starts a test server with the given behaviour; gives its address. ids: the replay tests' server for token ids."""

    def start(ids: bool = False, **behaviour: Any) -> str:
        script = ROOT / ("tests/live/openai_server.py" if ids else "tests/record/chat_server.py")
        server = subprocess.Popen([sys.executable, script, json.dumps(behaviour)], stdout=subprocess.PIPE, text=True)
        started.append(server)
        assert server.stdout is not None
        return f"http://127.0.0.1:{int(server.stdout.readline())}"

    return start


@pytest.fixture
def record(started: list[subprocess.Popen[str]], tmp_path: Path) -> Record:
    """Starts a recording of the server at an address, with more options as typed."""

    def start(upstream: str, *options: object, output: Path = tmp_path / "traffic.jsonl") -> Recording:
        argv = [*COMMAND, "--to", upstream, "--port", "0", "-o", str(output), "--json", *map(str, options)]
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        first = process.stderr.readline()
        match = re.match(r"recording (http://\S+) -> ", first)
        assert match, first + process.stderr.read()
        return Recording(process, output, match[1])

    return start
