"""What this process computes on: the name of its GPU, or of its processor where it has none; and what its machine is."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from autotune.server_memory import machine_bytes

_CPU_INFO: Final = Path("/proc/cpuinfo")
_TIMEOUT_S: Final = 20.0


def device_name() -> str:
    """As a profile names it: `2 x NVIDIA H200`, or `CPU: …`. Asks nvidia-smi; never a host name.

    Of the GPUs that `CUDA_VISIBLE_DEVICES` leaves to this process: a host may have unlike ones.
    """
    gpus = _nvidia_gpus()
    if not gpus:
        return f"CPU: {_processor()}"
    return gpus[0] if len(gpus) == 1 else _counted(gpus)


def machine() -> dict[str, Any]:
    """`system`, `machine`, `cpu`, `cores` that this process may use, and where the system tells them `memory_gib` and
    `gpus`. No host name, user or path.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = machine_bytes()
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _processor(),
        "cores": cores,
        **({} if memory is None else {"memory_gib": round(memory / 2**30, 1)}),
        **({"gpus": _counted(gpus)} if (gpus := _nvidia_gpus()) else {}),
    }


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _nvidia_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        found = subprocess.run(  # noqa: S603 - a program of the system, with fixed words
            [program, "--query-gpu=index,uuid,name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    if found.returncode != 0:
        return []
    rows = [[part.strip() for part in line.split(",", 2)] for line in found.stdout.splitlines()]
    gpus = [(row[0], row[1], row[2]) for row in rows if len(row) == 3]
    return _visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(gpus: list[tuple[str, str, str]], wanted: str | None) -> list[str]:
    """Names of the GPUs, given as index, UUID and name, that `wanted` names; all where it names a part of a GPU."""
    if wanted is None:
        return [name for _, _, name in gpus]
    chosen = [part.strip() for part in wanted.split(",")]
    if any(part.startswith("MIG-") for part in chosen):
        return [name for _, _, name in gpus]
    return [name for part in chosen for index, uuid, name in gpus if part == index or (part and uuid.startswith(part))]


def _processor() -> str:
    try:
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip() or platform.machine()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
