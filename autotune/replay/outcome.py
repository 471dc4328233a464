"""What a live replay leaves behind, and whether the client was on time so that it may be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from autotune import metrics
from autotune.records import FloatArray, IntArray, RequestRecords
from autotune.replay.answer import CLIENT_LIMIT, HTTP_STATUS, OK, UNSENT, RawAnswer, read_answer

LAG_BOUND_S: Final = 0.005
LAG_BOUND_OF_MEAN_LATENCY: Final = 0.01
MAX_STALLED_SHARE: Final = 0.01
_IN_SHORT: Final = 200
"""Characters of a failure's detail that a study's reason keeps."""

Turn = tuple[int, int, float]
"""A turn that waits for an answer: its place in the trace, the place of the turn before, and the think time in seconds."""


@dataclass(frozen=True, slots=True)
class LagSummary:
    """How late the client itself was.

    p50_s, p99_s, max_s: over the requests sent, sent_s - planned_s; NaN when none was.
    stalled_share: share of the run in which a timer of the client was later than the bound, from 0 to 1: in that time
        it could not have stamped an answer either.
    bound_s: what is allowed, 5 ms unless asked otherwise, plus 1 % of the mean latency of the completed requests.
    """

    p50_s: float
    p99_s: float
    max_s: float
    stalled_share: float
    bound_s: float

    def complaint(self) -> str | None:
        """Why the run is invalid; None when the client was on time."""
        remedy = "run it on a less busy machine, or give the client a core of its own"
        if not self.p99_s <= self.bound_s:
            return (
                f"the client sent late: P99 {1000 * self.p99_s:.1f} ms, allowed {1000 * self.bound_s:.1f} ms "
                f"(the bound and 1 % of mean latency); {remedy}"
            )
        if self.stalled_share > MAX_STALLED_SHARE:
            return (
                f"the client was held up for {100 * self.stalled_share:.1f} % of the run, allowed "
                f"{100 * MAX_STALLED_SHARE:g} %; {remedy}"
            )
        return None


@dataclass(frozen=True, eq=False)
class ReplayOutcome:
    """One trace as a live server answered it.

    records: as of every replay; `records.status` tells failures and unsent requests apart.
    valid: whether the measurement may be used; `reason` says why not. A valid run may have failed requests.
    cached_tokens: int64[N], prompt tokens served from the prefix cache, -1 where the server did not tell.
    details: N texts, more about each failure; empty for completed requests.
    counted: whether the server sent token ids with its text. Without them, tokens within a chunk are not known.
    about: trace, server, salt, times and client, as plain JSON values.
    """

    records: RequestRecords
    lag: LagSummary
    valid: bool
    reason: str | None
    cached_tokens: IntArray
    details: tuple[str, ...]
    counted: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)

    def accounting(self) -> dict[str, int]:
        """Requests by what became of them: planned = sent + unsent, sent = ok + failed, then the failures by reason."""
        failures = self.records.failures()
        unsent = failures.pop(UNSENT, 0)
        planned, failed = len(self.records), sum(failures.values())
        return {
            "planned": planned,
            "unsent": unsent,
            "sent": planned - unsent,
            "ok": planned - unsent - failed,
            "failed": failed,
            **dict(sorted(failures.items())),
        }

    def failure_details(self) -> dict[str, str]:
        """Each reason of failures to what its first one says, such as `HTTP 400: too long`, without secrets."""
        found: dict[str, str] = {}
        for status, detail in zip(self.records.status, self.details, strict=True):
            if status not in (OK, UNSENT) and detail:
                found.setdefault(status, _in_short(f"HTTP {detail}" if status == HTTP_STATUS else detail))
        return found

    def first_failure(self) -> str | None:
        """The first failed request in words; None when all completed."""
        for index, (status, detail) in enumerate(zip(self.records.status, self.details, strict=True)):
            if status not in ("ok", UNSENT):
                return f"request {index}: {status}" + (f": {detail}" if detail else "")
        return None


def _in_short(detail: str) -> str:
    """`detail` without secrets, cut to `_IN_SHORT` characters."""
    from autotune.export.flags import scrubbed_text  # its package reads results

    line = scrubbed_text(detail)
    return line if len(line) <= _IN_SHORT else line[: _IN_SHORT - 1] + "…"


def make_outcome(
    plan: Sequence[tuple[float, int, int]],
    answers: Mapping[int, RawAnswer],
    lateness_s: FloatArray,
    *,
    turns: Sequence[Turn] = (),
    stopped: str | None,
    about: Mapping[str, Any],
    max_lag_s: float = LAG_BOUND_S,
) -> ReplayOutcome:
    """Reads all `answers`.

    plan: arrival in seconds, prompt and output tokens of every request. Requests without an answer were not sent.
    turns: those whose planned time is a think time after the end of an answer; it is NaN where that never came.
    lateness_s: how late each tick of the client's heartbeat was. stopped: why the run was ended early, if it was.
    """
    n = len(plan)
    planned_s = np.array([arrival_s for arrival_s, _, _ in plan], dtype=np.float64)
    for index, before, think_s in turns:
        planned_s[index] = answers[before].done_s + think_s if index in answers else np.nan
    sent_s, first_s, last_s, done_s = (np.full(n, np.nan) for _ in range(4))
    status, details = [UNSENT] * n, [""] * n
    cached = np.full(n, -1, dtype=np.int64)
    chunk_time_s: list[float] = []
    chunk_tokens: list[int] = []
    offsets = np.zeros(n + 1, dtype=np.int64)
    counted = True
    for index, (_, prompt_tokens, output_tokens) in enumerate(plan):
        if (raw := answers.get(index)) is not None:
            reading = read_answer(raw, prompt_tokens, output_tokens)
            sent_s[index], done_s[index] = raw.sent_s, raw.done_s
            status[index], details[index] = reading.status, reading.detail
            cached[index] = reading.cached_tokens
            counted &= reading.counted
            chunk_time_s += reading.chunk_time_s
            chunk_tokens += reading.chunk_tokens
            if reading.chunk_time_s:
                first_s[index], last_s[index] = reading.chunk_time_s[0], reading.chunk_time_s[-1]
        offsets[index + 1] = len(chunk_time_s)
    for index, before, _ in turns:
        if index not in answers and status[before] != OK and stopped is None:
            ended = f"its session ended with request {before}"
            details[index] = details[before] if status[before] == UNSENT else ended
    records = RequestRecords(
        planned_s=planned_s,
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=last_s,
        done_s=done_s,
        prompt_tokens=np.array([prompt for _, prompt, _ in plan], dtype=np.int64),
        output_tokens=np.array([output for _, _, output in plan], dtype=np.int64),
        status=tuple(status),
        chunk_time_s=np.array(chunk_time_s, dtype=np.float64),
        chunk_tokens=np.array(chunk_tokens, dtype=np.int64),
        chunk_offsets=offsets,
        cached_tokens=cached,
    )
    lag = lag_summary(records, lateness_s, max_lag_s)
    reason = f"stopped: {stopped}" if stopped is not None else lag.complaint()
    if reason is None and CLIENT_LIMIT in details:
        reason = f"{CLIENT_LIMIT}; raise its limit (ulimit -n) or replay a lighter trace"
    return ReplayOutcome(records, lag, reason is None, reason, cached, tuple(details), counted, about)


def lag_summary(records: RequestRecords, lateness_s: FloatArray, max_lag_s: float = LAG_BOUND_S) -> LagSummary:
    """The client's lateness in `records` and at the ticks of its heartbeat."""
    lag_s = records.sent_s - records.planned_s
    lag_s = lag_s[~np.isnan(lag_s)]
    mean_latency_s = float(metrics.mean(metrics.latency_s(records)))
    bound_s = max_lag_s + LAG_BOUND_OF_MEAN_LATENCY * (mean_latency_s if mean_latency_s > 0 else 0.0)
    ends = records.done_s[~np.isnan(records.done_s)]
    span_s = float(ends.max() - np.nanmin(records.planned_s)) if len(ends) else float("nan")
    stalled_s = float(lateness_s[lateness_s > bound_s].sum())
    return LagSummary(
        p50_s=float(metrics.percentile(lag_s, 50)),
        p99_s=float(metrics.percentile(lag_s, 99)),
        max_s=float(lag_s.max()) if len(lag_s) else float("nan"),
        stalled_share=min(1.0, stalled_s / span_s) if span_s > 0 else 0.0,
        bound_s=bound_s,
    )
