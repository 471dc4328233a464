"""The live settings file: which policy is in force at a step, and what became of each change.

The file is JSON, replaced atomically: `{"version": N, "ppas": {...}}`, with `null` for off. The scheduler calls
`poll` once a step, at the price of one stat. A change is applied at the step that sees it, or refused with the old
settings left in force; either way there is an acknowledgement. How acknowledgements leave the process is
`reporter`'s matter, how other processes write and read these files is `live`'s.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidSettings, PpasError
from ppas_core.policy import PolicyParams
from ppas_core.vllm.settings import EngineLimits, params_from_json

MAX_SETTINGS_BYTES: Final = 64 * 1024
"""A settings file is a few hundred bytes; more is somebody's mistake and is not read inside a step."""
KEPT_ACKS: Final = 64


@dataclass(frozen=True, slots=True)
class Ack:
    """What became of one change.

    version: the file's, 0 where it could not be read. status: `applied` or `refused`. step: the first step under the
    applied settings, or the step that refused. time_s: seconds since the epoch. reason: why refused, else None.
    ppas: the settings in force after it.
    """

    version: int
    status: str
    step: int
    time_s: float
    reason: str | None
    ppas: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def parse_settings(text: str | bytes) -> tuple[int, object]:
    """Version and policy part of a settings file. Raises InvalidSettings naming what is wrong."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSettings(f"the settings file is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidSettings("the settings file is not a JSON object with the keys version and ppas")
    if unknown := sorted(set(data) - {"version", "ppas"}):
        raise InvalidSettings(f"unknown key {unknown[0]!r} in the settings file; allowed: version, ppas")
    version = data.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidSettings(f"version is {version!r}; allowed: a whole number of at least 1, higher at each change")
    if "ppas" not in data:
        raise InvalidSettings("the settings file has no key ppas; give the settings, or null for off")
    return version, data["ppas"]


class LiveControl:
    """The settings in force, and the watch over the file.

    params: the policy in force, None for off. version: of the file that set it, 0 for the start-up settings.
    acks: the latest acknowledgements, oldest first; ack_counts: all of them, by status.
    """

    def __init__(
        self,
        params: PolicyParams | None,
        limits: EngineLimits,
        settings_file: Path | None,
        on_ack: Callable[[Ack], None],
    ) -> None:
        self.params = params
        self.version = 0
        self.since_step = 1
        self.acks: deque[Ack] = deque(maxlen=KEPT_ACKS)
        self.ack_counts = {"applied": 0, "refused": 0}
        self._limits = limits
        self._path = None if settings_file is None else os.fspath(settings_file)
        self._seen: tuple[int, int, int] | None = None
        self._on_ack = on_ack

    def poll(self, step: int) -> PolicyParams | None:
        """The policy for `step`, after looking whether the file changed. Never raises for what the file holds."""
        if self._path is not None:
            try:
                seen = _signature(os.stat(self._path))
            except OSError:
                self._seen = None
            else:
                if seen != self._seen:
                    self._seen = seen
                    self._load(self._path, step)
        return self.params

    def _load(self, path: str, step: int) -> None:
        version = 0
        try:
            with open(path, "rb") as file:
                # The file may have been replaced again since the stat: remember the one that is read.
                self._seen = _signature(os.fstat(file.fileno()))
                content = file.read(MAX_SETTINGS_BYTES + 1)
            if len(content) > MAX_SETTINGS_BYTES:
                raise InvalidSettings(f"the settings file is larger than {MAX_SETTINGS_BYTES} bytes")
            version, data = parse_settings(content)
            if version <= self.version:
                raise InvalidSettings(f"version {version} is not above {self.version}, which is in force")
            params = None if data is None else params_from_json(data, self._limits)
        except (PpasError, OSError) as error:
            self._acknowledge(version, "refused", step, str(error))
            return
        self.params = params
        self.version = version
        self.since_step = step
        self._acknowledge(version, "applied", step, None)

    def _acknowledge(self, version: int, status: str, step: int, reason: str | None) -> None:
        in_force = None if self.params is None else self.params.to_dict()
        ack = Ack(version, status, step, time.time(), reason, in_force)
        self.acks.append(ack)
        self.ack_counts[status] += 1
        self._on_ack(ack)


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return (status.st_mtime_ns, status.st_ino, status.st_size)
