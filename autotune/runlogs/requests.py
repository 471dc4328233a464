"""How `REQUEST_RESULT` records find the run that they belong to, and what they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from autotune.runlogs.fields import Fields
from autotune.runlogs.model import RequestResults, RunResult
from traces.format import MAX_TOKENS

_ID: Final = ("request_id", "req_id", "request_index", "request_idx", "index", "idx", "id", "request")
_START: Final = ("sent", "send_time", "sent_time", "start", "start_time", "submit_time", "request_start")
_END: Final = ("end", "end_time", "finish", "finish_time", "completion_time", "done", "last_token", "last_token_time")
_ARRIVAL: Final = (
    "arrival", "arrival_time", "planned", "planned_arrival", "scheduled", "scheduled_time", "scheduled_arrival",
    "arrival_offset", "target_time",
)  # fmt: skip
_LATENCY: Final = ("latency", "e2e_latency", "e2e", "total_latency", "request_latency", "end_to_end_latency")
_PROMPT: Final = (
    "prompt_tokens", "prompt_len", "prompt_length", "input_tokens", "num_prompt_tokens", "input_len",
    "configured_prompt_tokens", "target_prompt_tokens",
)  # fmt: skip
_OUTPUT: Final = (
    "output_tokens", "output_len", "output_length", "completion_tokens", "num_output_tokens", "max_tokens",
    "configured_output_tokens", "target_output_tokens",
)  # fmt: skip


def joined(segment: Sequence[RunResult | Fields], notes: list[str]) -> list[RunResult]:
    """The runs of one server start, each with its requests.

    Requests stand before their run or after it, alike for all runs of a segment; which of the two, the segment's first
    entry tells. Requests that name another setting, and requests without a run, are left out with a note.
    """
    places = [(place, entry) for place, entry in enumerate(segment) if isinstance(entry, RunResult)]
    records = [entry for entry in segment if isinstance(entry, Fields)]
    if records and not places:
        notes.append(f"{records[0].where}: {len(records)} request results have no run beside them; left out")
    ends = [-1, *(place for place, _ in places), len(segment)]
    before = len(places) > 0 and places[0][0] > 0
    if before:
        ends[-2:] = [len(segment)]  # what stands behind the last run of such a segment is its own as well
    runs = []
    for order, (_, run) in enumerate(places):
        first, last = (ends[order], ends[order + 1]) if before else (ends[order + 1], ends[order + 2])
        own = [entry for entry in segment[first + 1 : last] if isinstance(entry, Fields)]
        runs.append(_with_requests(run, own, notes))
    return runs


def _with_requests(run: RunResult, records: Sequence[Fields], notes: list[str]) -> RunResult:
    if not records:
        return run
    own = [record for record in records if record.text("config_name", "config") in ("", run.config)]
    if len(own) < len(records):
        notes.append(
            f"{run.source}: {len(records) - len(own)} request results beside it name another setting; left out"
        )
    if not own:
        return run
    results = _results(own)
    if not np.isfinite(results.latency_s[results.ok]).any():
        known = ", ".join(own[0].names())
        notes.append(f"{own[0].where}: request results hold no latency under a known name (names: {known}); left out")
        return run
    if len(results) != run.num_requests:
        notes.append(f"{run.source}: {len(results)} request results for a run of {run.num_requests} requests")
    mean, own_mean = run.metrics.get("mean_latency_s"), float(np.nanmean(results.latency_s[results.ok]))
    if mean and run.whole and len(results) == run.num_requests and abs(own_mean / mean - 1) > 0.01:
        notes.append(f"{run.source}: its request results have {own_mean:.3f} s mean latency, the run says {mean:.3f} s")
    return replace(run, requests=results, metrics={**_figures(results), **run.metrics})


def _results(records: Sequence[Fields]) -> RequestResults:
    ids = [record.text(*_ID) for record in records]
    completed = [_completed(record) for record in records]
    columns = np.array([_times(record, ok) for record, ok in zip(records, completed, strict=True)], dtype=np.float64)
    lengths = np.array(
        [[record.whole(*names, most=MAX_TOKENS) or 0 for names in (_PROMPT, _OUTPUT)] for record in records], np.int64
    )
    return RequestResults(
        ids=tuple(ids) if all(ids) else (),
        ok=np.array(completed, dtype=np.bool_) & np.isfinite(columns[:, 0]),
        latency_s=columns[:, 0],
        ttft_s=columns[:, 1],
        tpot_s=columns[:, 2],
        arrival_s=columns[:, 3],
        prompt_tokens=lengths[:, 0],
        output_tokens=lengths[:, 1],
    )


def _times(record: Fields, completed: bool) -> tuple[float, float, float, float]:
    """Latency, TTFT, TPOT and arrival in seconds, NaN where unknown; a request that failed has an arrival alone."""
    arrival = record.seconds(*_ARRIVAL)
    if not completed:
        return math.nan, math.nan, math.nan, math.nan if arrival is None else arrival
    start, end = record.seconds(*_START), record.seconds(*_END)
    latency = record.seconds(*_LATENCY)
    if latency is None and start is not None and end is not None and end >= start:
        latency = end - start
    found = (
        latency,
        record.seconds("ttft", "time_to_first_token", "first_token_latency"),
        record.seconds("tpot", "time_per_output_token", "avg_tpot", "mean_tpot"),
        arrival,
    )
    latency_s, ttft_s, tpot_s, arrival_s = (math.nan if value is None else value for value in found)
    return latency_s, ttft_s, tpot_s, arrival_s


def _completed(record: Fields) -> bool:
    for name in ("success", "ok", "completed"):
        if (word := record.text(name).lower()) in ("false", "0", "no"):
            return False
        if word in ("true", "1", "yes"):
            return True
    if record.text("failed").lower() in ("true", "1", "yes"):
        return False
    status = record.text("status").lower()
    return not record.text("error") and status in ("", "ok", "success", "completed", "200", "finished")


def _figures(results: RequestResults) -> dict[str, float]:
    """Mean and P95 over the completed requests, for what the run itself does not say."""
    figures = {}
    for name in ("latency", "ttft", "tpot"):
        values = getattr(results, f"{name}_s")[results.ok]
        values = values[np.isfinite(values)]
        if len(values):
            figures[f"mean_{name}_s"] = float(values.mean())
            figures[f"p95_{name}_s"] = float(np.percentile(values, 95))
    return figures
