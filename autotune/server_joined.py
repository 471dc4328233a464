"""A server that somebody else started: what it must allow, what its engine did, and its own settings put back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from autotune.server_settings import Channel, FileChannel, RouteChannel, read_token, wait_for_ack
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams
from ppas_core.vllm.reporter import STATE_INTERVAL_S, WRITE_INTERVAL_S

_REPORTED_S: Final = STATE_INTERVAL_S + 2 * WRITE_INTERVAL_S
"""After so long an idle engine has reported all its steps."""
_ACK_TIMEOUT_S: Final = 30.0


class JoinedServer:
    """The settings of a joined server.

    channel: how they are changed. before: the file that keeps what they were, until they are put back; it outlives a
    killed tuner. engine: what the engine said of itself, known after `require`.
    """

    def __init__(self, channel: Channel, before: Path) -> None:
        self.channel = channel
        self.engine: dict[str, Any] = {}
        self._before = before
        self._mark: dict[str, Any] = {}

    @classmethod
    def at(cls, url: str, settings_file: Path | None, token_file: Path | None, before: Path) -> JoinedServer:
        """The server at `url`, through `settings_file` or else its route. Raises InvalidInput for a bad token."""
        file = None if settings_file is None else FileChannel(settings_file)
        return cls(file or RouteChannel(url, read_token(token_file)), before)

    def require(self, budget: int, max_num_seqs: int, *, wake: Callable[[], None]) -> None:
        """Raises InvalidInput where the server would refuse settings up to `budget`, or P-PAS is not in it.

        wake: has the engine make a step, after which it reports.
        """
        state = self.channel.state()
        if state is None:
            wake()
            time.sleep(_REPORTED_S)
            state = self.channel.state()
        if state is None:
            raise InvalidInput(
                f"the engine reports nothing to {self.channel.name}; start the server with P-PAS, and give the same file "
                "as its PPAS_SETTINGS_FILE"
            )
        self.engine = dict(state["engine"])
        started, sequences = self.engine["startup_budget_tokens"], self.engine["max_num_seqs"]
        if started < budget:
            raise InvalidInput(
                f"the server was started with {started} tokens per step, the study asks for up to {budget}; start it "
                f"with --max-num-batched-tokens {budget}, or lower b_max in space, reference and static_budgets"
            )
        if sequences != max_num_seqs:
            raise InvalidInput(
                f"the server was started with --max-num-seqs {sequences}, the study's settings have {max_num_seqs}; make "
                "them equal"
            )

    def remember_before(self) -> None:
        """Keeps the settings in force, unless an earlier, killed process did."""
        if not self._before.exists():
            state = self.channel.state() or {}
            found = {"ppas": (state.get("in_force") or {}).get("ppas")}
            write_atomically(self._before, dump_json(found, indent=1).encode() + b"\n")

    def give_back(self, *, wake: Callable[[], None]) -> None:
        """Asks for the settings that were in force before the study, if it changed any. Raises NoResult."""
        if not self._before.exists():
            return
        before = load_json(self._before.read_bytes())["ppas"]
        version = self.channel.ask(None if before is None else PolicyParams.from_dict(before))
        wake()
        ack = wait_for_ack(self.channel, version, timeout_s=_ACK_TIMEOUT_S)
        if ack["status"] != "applied":
            raise NoResult(f"the engine refused them: {ack['reason']}")
        self._before.unlink()

    def mark(self) -> None:
        """Counts steps from here. The engine must be idle."""
        self._mark = self._reported()

    def branches_since(self) -> dict[str, int]:
        """Steps by branch since the last mark, and marks. The engine must be idle.

        Raises NoResult when the settings changed or the engine was started again in between.
        """
        before, self._mark = self._mark, self._reported()
        for part, key in (("engine", "started_s"), ("in_force", "version")):
            if before[part][key] != self._mark[part][key]:
                what = "the server was started again" if part == "engine" else "somebody else changed the settings"
                raise NoResult(f"{what} in the middle of the replay")
        counts = self._mark["steps_by_branch"]
        steps = {branch: count - before["steps_by_branch"].get(branch, 0) for branch, count in counts.items()}
        return {branch: count for branch, count in steps.items() if count}

    def _reported(self) -> dict[str, Any]:
        time.sleep(_REPORTED_S)
        state = self.channel.state()
        if state is None:
            raise NoResult(f"the engine reports nothing to {self.channel.name} any more")
        return state
