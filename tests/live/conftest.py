"""Test servers in processes of their own."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts `openai_server.py` with the given behaviour; gives its address."""
    started: list[subprocess.Popen[str]] = []

    def start(**behaviour: Any) -> str:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("openai_server.py")), json.dumps(behaviour)],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(server)
        assert server.stdout is not None
        return f"http://127.0.0.1:{int(server.stdout.readline())}"

    yield start
    for server in started:
        server.kill()
        server.wait()
