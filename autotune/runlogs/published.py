"""The sweep logs published with the paper: what a benchmark printed, with one dict literal per run among other lines.

A run's line begins with `{'trace_id':`; logs of the vLLM 0.27.1 generation also hold one `REQUEST_RESULT:` dict per
request. Everything else is read only for the server's command and the names of its settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from autotune.runlogs import requests
from autotune.runlogs.fields import Fields
from autotune.runlogs.literal import parse_dict
from autotune.runlogs.model import RunLog, RunResult, Workload
from ppas_core.errors import InvalidInput
from traces.generate import parse_phases
from traces.lines import numbered_lines

_ROW: Final = re.compile(r"[^{]*(\{\s*['\"]trace_id['\"]\s*:.*)", re.DOTALL)
_REQUEST: Final = re.compile(r"\s*REQUEST_RESULT\s*:\s*(.*)", re.DOTALL)
_SERVER: Final = re.compile(r"\s*START SERVER\s*:\s*(.*)", re.DOTALL)
_SETTING: Final = re.compile(r"\s+(\S+):\s+(\w+=[^,\s]+(?:,\s*\w+=[^,\s]+)*)\s*")
_HEADER: Final = re.compile(r"(duration|prompt tokens|output tokens|phases)\s*:\s*(.+)")
_GPU: Final = re.compile(r"(?<![a-z0-9])(rtx[ _-]?(?:pro[ _-]?)?\d{4}(?:ti)?|[abhlv]\d{2,3}s?|gb\d{2,3}|gh200|mi\d{3}x?|t4)(?![a-z0-9])", re.I)  # fmt: skip # noqa: E501
_FACTS: Final = (
    "prompt_mean", "prompt_p50", "prompt_p95", "prompt_max", "output_mean", "output_p50", "output_p95", "output_max",
)  # fmt: skip
_HINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "b_max": ("max_num_batched_tokens", "b_max", "mbt"),
    "max_num_seqs": ("max_num_seqs",),
    "b_cap": ("ppas_b_cap", "b_cap", "cap"),
    "t_large": ("ppas_large_prefill_threshold", "large_prefill_threshold", "t_large"),
    "n_th": ("ppas_n_th", "n_th"),
}
MAX_REQUESTS: Final = 1_000_000


@dataclass(slots=True)
class _Server:
    """What the lines before a run say about its server."""

    model: str = ""
    flags: dict[str, str] = field(default_factory=dict)


ACCEPTED: Final = (
    "allowed: a sweep log as the paper's author published them, a table of runs (.csv or .csv.gz, one run a line), or the "
    "run folder of a study, such as runs/demo"
)
"""What is read as measured runs, for people."""


def looks_published(path: Path) -> bool:
    """Whether one of the file's lines is a run of a published log."""
    return any(_ROW.fullmatch(line) for _, line in numbered_lines(path))


def read_published(path: Path) -> RunLog:
    """The runs of one published log, in its order, each with its requests where the log holds them.

    Raises InvalidInput, with the line's number, for a run or request that cannot be read, and for a log without runs.
    """
    notes: list[str] = []
    runs: list[RunResult] = []
    for segment in _segments(path):
        runs += requests.joined(segment, notes)
    if not runs:
        raise InvalidInput(f"{path}: holds no run; {ACCEPTED}")
    with_requests = any(run.requests is not None for run in runs)
    generation = "0.27.1" if with_requests or any(_is_new(run.flags) for run in runs) else "0.22.1"
    return RunLog(tuple(replace(run, vllm=run.vllm or generation) for run in runs), tuple(notes))


def _segments(path: Path) -> Iterator[list[RunResult | Fields]]:
    """Runs and requests of one server start each, in the log's order."""
    server, settings, header = _Server(), dict[str, dict[str, str]](), dict[str, str]()
    segment: list[RunResult | Fields] = []
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        for text in line.split("\r"):  # a progress bar writes over itself
            if match := _SERVER.match(text):
                yield segment
                segment, server = [], _server(match[1])
            elif match := _REQUEST.match(text):
                segment.append(Fields(parse_dict(match[1], where), where))
            elif match := _ROW.fullmatch(text):
                segment.append(_run(Fields(parse_dict(match[1], where), where), path, server, settings, header))
            elif match := _SETTING.fullmatch(text):
                settings[match[1]] = dict(part.split("=", 1) for part in re.split(r",\s*", match[2]))
            elif match := _HEADER.fullmatch(text.strip()):
                header[match[1]] = match[2].strip()
    yield segment


