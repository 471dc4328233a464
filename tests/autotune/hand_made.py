"""Replays written down by hand."""

import numpy as np

from autotune.records import RequestRecords


def records(
    planned: list[float],
    tokens: list[list[float]],
    *,
    sent: list[float] | None = None,
    status: list[str] | None = None,
) -> RequestRecords:
    """A replay whose request i was planned at planned[i] and got its tokens at the times tokens[i]."""
    lengths = [len(times) for times in tokens]
    return RequestRecords(
        planned_s=np.array(planned, dtype=float),
        sent_s=np.array(sent if sent is not None else planned, dtype=float),
        first_token_s=np.array([times[0] if times else np.nan for times in tokens]),
        last_token_s=np.array([times[-1] if times else np.nan for times in tokens]),
        done_s=np.array([times[-1] if times else np.nan for times in tokens]),
        prompt_tokens=np.full(len(planned), 100),
        output_tokens=np.array(lengths),
        status=tuple(status or ["ok"] * len(planned)),
        chunk_time_s=np.array([time for times in tokens for time in times], dtype=float),
        chunk_tokens=np.ones(sum(lengths), dtype=np.int64),
        chunk_offsets=np.concatenate(([0], np.cumsum(lengths))),
    )
