"""The rows of recorded benchmark runs, AIPerf's and guidellm's, made flat: one level of columns, as in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppas_core.errors import InvalidInput
from traces.importers.rows import Row, json_document, json_rows
from traces.importers.values import shown

_STATUSES = {"successful": "successful", "incomplete": "incomplete", "errored": "failed"}


def aiperf_rows(path: Path) -> Iterator[Row]:
    """The records of an AIPerf run: its metadata, its metrics' values and the error."""
    for number, record in json_rows(path):
        metadata, metrics = record.get("metadata"), record.get("metrics")
        if not isinstance(metadata, dict):
            raise InvalidInput(f"{path}, row {number}: metadata is {shown(metadata)}; allowed: a JSON object")
        if metrics is not None and not isinstance(metrics, dict):
            raise InvalidInput(f"{path}, row {number}: metrics is {shown(metrics)}; allowed: a JSON object or null")
        flat = {name: item["value"] for name, item in (metrics or {}).items() if _is_metric(item)}
        yield number, {**flat, **metadata, "error": record.get("error")}


def guidellm_rows(path: Path, benchmark: int | None) -> Iterator[Row]:
    """The requests of one benchmark of a guidellm report, each with its status; a row's number is its place in them.

    benchmark: which one, from 1; needed when the report has several. Refused when the report holds only a sample of the
    requests, as the load would come out too low.
    """
    benchmarks = json_document(path).get("benchmarks")
    if not isinstance(benchmarks, list) or not benchmarks:
        raise InvalidInput(f"{path}: 'benchmarks' is {shown(benchmarks)}; allowed: a list with at least one benchmark")
    if benchmark is None and len(benchmarks) > 1:
        raise InvalidInput(
            f"{path}: holds {len(benchmarks)} benchmarks; name one with --benchmark, 1 to {len(benchmarks)}"
        )
    place = 1 if benchmark is None else benchmark
    if not 1 <= place <= len(benchmarks):
        raise InvalidInput(f"{path}: benchmark is {place}; allowed: 1 to {len(benchmarks)}")
    where = f"{path}: benchmark {place}"
    chosen = benchmarks[place - 1]
    groups = chosen.get("requests") if isinstance(chosen, dict) else None
    if not isinstance(groups, dict):
        raise InvalidInput(f"{where}: its requests are {shown(groups)}; allowed: lists by status")
    number = 0
    for status, reason in _STATUSES.items():
        requests = groups.get(status) or []
        if not isinstance(requests, list):
            raise InvalidInput(f"{where}: its {status} requests are {shown(requests)}; allowed: a list")
        _refuse_sample(where, status, len(requests), chosen)
        for request in requests:
            number += 1
            if not isinstance(request, dict):
                raise InvalidInput(f"{where}, row {number}: is {shown(request)}; allowed: a JSON object")
            yield number, {**request, "status": reason}


def _is_metric(item: object) -> bool:
    return isinstance(item, dict) and "value" in item


def _refuse_sample(where: str, status: str, held: int, benchmark: Mapping[str, Any]) -> None:
    """Newer reports count the requests in `metrics`, older ones beside it."""
    metrics = benchmark.get("metrics")
    totals = benchmark.get("request_totals") or (metrics.get("request_totals") if isinstance(metrics, dict) else None)
    total = totals.get(status) if isinstance(totals, dict) else None
    if type(total) is int and total > held:
        raise InvalidInput(
            f"{where}: holds {held} of {total} {status} requests; allowed: all of them. Run guidellm without "
            "--sample-requests"
        )
