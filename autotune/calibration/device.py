"""What this machine computes on: the name of its GPU, or of its processor where it has none."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final

_CPU_INFO: Final = Path("/proc/cpuinfo")
_TIMEOUT_S: Final = 20.0


def device_name() -> str:
    """As a profile names it: `2 x NVIDIA H200`, or `CPU: …`. Asks nvidia-smi; never a host name."""
    gpus = _nvidia_gpus()
    if not gpus:
        return f"CPU: {_processor()}"
    return gpus[0] if len(gpus) == 1 else _counted(gpus)


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _nvidia_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        found = subprocess.run(  # noqa: S603 - a program of the system, with fixed words
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in found.stdout.splitlines() if line.strip()]
    return lines if found.returncode == 0 else []


def _processor() -> str:
    try:
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip() or platform.machine()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
