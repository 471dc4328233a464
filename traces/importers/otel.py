"""The requests in vLLM's OpenTelemetry spans, as the collector's file exporter writes them, made flat.

vLLM (--otlp-traces-endpoint) ends one span per request, named llm_request: it starts at the arrival and carries the
lengths. The collector's file exporter writes OTLP/JSON, one object with `resourceSpans` on each line. Every span is a
row; those of other programs and of vLLM's inner parts are left out by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidInput
from traces.importers.rows import Row, json_document, json_rows
from traces.importers.values import shown

TIME: Final = "startTimeUnixNano"
PROMPT: Final = "gen_ai.usage.prompt_tokens"
OUTPUT: Final = "gen_ai.usage.completion_tokens"
OTHER_SPAN: Final = "other spans than a request's"
OTHER_PROGRAM: Final = "spans of another program than vLLM (gen_ai.usage.input_tokens)"
SEVERAL: Final = "several answers to one prompt"
FAILED: Final = "failed"
REPEATED: Final = "spans that are in the file twice"
_OTHER_PROMPT: Final = "gen_ai.usage.input_tokens"
_N: Final = "gen_ai.request.n"
_ID: Final = "gen_ai.request.id"
_ERROR: Final = (2, "2", "STATUS_CODE_ERROR")
_PARTS: Final = ("resourceSpans", "scopeSpans", "spans")
_OLD: Final = {"scopeSpans": "instrumentationLibrarySpans"}


def otel_rows(path: Path) -> Iterator[Row]:
    """The spans of a file; a row's number is its line, so spans of one export share it."""
    several = _several(path)
    seen: set[int] = set()
    for number, span, row in _all(path):
        if row["reason"] is None:
            own = hash((str(span.get("traceId")), str(span.get("spanId"))))
            if span.get("spanId") and own in seen:
                row["reason"] = REPEATED
            elif _request(row) in several:
                row["reason"] = SEVERAL
            seen.add(own)
        yield number, row


def _several(path: Path) -> set[int]:
    """Requests with several answers: vLLM ends a span for each, with the request's id and arrival and `n` of 1."""
    spans: dict[int, int] = {}
    several = set()
    for _, span, row in _all(path):
        if row["reason"] is None and row.get(_ID):
            own = hash((str(span.get("traceId")), str(span.get("spanId"))))
            if spans.setdefault(_request(row), own) != own:
                several.add(_request(row))
    return several


def _request(row: Mapping[str, Any]) -> int:
    return hash((str(row.get(_ID)), str(row[TIME])))


def _all(path: Path) -> Iterator[tuple[int, Mapping[str, Any], dict[str, Any]]]:
    for number, document in _documents(path):
        for span in _spans(path, number, document):
            yield number, span, _flat(path, number, span)


def _documents(path: Path) -> Iterator[Row]:
    """The objects of the file: one a line, or one over many lines."""
    rows = json_rows(path)
    try:
        first = next(rows, None)
    except InvalidInput:
        yield 1, json_document(path)
        return
    if first is not None:
        yield first
    yield from rows


def _spans(path: Path, number: int, document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    level: list[Mapping[str, Any]] = [document]
    for part in _PARTS:
        below: list[Mapping[str, Any]] = []
        for holder in level:
            name = part if part in holder else _OLD.get(part, part)
            inner = holder.get(name)
            if inner is None:
                continue
            if not isinstance(inner, list) or not all(isinstance(item, dict) for item in inner):
                raise InvalidInput(f"{path}, row {number}: {name} is {shown(inner)}; allowed: a list of JSON objects")
            below += inner
        level = below
    yield from level


def _flat(path: Path, number: int, span: Mapping[str, Any]) -> dict[str, Any]:
    """A span's start, its attributes by name, and why it is left out, if it is."""
    found: dict[str, Any] = {}
    attributes = span.get("attributes")
    if attributes is not None and not isinstance(attributes, list):
        raise InvalidInput(f"{path}, row {number}: attributes is {shown(attributes)}; allowed: a list")
    for item in attributes or []:
        if isinstance(item, dict) and isinstance(item.get("key"), str):
            found[item["key"]] = _value(item.get("value"))
    row = {**found, TIME: _whole(span.get(TIME)), "reason": _reason(span, found)}
    if row["reason"] is None:
        row.setdefault(OUTPUT, None)
    return row


def _reason(span: Mapping[str, Any], attributes: Mapping[str, Any]) -> str | None:
    if PROMPT not in attributes:
        return OTHER_PROGRAM if _OTHER_PROMPT in attributes else OTHER_SPAN
    status = span.get("status")
    if isinstance(status, dict) and status.get("code") in _ERROR:
        return FAILED
    answers = attributes.get(_N)
    return SEVERAL if isinstance(answers, int) and answers > 1 else None


def _value(value: object) -> object:
    """An attribute's value; whole numbers of 64 bits stand as text in JSON."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, inner),) = value.items()
    return _whole(inner) if kind == "intValue" else inner


def _whole(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 25 else value
