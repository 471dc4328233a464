"""Which format a file is in, from its content."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidInput
from traces.importers.formats import FORMATS, NAMES, OWN
from traces.importers.rows import csv_columns, first_character, json_document, json_rows
from traces.importers.vllm_log import is_vllm_log

_SAMPLE_ROWS: Final = 200


def detect(path: Path) -> str:
    """The name of the format. Raises InvalidInput, with what the file has, when none or several fit."""
    character = first_character(path)
    if character != "{" and is_vllm_log(path):
        return "vllm-log"
    if character == "[":
        raise InvalidInput(
            f"{path}: is one JSON array; allowed: one JSON object a line. Write each row on its own line"
        )
    if character == "{":
        return _detect_json(path)
    columns = csv_columns(path)
    for name, found in FORMATS.items():
        if found.kind == "csv" and not found.missing(columns):
            return name
    raise _unknown(path, columns)


def _detect_json(path: Path) -> str:
    rows: list[Mapping[str, Any]] = []
    try:
        rows.extend(row for _, row in islice(json_rows(path), _SAMPLE_ROWS))
    except InvalidInput:
        # A broken row further down is the import's to report; a broken first one may begin a document of many lines.
        if not rows:
            rows.append(json_document(path))
    first = rows[0].keys()
    if "format" in first and "digest" in first:
        return OWN
    if "benchmarks" in first:
        return "guidellm"
    if "resourceSpans" in first:
        return "otel"
    if {"asctime", "message"} <= first:
        return "vllm-log"
    if {"metadata", "metrics"} <= first:
        return "aiperf"
    if FORMATS["mooncake"].missing(first):
        raise _unknown(path, first)
    if "chat_id" in first:
        return "bailian"
    # Same columns, but other units: the block size tells them apart.
    fits = dict.fromkeys(("mooncake", "vllm-timed"), 0)
    for row in rows:
        blocks, prompt = row.get("hash_ids"), row.get("input_length")
        if isinstance(blocks, list) and blocks and type(prompt) is int:
            for name in fits:
                fits[name] += -(-prompt // (FORMATS[name].block_size or 1)) == len(blocks)
    if fits["mooncake"] == fits["vllm-timed"]:
        raise InvalidInput(
            f"{path}: may be mooncake (ms, blocks of 512) or vllm-timed (s, blocks of 16), and the hash_ids do not "
            "tell; name it: --format mooncake or --format vllm-timed"
        )
    return max(fits, key=lambda name: fits[name])


def _unknown(path: Path, columns: Collection[str]) -> InvalidInput:
    shown = ", ".join(repr(name) for name in islice(columns, 12))
    return InvalidInput(
        f"{path}: is in no known format; its columns are {shown}; known: {', '.join(NAMES)}. "
        "Rename the columns, or name the format (--format) to see what it lacks"
    )
