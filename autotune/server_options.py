"""How the server of a live study is started, or found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

WRAPPER_OUTPUT: Final = "{output}"
"""Stands in a wrapper's words for a path of the server's own."""

DEFAULT_VOCABULARY: Final = 32_000
"""Token ids of nearly every model that is served."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server of a live study is started.

    model: as for `vllm serve`. flags, environment: passed on as they are.
    wrapper: a command before the server's; `{output}` in it becomes a path of that server's own, without a suffix.
    vocabulary_size: ids that prompts are drawn from. start_timeout_s, request_timeout_s: when to give up.
    max_send_lag_s: a replay counts only when the client's P99 lateness stays below this plus 1 % of mean latency.
    url: a server that somebody else started with P-PAS; it is never started, restarted or ended. Its settings are
        changed through settings_file, the file that it watches, or else through its route, with the token in token_file
        or in PPAS_HTTP_TOKEN. Its step log is not known, its steps by branch are.
    restart_per_trial: a server started with each setting's export, instead of switching.
    memory_reserve_bytes: a server whose memory grows is started anew, between trials, before less than this is left.
    """

    model: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    vocabulary_size: int = DEFAULT_VOCABULARY
    start_timeout_s: float = 900.0
    request_timeout_s: float = 600.0
    max_send_lag_s: float = 0.005
    url: str | None = None
    settings_file: Path | None = None
    token_file: Path | None = None
    restart_per_trial: bool = False
    memory_reserve_bytes: float = 2.0 * 2**30
