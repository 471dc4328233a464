"""Changing a running server's settings from another process: write the settings file, wait for the acknowledgement.

Standard library alone; used by the HTTP route, by live studies and by whoever holds the file's path. The engine
writes its state beside the settings file (`state_path`), one file per data-parallel rank.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ppas_core.errors import InvalidInput, NoResult
from ppas_core.files import write_atomically
from ppas_core.policy import PolicyParams
from ppas_core.vllm.control import parse_settings

STATE_FORMAT = "ppas-state/1"


def state_path(settings_file: Path, rank: int = 0) -> Path:
    """Where the engine of data-parallel `rank` keeps its state."""
    suffix = ".state.json" if rank == 0 else f".state.dp{rank}.json"
    return settings_file.with_name(settings_file.name + suffix)


def read_settings(settings_file: Path) -> tuple[int, object] | None:
    """Version and policy part of the file as it stands, None where there is none. Raises InvalidSettings."""
    try:
        return parse_settings(settings_file.read_bytes())
    except FileNotFoundError:
        return None


def read_state(settings_file: Path, rank: int = 0) -> dict[str, Any] | None:
    """The engine's latest state: in_force, step, steps_by_branch, acks, step_log, engine. None before its first
    step.
    """
    path = state_path(settings_file, rank)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInput(f"{path} is not a state file: {error}") from None
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        raise InvalidInput(f"{path} is not a state file of format {STATE_FORMAT}; remove it and restart the server")
    return state


def write_settings(settings_file: Path, params: PolicyParams | None) -> int:
    """Ask for `params` (None for off) and return the version of the request.

    The version is one above everything that the file or the engine's acknowledgements have seen. Applying it is the
    engine's doing, at its next step: an idle engine makes none, so send a request and then call `wait_for_ack`.
    """
    state = read_state(settings_file)
    highest = 0
    if state is not None:
        highest = max([state["in_force"]["version"], *(ack["version"] for ack in state["acks"])])
    try:
        current = read_settings(settings_file)
    except InvalidInput:
        current = None  # a malformed file was refused by the engine, and is replaced
    if current is not None:
        highest = max(highest, current[0])
    version = highest + 1
    body = {"version": version, "ppas": None if params is None else params.to_dict()}
    write_atomically(settings_file, (json.dumps(body, indent=2) + "\n").encode())
    return version


def find_ack(settings_file: Path, version: int, rank: int = 0) -> dict[str, Any] | None:
    """The acknowledgement of `version`, None while there is none."""
    state = read_state(settings_file, rank)
    if state is None:
        return None
    return next((ack for ack in reversed(state["acks"]) if ack["version"] == version), None)


def wait_for_ack(settings_file: Path, version: int, *, timeout_s: float, poll_s: float = 0.02) -> dict[str, Any]:
    """The acknowledgement of `version`, applied or refused. Raises NoResult after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        ack = find_ack(settings_file, version)
        if ack is not None:
            return ack
        if time.monotonic() >= deadline:
            raise NoResult(
                f"the engine did not acknowledge settings version {version} within {timeout_s:g} s; an idle engine "
                f"makes no step: send it a request, and check that the server runs with "
                f"PPAS_SETTINGS_FILE={settings_file}"
            )
        time.sleep(poll_s)
