"""Which settings ended a server, or left it hanging: they are not tried again, not even by a later process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppas_core.errors import InvalidInput, NoResult
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams


class Deaths:
    """The settings that ended a server, with the reason, kept in `file`. Raises InvalidInput when it is damaged."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._reasons: dict[PolicyParams, str] = {}
        self._spared: PolicyParams | None = None
        if not file.exists():
            return
        try:
            entries: Any = load_json(file.read_bytes())
            self._reasons = {PolicyParams.from_dict(entry["ppas"]): str(entry["reason"]) for entry in entries}
        except (ValueError, TypeError, KeyError, InvalidInput) as error:
            raise InvalidInput(
                f"{file}: is damaged ({error}); remove it, and what it held may be tried again"
            ) from None

    def add(self, params: PolicyParams, reason: str) -> None:
        """Remembers that the server ended under `params`, where these are not spared."""
        if params != self._spared:
            self._reasons[params] = reason
            self._write()

    def spare(self, params: PolicyParams) -> None:
        """Never holds an end against `params`, neither a later one nor one that is kept already."""
        self._spared = params
        if params in self._reasons:
            self.forget([params])

    def forget(self, settings: Iterable[PolicyParams]) -> None:
        """Has `settings` tried again."""
        for params in settings:
            self._reasons.pop(params, None)
        self._write()

    def _write(self) -> None:
        entries = [{"ppas": params.to_dict(), "reason": reason} for params, reason in self._reasons.items()]
        write_atomically(self.file, dump_json(entries, indent=1).encode() + b"\n")

    def check(self, params: PolicyParams) -> None:
        """Raises NoResult for settings that ended a server before."""
        if params in self._reasons:
            raise NoResult(
                f"this setting ended the server before, so it is not tried again ({self._reasons[params]}); where that "
                f"was not its doing, remove it from {self.file}"
            )
