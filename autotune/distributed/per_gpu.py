"""One worker process per GPU of a host: started together, told apart in what they print, ended together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ppas_core.errors import InvalidInput

_GPU: Final = re.compile(r"\d+|(?:GPU|MIG)-[0-9a-zA-Z-]+")
_END_S: Final = 60.0
"""How long a worker may take to end its server, before it is killed."""


def parse_gpus(text: str) -> list[str]:
    """`0,1,2,3`, or the GPUs' own names. Raises InvalidInput."""
    gpus = [gpu.strip() for gpu in text.split(",")]
    if not all(_GPU.fullmatch(gpu) for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise InvalidInput(f"gpus is {text!r}; allowed: different numbers such as 0,1,2,3, or names from nvidia-smi -L")
    return gpus


def run_workers(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Runs a command per GPU, each seeing that one alone, numbered as nvidia-smi numbers them; returns the worst exit code.

    A worker that signal N ended counts as 128 + N. One that fails leaves the others running: its trials go to them. An
    interrupt ends all by SIGTERM, which they may have had from elsewhere already, and waits for them.
    """
    workers: dict[str, subprocess.Popen[str]] = {}
    readers: list[threading.Thread] = []
    try:
        for gpu, command in commands.items():
            workers[gpu] = subprocess.Popen(  # noqa: S603 - this program again
                [sys.executable, "-m", "autotune.entry", *command],
                env={**os.environ, **environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
            readers.append(threading.Thread(target=_pass_on, args=(gpu, workers[gpu], say), daemon=True))
            readers[-1].start()
        codes = [worker.wait() for worker in workers.values()]
        return max(code if code >= 0 else 128 - code for code in codes)
    finally:
        for worker in workers.values():
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
        for worker in workers.values():
            try:
                worker.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                worker.kill()
        for reader in readers:
            reader.join(timeout=5)


def _pass_on(gpu: str, worker: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    for line in worker.stdout or ():
        say(f"gpu {gpu}: {line.rstrip()}")
