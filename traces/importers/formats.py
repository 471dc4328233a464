"""Which formats are read, how each is known by its column names, and which of its columns means what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

OWN: Final = "ppas"

Row = Mapping[str, Any]


def _nothing_to_skip(row: Row) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Format:
    """One foreign format: the columns by name, and what they mean.

    kind: "csv", "jsonl", "document" (one JSON object for the whole run) or "log" (lines of words).
    time, prompt, output: the columns of the arrival time and the two lengths.
    unit: the unit of `time`, one of values.TIME_UNITS.
    hashes, block_size: the column of the block ids and the prompt tokens that each stands for, if there is one.
    session: the column that names the conversation, if there is one.
    any_order: rows are written when requests end, so that their order says nothing.
    skip: why a row is to be left out, or None.
    source: where the format is defined.
    """

    name: str
    kind: str
    time: str
    prompt: str
    output: str
    unit: str
    source: str
    hashes: str | None = None
    block_size: int | None = None
    session: str | None = None
    any_order: bool = False
    skip: Callable[[Row], str | None] = _nothing_to_skip

    @property
    def needed(self) -> tuple[str, str, str]:
        """The columns without which a row cannot be read."""
        return self.time, self.prompt, self.output

    def missing(self, columns: Collection[str]) -> list[str]:
        """Needed columns that `columns` lacks."""
        return [column for column in self.needed if column not in columns]


def _skip_aiperf(row: Row) -> str | None:
    if row.get("benchmark_phase", "profiling") != "profiling":
        return "from another phase than profiling"
    if row.get("was_cancelled") is True:
        return "cancelled"
    return "failed" if row.get("error") is not None else None


def _skip_guidellm(row: Row) -> str | None:
    status = row.get("status")
    return None if status == "successful" else str(status)


def _skip_named(row: Row) -> str | None:
    reason = row.get("reason")
    return None if reason is None else str(reason)


FORMATS: Final = {
    found.name: found
    for found in (
        Format(
            name="azure", kind="csv", time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens", unit="date",
            source="Azure/AzurePublicDataset, LLM inference traces of 2023 (no zone) and 2024 (with a zone)",
        ),
        Format(
            name="vidur", kind="csv", time="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens",
            unit="s", source="microsoft/vidur, processed traces",
        ),
        Format(
            name="burstgpt", kind="csv", time="Timestamp", prompt="Request tokens", output="Response tokens", unit="s",
            session="Session ID", source="HPMLL/BurstGPT, releases 1 and 2, and 3 with its session columns",
        ),
        Format(
            name="mooncake", kind="jsonl", time="timestamp", prompt="input_length", output="output_length", unit="ms",
            hashes="hash_ids", block_size=512, session="session_id", source="kvcache-ai/Mooncake, FAST'25 traces",
        ),
        Format(
            name="bailian", kind="jsonl", time="timestamp", prompt="input_length", output="output_length", unit="s",
            hashes="hash_ids", block_size=16, source="alibaba-edu/qwen-bailian-usagetraces-anon",
        ),
        Format(
            name="vllm-timed", kind="jsonl", time="timestamp", prompt="input_length", output="output_length", unit="s",
            hashes="hash_ids", block_size=16, source="vLLM 0.32, vllm bench serve --dataset-name timed_trace",
        ),
        Format(
            name="aiperf", kind="jsonl", time="request_start_ns", prompt="input_sequence_length",
            output="output_sequence_length", unit="ns", session="x_correlation_id", any_order=True, skip=_skip_aiperf,
            source="ai-dynamo/aiperf, profile_export.jsonl of a run",
        ),
        Format(
            name="guidellm", kind="document", time="request_start_time", prompt="prompt_tokens", output="output_tokens",
            unit="s", any_order=True, skip=_skip_guidellm, source="vllm-project/guidellm, benchmarks.json of a run",
        ),
        Format(
            name="vllm-log", kind="log", time="received", prompt="prompt_tokens", output="output_tokens", unit="s",
            hashes="blocks", block_size=16, skip=_skip_named, source="vLLM 0.27 and 0.32, --enable-log-requests",
        ),
        Format(
            name="otel", kind="jsonl", time="startTimeUnixNano", prompt="gen_ai.usage.prompt_tokens",
            output="gen_ai.usage.completion_tokens", unit="ns", any_order=True, skip=_skip_named,
            source="vLLM 0.27 and 0.32, --otlp-traces-endpoint, through the collector's file exporter (OTLP/JSON)",
        ),
    )
}  # fmt: skip
NAMES: Final = (OWN, *FORMATS)