def _server(command: str) -> _Server:
    """Model, flags and environment from a printed command."""
    words = command.split()
    flags: dict[str, str] = {}
    model = ""
    for place, word in enumerate(words):
        after = words[place + 1] if place + 1 < len(words) else ""
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flags[name] = value if equals else ("" if after.startswith("--") else after)
        elif equals and name.isupper():
            flags[name] = value
        elif word == "serve":
            model = after
    return _Server(model or flags.get("--model", ""), flags)


def _is_new(flags: Mapping[str, str]) -> bool:
    """Whether a server is of the 0.27.1 generation, by what only that one takes."""
    return any(name in flags for name in ("PPAS_B_CAP", "PPAS_PLUS_ENABLED", "--language-model-only"))


def _run(
    row: Fields, path: Path, server: _Server, settings: Mapping[str, Mapping[str, str]], header: Mapping[str, str]
) -> RunResult:
    config = row.required_text("config_name", "config")
    told = Fields(dict(settings.get(config, {})), row.where)
    commanded = Fields({name.strip("-"): value for name, value in server.flags.items()}, row.where)
    hints = {}
    for name, aliases in _HINTS.items():
        for source in (row, told, commanded):
            value = source.whole(*aliases, least=1, most=2**24) if source.has(*aliases) else None
            if value is not None:
                hints[name] = value
                break
    num_requests = row.whole("num_requests", "requests", least=1, most=MAX_REQUESTS)
    if num_requests is None:
        raise InvalidInput(f"{row.where}: has no 'num_requests'; a run says how many requests its trace has")
    metrics = row.metrics()
    gpu = _GPU.search(path.name)
    return RunResult(
        source=row.where,
        file=path.name,
        config=config,
        workload=workload_of(row, header),
        metrics=metrics,
        num_requests=num_requests,
        failed=row.whole("failed", "num_failed", "failed_requests") or 0,
        error=row.text("error"),
        model=row.text("model", "model_name") or server.model,
        gpu=row.text("gpu") or (gpu[0].upper() if gpu else ""),
        vllm=row.text("vllm_version", "vllm"),
        flags=server.flags,
        hints=hints,
    )


def workload_of(row: Fields, header: Mapping[str, str]) -> Workload:
    """The trace that a record names: its phases, seed and lengths, and figures of it to check a regenerated one."""
    found = {name: row.number(name) for name in _FACTS}
    facts = {name: value for name, value in found.items() if value is not None}
    return Workload(
        phases=_phases(row, header),
        seed=row.whole("seed"),
        prompt_tokens=_lengths(row, "prompt", facts),
        output_tokens=_lengths(row, "output", facts),
        facts=facts,
        number=row.text("trace_id"),
    )


def _phases(row: Fields, header: Mapping[str, str]) -> str:
    text = row.text("phase_schedule", "phases")
    if not text and (mode := row.text("arrival_mode")) and "poisson" in mode and "duration" in header:
        try:
            rate = row.number("configured_request_rate")
        except InvalidInput:  # a word
            rate = None
        text = f"{header['duration']}:{rate:g}" if rate else ""
    if text:
        try:
            parse_phases(text)
        except InvalidInput as error:
            raise InvalidInput(f"{row.where}: {error}") from None
    return text


def _lengths(row: Fields, side: str, facts: Mapping[str, float]) -> tuple[int, ...]:
    """Lengths as configured, unless the trace's own figures say that others were used; then () for unknown."""
    configured = row.lengths(f"configured_{side}_tokens", f"{side}_tokens", f"{side}_lengths")
    mean, longest = facts.get(f"{side}_mean"), facts.get(f"{side}_max")
    if mean is None or longest is None:
        return configured
    if mean == longest and longest == int(longest):
        return (int(longest),)
    return configured if len(configured) > 1 and max(configured) >= longest else ()
