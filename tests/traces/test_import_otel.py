"""vLLM's spans come in from the collector's file; every span is kept, or left out for a named reason."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces.format import TraceRequest, read_trace, write_trace
from traces.importers import Imported, import_trace
from traces.importers.otel import FAILED, OTHER_PROGRAM, OTHER_SPAN, OUTPUT, PROMPT, REPEATED, SEVERAL

START_NS = 1_759_813_207_532_900_363


def attribute(key: str, value: object) -> dict[str, Any]:
    kind = "intValue" if isinstance(value, int) else "doubleValue" if isinstance(value, float) else "stringValue"
    return {"key": key, "value": {kind: str(value) if kind == "intValue" else value}}


def span(start_ns: object, prompt: object = 550, output: object = 9, name: str = "s", **more: object) -> dict[str, Any]:
    """A span as vLLM ends it and the collector writes it: whole numbers of 64 bits as text."""
    attributes = {PROMPT: prompt, OUTPUT: output, "gen_ai.latency.e2e": 0.25, "gen_ai.request.id": name, **more}
    return {
        "traceId": "5b8efff798038103d269b633813fc60c", "spanId": name, "name": "llm_request", "kind": 2,
        "startTimeUnixNano": str(start_ns), "endTimeUnixNano": str(start_ns), "status": {},
        "attributes": [attribute(key, value) for key, value in attributes.items() if value is not None],
    }  # fmt: skip


def export(*spans: dict[str, Any], scopes: str = "scopeSpans") -> dict[str, Any]:
    return {
        "resourceSpans": [{"resource": {"attributes": []}, scopes: [{"scope": {"name": "vllm"}, "spans": list(spans)}]}]
    }


def load(tmp_path: Path, *documents: object, **options: object) -> Imported:
    path = tmp_path / "traces.json"
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return import_trace(path, **options)  # type: ignore[arg-type]


def test_spans_of_requests_come_in_to_the_nanosecond_in_order_of_arrival(tmp_path: Path) -> None:
    imported = load(
        tmp_path,
        export(span(START_NS + 7_000_000_001, name="b"), span(START_NS, 20, 3, name="a")),
        export(span(START_NS + 5, 21, 4, name="c")),
    )
    assert imported.ledger.format == "otel"
    assert imported.trace.requests == (
        TraceRequest(0.0, 20, 3),
        TraceRequest(5e-9, 21, 4),
        TraceRequest(7.000000001, 550, 9),
    )
    assert imported.ledger.offset == f"{START_NS} ns"


@pytest.mark.parametrize("scopes", ["scopeSpans", "instrumentationLibrarySpans"])
def test_one_document_over_many_lines_and_old_names_come_in_too(tmp_path: Path, scopes: str) -> None:
    path = tmp_path / "traces.json"
    path.write_text(json.dumps(export(span(START_NS), scopes=scopes), indent=2))
    assert import_trace(path).trace.requests == (TraceRequest(0.0, 550, 9),)


def test_every_span_that_is_no_request_has_its_reason(tmp_path: Path) -> None:
    failed = {**span(START_NS, name="f"), "status": {"code": 2, "message": "x"}}
    imported = load(
        tmp_path,
        export(
            span(START_NS, name="a"),
            span(START_NS, name="a"),
            failed,
            span(START_NS, name="n", **{"gen_ai.request.n": 3}),
            span(START_NS, None, None, name="o"),
            span(START_NS, None, None, name="p", **{"gen_ai.usage.input_tokens": 5}),
            span(START_NS, output=0, name="z"),
            span(START_NS + 1, name="first", **{"gen_ai.request.id": "two"}),
            span(START_NS + 1, name="second", **{"gen_ai.request.id": "two"}),
            span(START_NS + 2, name="later", **{"gen_ai.request.id": "a"}),
        ),
        {"resourceSpans": []},
        {"resourceLogs": []},
    )
    assert imported.ledger.rows_read == 10
    assert imported.ledger.dropped == {
        REPEATED: 1, FAILED: 1, SEVERAL: 3, OTHER_SPAN: 1, OTHER_PROGRAM: 1, "without output tokens": 1,
    }  # fmt: skip
    assert len(imported.trace.requests) == 2


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (export(span(START_NS, output=None)), "gen_ai.usage.completion_tokens is empty"),
        (export(span(START_NS, prompt=0)), "gen_ai.usage.prompt_tokens is 0"),
        (export(span(START_NS, prompt=1.5)), "gen_ai.usage.prompt_tokens is 1.5"),
        (export(span(-5)), "startTimeUnixNano is '-5'"),
        (export({**span(START_NS), "startTimeUnixNano": None}), "startTimeUnixNano is empty"),
        (export({**span(START_NS), "attributes": "x"}), "attributes is 'x'"),
        ({"resourceSpans": 5}, "resourceSpans is 5"),
        ({"resourceSpans": [{"scopeSpans": [5]}]}, r"scopeSpans is \[5\]"),
        ({"resourceSpans": []}, "it has no rows"),
        (export(span(START_NS, None, None)), "1 other spans than a request's"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_row_and_value(tmp_path: Path, document: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        load(tmp_path, document)
    assert str(tmp_path) in str(caught.value)


PLAIN = st.one_of(st.integers(), st.integers(0, 900), st.floats(), st.text(max_size=3), st.booleans(), st.none())
INNER_KEYS = st.sampled_from(["intValue", "stringValue", "key", "value", "code"])
VALUES = st.recursive(
    PLAIN | st.just(str(START_NS)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(INNER_KEYS, inner, max_size=2),
    max_leaves=5,
)
PLACES = st.sampled_from(["traceId", "spanId", "startTimeUnixNano", "attributes", "status", "name"])


@given(st.lists(st.tuples(PLACES, VALUES, st.integers(0, 900), st.integers(0, 20), VALUES), min_size=1, max_size=6))
def test_any_spans_give_a_trace_whose_account_adds_up_or_one_message(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, object, int, int, object]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    spans = []
    for place, (key, value, prompt, output, extra) in enumerate(parts):
        good = span(START_NS + place * 10**9, prompt, output, name=str(place))
        good["attributes"].append({"key": PROMPT, "value": extra} if output > 15 else extra)
        spans.append({**good, key: value} if prompt % 2 else good)
    path.write_text(json.dumps(export(*spans)))
    refusal = ""
    try:
        imported = import_trace(path)
    except InvalidInput as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(str(path))
        return
    assert imported.ledger.rows_read == len(spans)
    assert imported.ledger.rows_read == imported.ledger.kept + sum(imported.ledger.dropped.values())
    write_trace(imported.trace, path.with_name("fuzz.jsonl"))
    assert read_trace(path.with_name("fuzz.jsonl")) == imported.trace


@pytest.mark.parametrize("version", ["0.27.1", "0.32.0"])
def test_spans_that_vllm_really_sent_come_in(version: str) -> None:
    """Sent by the CPU build with a tiny model to a receiver that wrote them as the collector's file exporter does."""
    imported = import_trace(Path(__file__).with_name("vllm_samples") / f"{version}.spans.jsonl")
    assert imported.ledger.format == "otel"
    assert imported.ledger.dropped == {OTHER_SPAN: 3, SEVERAL: 2}
    found = [(request.prompt_tokens, request.output_tokens) for request in imported.trace.requests]
    assert found[:6] == [(220, 5)] * 4 + [(70, 7), (80, 6)]
    assert len(found) == 9
    times_s = [request.arrival_s for request in imported.trace.requests]
    assert times_s[0] == 0.0
    assert all(0.02 < later - earlier < 30 for earlier, later in pairwise(times_s))
