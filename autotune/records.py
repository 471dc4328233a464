"""What one replay leaves behind: times of every request, and what the scheduler did. Knows no metric.

The simulator and the live replay emit the same `Replay`, so that every later stage is blind to where it came from;
`origin` is carried along only to be shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ppas_core.policy import PolicyParams

if TYPE_CHECKING:
    import pandas as pd

OK: Final = "ok"

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Origin(StrEnum):
    """Where a measurement comes from."""

    SIMULATED = "simulated"
    LIVE = "live"


@dataclass(frozen=True, eq=False)
class RequestRecords:
    """The requests of one replay, one row per request of the trace and in its order. Seconds count from the anchor.

    planned_s, sent_s, first_token_s, last_token_s, done_s: float64[N]; NaN where the event never happened.
    prompt_tokens, output_tokens: int64[N], as planned.
    status: N words, `ok` or the reason of the failure (`timeout`, `cut_stream`, …).
    chunk_time_s, chunk_tokens: float64[M] and int64[M], every chunk that carried tokens, request by request.
    chunk_offsets: int64[N + 1]; request i owns the chunks from chunk_offsets[i] up to chunk_offsets[i + 1].
    cached_tokens: int64[N], prompt tokens that came out of the prefix cache, -1 where the server did not tell; None where
        nothing is known of a cache.
    """

    planned_s: FloatArray
    sent_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    done_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    status: tuple[str, ...]
    chunk_time_s: FloatArray
    chunk_tokens: IntArray
    chunk_offsets: IntArray
    cached_tokens: IntArray | None = None

    def __len__(self) -> int:
        return len(self.status)

    @property
    def ok(self) -> NDArray[np.bool_]:
        """bool[N]: which requests completed as planned."""
        return np.array([word == OK for word in self.status], dtype=np.bool_)

    def failures(self) -> dict[str, int]:
        """Failed requests by reason."""
        counts: dict[str, int] = {}
        for word in self.status:
            if word != OK:
                counts[word] = counts.get(word, 0) + 1
        return counts


@dataclass(frozen=True, slots=True)
class ClientLag:
    """How late the client of a live replay sent, in seconds, and what was allowed at P99.

    attempts: replays that were made until the client was on time; only the last one is kept.
    """

    p50_s: float
    p99_s: float
    max_s: float
    bound_s: float
    attempts: int = 1


@dataclass(frozen=True, eq=False)
class Replay:
    """One trace served under one setting.

    trace_name, trace_digest, regime: the trace that was replayed.
    branch_steps: scheduler steps by the branch that set their budget.
    steps: live only, the engine's step log of this replay (columns of `ppas_core.vllm.steplog.StepRow`).
    client: live only, how late the client was.
    ack: live only, the engine's acknowledgement of the settings (`ppas_core.vllm.control.Ack`); None where a server was
        started with them.
    server_memory_bytes: live only, what the server's processes held after it; see `autotune.server_memory`.
    failure_details: live only, reason of failed requests to what the first of them says, in a line.
    """

    params: PolicyParams
    trace_name: str
    trace_digest: str
    regime: str
    origin: Origin
    requests: RequestRecords
    branch_steps: Mapping[str, int] = field(default_factory=dict)
    steps: pd.DataFrame | None = None
    client: ClientLag | None = None
    ack: Mapping[str, Any] | None = None
    server_memory_bytes: int | None = None
    failure_details: Mapping[str, str] = field(default_factory=dict)


def request_table(replays: Sequence[Replay]) -> pd.DataFrame:
    """One row per request of all `replays`, in order, without the chunks: trace, regime, origin, then its times."""
    import pandas as pd  # half a second of start-up, which most commands do not need

    sizes = [len(replay.requests) for replay in replays]
    labels = {
        "trace": np.repeat([replay.trace_name for replay in replays], sizes),
        "regime": np.repeat([replay.regime for replay in replays], sizes),
        "origin": np.repeat([str(replay.origin) for replay in replays], sizes),
    }
    columns = {
        name: np.concatenate([getattr(replay.requests, name) for replay in replays])
        for name in (
            "planned_s", "sent_s", "first_token_s", "last_token_s", "done_s", "prompt_tokens", "output_tokens",
        )
    }  # fmt: skip
    columns["cached_tokens"] = np.concatenate(
        [np.full(len(r), -1) if r.cached_tokens is None else r.cached_tokens for r in (x.requests for x in replays)]
    )
    status = [word for replay in replays for word in replay.requests.status]
    return pd.DataFrame({**labels, **columns, "status": status})
