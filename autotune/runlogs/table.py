"""A CSV table with one run per row: setting, trace and figures under their names, in any order of columns."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

import numpy as np

from autotune.runlogs.fields import METRIC_NAMES, Fields, shown
from autotune.runlogs.model import RunLog, RunResult, Workload
from autotune.runlogs.published import MAX_REQUESTS, workload_of
from ppas_core.errors import InvalidInput
from ppas_core.sim.requests import RequestArrays
from traces.format import Trace, read_trace
from traces.lines import numbered_lines

HELP: Final = (
    "a table of runs needs a column `config`, what names the trace (`phases`, `seed`, `prompt_tokens` and "
    "`output_tokens`, or `trace_file`), and figures such as `avg_latency`, `p95_latency`, `avg_ttft`"
)
_MAX_COLUMNS: Final = 500


def read_table(path: Path) -> RunLog:
    """The runs of a CSV file with a head; columns may also be named as in the published logs. Raises InvalidInput."""
    lines = numbered_lines(path)
    number, head = next(lines, (1, ""))
    columns = next(csv.reader([head]), [])
    if not 1 < len(columns) <= _MAX_COLUMNS or len(set(columns)) != len(columns):
        raise InvalidInput(f"{path}, line {number}: is no head of distinct column names; {HELP}")
    runs = []
    for number, line in lines:
        where = f"{path}, line {number}"
        try:
            cells = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise InvalidInput(f"{where}: is no CSV: {error}") from None
        if len(cells) != len(columns):
            raise InvalidInput(f"{where}: has {len(cells)} cells; the head has {len(columns)} columns")
        runs.append(_run(Fields(dict(zip(columns, cells, strict=True)), where), path))
    if not runs:
        raise InvalidInput(f"{path}: holds no run below its head; {HELP}")
    missing = [name for name in METRIC_NAMES if not any(name in run.metrics for run in runs)]
    if len(missing) == len(METRIC_NAMES):
        raise InvalidInput(f"{path}: has no figure of a run under a known name; {HELP}")
    notes = (f"{path.name}: has no column for {', '.join(missing)}",) if missing else ()
    return RunLog(tuple(runs), notes)


def _run(row: Fields, path: Path) -> RunResult:
    config = row.required_text("config", "config_name", "setting")
    workload = _workload(row, path)
    known = len(workload.arrays) if workload.arrays is not None else None
    num_requests = row.whole("num_requests", "requests", least=1, most=MAX_REQUESTS) or known or 0
    hints = {
        name: value
        for name, aliases in (("b_max", ("max_num_batched_tokens", "b_max")), ("max_num_seqs", ("max_num_seqs",)))
        if (value := row.whole(*aliases, least=1, most=2**24)) is not None
    }
    return RunResult(
        source=row.where,
        file=path.name,
        config=config,
        workload=workload,
        metrics=row.metrics(),
        num_requests=num_requests,
        failed=row.whole("failed", "num_failed", "failed_requests") or 0,
        error=row.text("error"),
        model=row.text("model"),
        gpu=row.text("gpu"),
        vllm=row.text("vllm", "vllm_version"),
        hints=hints,
    )


def _workload(row: Fields, path: Path) -> Workload:
    if not (name := row.text("trace_file")):
        generated = workload_of(row, {})
        return generated if generated.phases else Workload(
            seed=generated.seed,
            prompt_tokens=generated.prompt_tokens,
            output_tokens=generated.output_tokens,
            label=row.text("trace"),
            given_regime=row.text("regime"),
            number=generated.number,
        )  # fmt: skip
    trace = _trace(row.where, path.parent, name)
    shape = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests]
    arrival_s, prompts, outputs = zip(*shape, strict=True)
    return Workload(
        label=trace.name,
        given_regime=row.text("regime") or trace.regime,
        arrays=RequestArrays(np.array(arrival_s), np.array(prompts), np.array(outputs)),
    )


def _trace(where: str, folder: Path, name: str) -> Trace:
    """The trace called `name` in the table's `folder`.

    A table may come from anybody: it leads to no file outside its folder, and no error shows what stands in another file.
    """
    try:
        file = (folder / name).resolve()
        is_inside = (
            file.is_relative_to(folder.resolve()) and not Path(name).is_absolute() and ".." not in Path(name).parts
        )
    except (OSError, ValueError, RuntimeError):  # a zero byte, or a link to itself
        is_inside = False
    if not is_inside:
        raise InvalidInput(
            f"{where}: trace_file is {shown(name)}; allowed: a file in the table's folder or below, by its path from there"
        )
    if not file.is_file():
        raise InvalidInput(f"{where}: trace_file is {shown(name)}; there is no such file beside the table")
    try:
        return read_trace(file)
    except InvalidInput:
        raise InvalidInput(
            f"{where}: trace_file {shown(name)} holds no trace that can be read; `ppas trace show` of it says why"
        ) from None
