"""What each metric means. Nowhere else is a percentile, a TTFT or a TPOT computed.

Times are seconds from the replay's anchor. Latency and TTFT count from the planned arrival, so that a client or a
server that falls behind cannot hide it. Percentiles interpolate linearly between order statistics.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from autotune.records import FloatArray, IntArray, RequestRecords
from ppas_core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Limits:
    """Service levels for goodput; None means no limit. One-token outputs have no TPOT and pass its limit."""

    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise InvalidInput(f"limit {name} is {value!r}; allowed: a number of seconds above 0")


NO_LIMITS: Final = Limits()


def latency_s(records: RequestRecords) -> FloatArray:
    """End-to-end latency per request: last_token_s - planned_s. NaN for failed requests."""
    return _of_ok(records, records.last_token_s - records.planned_s)


def latency_from_sent_s(records: RequestRecords) -> FloatArray:
    """Latency as the server sees it: last_token_s - sent_s. NaN for failed requests."""
    return _of_ok(records, records.last_token_s - records.sent_s)


def ttft_s(records: RequestRecords) -> FloatArray:
    """Time to first token per request: first_token_s - planned_s. NaN for failed requests."""
    return _of_ok(records, records.first_token_s - records.planned_s)


def tpot_s(records: RequestRecords) -> FloatArray:
    """Time per output token: (last_token_s - first_token_s) / (n - 1). NaN for failed requests and for n = 1."""
    n = records.output_tokens
    spans = records.last_token_s - records.first_token_s
    values = np.full(len(records), np.nan)
    np.divide(spans, n - 1, out=values, where=n > 1)
    return _of_ok(records, values)


def itl_s(records: RequestRecords) -> FloatArray:
    """Gaps between the token-carrying chunks of a request, pooled over the completed requests; never spread."""
    gaps = np.diff(records.chunk_time_s)
    keep = np.ones(len(gaps), dtype=np.bool_)
    starts = records.chunk_offsets[1:-1]
    keep[starts[(starts > 0) & (starts <= len(gaps))] - 1] = False
    owner = np.repeat(np.arange(len(records)), np.diff(records.chunk_offsets))
    keep &= records.ok[owner[:-1]] if len(owner) else keep
    return np.asarray(gaps[keep], dtype=np.float64)


def makespan_s(records: RequestRecords) -> float:
    """Last completion minus first planned arrival; NaN when nothing completed."""
    done = records.last_token_s[records.ok]
    return float(done.max() - np.nanmin(records.planned_s)) if len(done) else float("nan")


def meets_limits(records: RequestRecords, limits: Limits) -> FloatArray:
    """1.0 for each completed request within every limit, else 0.0 (failed requests too)."""
    good = records.ok.copy()
    for values, limit in (
        (latency_s(records), limits.latency_s),
        (ttft_s(records), limits.ttft_s),
        (np.where(records.output_tokens > 1, tpot_s(records), 0.0), limits.tpot_s),
    ):
        if limit is not None:
            good &= values <= limit
    return good.astype(np.float64)


def mean(values: FloatArray) -> FloatArray:
    """Mean over the last axis, of the defined values; NaN where there is none."""
    if np.isnan(values).any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a row without any value is NaN, and meant to be
            return np.asarray(np.nanmean(values, axis=-1), dtype=np.float64)
    return np.asarray(values.mean(axis=-1) if values.shape[-1] else np.nan, dtype=np.float64)


def percentile(values: FloatArray, q: float) -> FloatArray:
    """The q-th percentile (0 to 100) over the last axis, of the defined values; linear interpolation, else NaN."""
    if np.isnan(values).any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # as in `mean`
            return np.asarray(np.nanpercentile(values, q, axis=-1), dtype=np.float64)
    return np.asarray(np.percentile(values, q, axis=-1) if values.shape[-1] else np.nan, dtype=np.float64)


def percentile_near(rows: FloatArray, q: float, low: float, high: float) -> FloatArray:
    """What `percentile` gives for every row of float64[k, n], bit for bit, sooner where it lies between low and high.

    Only the values of a row from low to high are sorted; those below are counted. A row where that does not reach the
    order statistics, or leaves out too little, is left to `percentile`.
    """
    found = np.empty(len(rows))
    for index, row in enumerate(rows):
        place = (len(row) - np.count_nonzero(np.isnan(row)) - 1) * (q / 100)
        first = int(max(place, 0.0))
        below = np.count_nonzero(row < low)
        near = row[(row >= low) & (row <= high)]
        if not below <= first < below + len(near) - 1 or len(near) > len(row) // 4:
            found[index] = percentile(row, q)
            continue
        near.sort()
        before, after = near[first - below], near[first - below + 1]
        share = place - first
        # As numpy does it, which keeps to the nearer end.
        step = after - before
        found[index] = before + step * share if share < 0.5 else after - step * (1 - share)
    return found


def failure_adjusted_percentile(values: FloatArray, ok: np.ndarray[tuple[int], np.dtype[np.bool_]], q: float) -> float:
    """The q-th percentile with failed requests at +inf: a server that refuses does not look faster."""
    adjusted = np.sort(np.where(ok, values, np.inf))
    place = (len(adjusted) - 1) * q / 100
    low, high = int(np.floor(place)), int(np.ceil(place))
    if np.isinf(adjusted[high]):
        return float(adjusted[low]) if low == place else float("inf")
    return float(adjusted[low] + (adjusted[high] - adjusted[low]) * (place - low))


Sample = Callable[[RequestRecords], FloatArray]
Reduce = Callable[[FloatArray], FloatArray]
"""Takes float64[..., n] and gives float64[...]."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per replay.

    name: as used in study files and results; unit suffix included.
    label: for people.
    better: which direction is an improvement.
    sample, reduce: the number is reduce(sample(records)); both None for a metric of the replay as a whole.
    per_request: whether `sample` gives one value per request of the trace, so that two settings pair up by row.
    quantile: the percentile (0 to 100) that `reduce` takes; None where it is the mean, or nothing.
    """

    name: str
    label: str
    better: Literal["lower", "higher"] = "lower"
    sample: Sample | None = None
    reduce: Reduce | None = None
    per_request: bool = False
    quantile: float | None = None


def _p50(values: FloatArray) -> FloatArray:
    return percentile(values, 50)


def _p95(values: FloatArray) -> FloatArray:
    return percentile(values, 95)


def _p99(values: FloatArray) -> FloatArray:
    return percentile(values, 99)


METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        *(
            Metric(f"{prefix}_{base}_s", f"{label} {name}", "lower", function, reduce, base != "itl", quantile)
            for base, name, function in (
                ("latency", "end-to-end latency", latency_s),
                ("ttft", "TTFT", ttft_s),
                ("tpot", "TPOT", tpot_s),
                ("itl", "ITL", itl_s),
            )
            for prefix, label, reduce, quantile in (
                ("mean", "mean", mean, None), ("p50", "P50", _p50, 50.0), ("p95", "P95", _p95, 95.0),
                ("p99", "P99", _p99, 99.0),
            )
        ),
        Metric("makespan_s", "makespan"),
        Metric("goodput_per_s", "goodput", "higher"),
    )
}  # fmt: skip
"""Every metric by name."""


def metric(name: str) -> Metric:
    """The metric called `name`. Raises InvalidInput with the known names."""
    try:
        return METRICS[name]
    except KeyError:
        raise InvalidInput(f"no metric {name!r}; known: {', '.join(METRICS)}") from None


def sign(name: str) -> float:
    """1 where lower is better, else -1: what a difference of logs is multiplied by to be a deficit."""
    return 1.0 if metric(name).better == "lower" else -1.0


def value(name: str, records: RequestRecords, limits: Limits = NO_LIMITS) -> float:
    """The metric `name` of one replay; NaN when it is undefined there (no completed request, all outputs one token)."""
    definition = metric(name)
    if definition.sample is not None and definition.reduce is not None:
        return float(definition.reduce(definition.sample(records)))
    if name == "makespan_s":
        return makespan_s(records)
    span_s = makespan_s(records)
    return float(meets_limits(records, limits).sum() / span_s) if span_s > 0 else float("nan")


def values_by_trace(name: str, records: RequestRecords, trace_start: IntArray) -> FloatArray:
    """float64[T]: a per-request metric of each of T traces whose requests lie end to end in `records`.

    trace_start: int64[T + 1], the traces' places. The same numbers as `value` gives trace by trace, at a fraction of
    the cost: a sweep of a whole space asks for millions. Raises InvalidInput for a metric that is not per request.
    """
    definition = metric(name)
    if definition.sample is None or not definition.per_request:
        raise InvalidInput(f"metric {name} is not made of one value per request")
    sizes = np.diff(trace_start)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    table = np.full((len(sizes), int(sizes.max())), np.nan)
    table[rows, np.arange(len(rows)) - np.repeat(trace_start[:-1], sizes)] = definition.sample(records)
    table.sort(axis=1)  # NaN, where there is no value, goes last
    count = np.count_nonzero(~np.isnan(table), axis=1)
    if definition.quantile is None:
        sums = np.nansum(table, axis=1)
        return np.asarray(np.divide(sums, count, out=np.full(len(sizes), np.nan), where=count > 0), dtype=np.float64)
    place = np.maximum(count - 1, 0) * (definition.quantile / 100)
    low = place.astype(np.int64)
    every = np.arange(len(sizes))
    below, above = table[every, low], table[every, np.minimum(low + 1, np.maximum(count - 1, 0))]
    return np.asarray(below + (above - below) * (place - low), dtype=np.float64)


def summarize(records: RequestRecords, limits: Limits = NO_LIMITS) -> dict[str, float]:
    """Every metric of one replay by name, and attainment: the share of all *planned* requests that meet the limits."""
    summary = {name: value(name, records, limits) for name in METRICS}
    summary["attainment"] = float(meets_limits(records, limits).mean())
    summary["p95_latency_failure_adjusted_s"] = failure_adjusted_percentile(latency_s(records), records.ok, 95)
    return summary


def _of_ok(records: RequestRecords, values: FloatArray) -> FloatArray:
    return np.where(records.ok, values, np.nan)
