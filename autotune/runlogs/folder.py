"""The runs of our own run folders: every tried setting on every trace, from its kept requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from autotune import metrics
from autotune.records import OK, Origin, RequestRecords
from autotune.runfolder import existing_run
from autotune.runlogs.model import METRICS, RequestResults, RunLog, RunResult, Workload
from autotune.runlogs.plain_file import require_file
from ppas_core.errors import InvalidInput, InvalidSettings
from ppas_core.plain_json import load_json
from ppas_core.policy import PolicyParams
from ppas_core.sim.requests import RequestArrays

_TIMES: Final = ("planned_s", "sent_s", "first_token_s", "last_token_s", "done_s")
_COLUMNS: Final = {"trace", "regime", "origin", "prompt_tokens", "output_tokens", "status", *_TIMES}


def read_folder(path: Path) -> RunLog:
    """The runs of the run folder at `path`: references, trials, random trials, finalists and a sweep's settings.

    A setting measured in several places counts once, from the first of them with that setting and trace. Latency counts
    from the planned arrival, as everywhere in our results. Raises InvalidInput for a folder that is none, or is damaged.
    """
    existing_run(path)
    model, gpu, vllm = _served(path)
    finalists = _finalists(path)
    runs: dict[tuple[PolicyParams, str], RunResult] = {}
    for file in sorted(path.glob("**/requests.parquet"), key=_order):
        params = finalists.get(file.parent.name) if file.parent.parent.name == "finalists" else _settings(file)
        if params is None:
            continue
        for trace, table in _traces(file):
            if (params, trace) not in runs:
                where = f"{file.parent}, trace {trace!r}"
                run = _run(where, path.name, params, trace, table, (model, gpu, vllm))
                runs[params, trace] = replace(run, held_out=file.parent.parent.name == "finalists")
    if not runs:
        raise InvalidInput(f"{path}: holds no measured setting (no requests.parquet beside a settings.json)")
    return RunLog(tuple(runs.values()))


def _order(file: Path) -> tuple[bool, str]:
    """References first: they are measured with repeats, and the first of them is the plain one."""
    return "references" not in file.parts, str(file)


def _served(path: Path) -> tuple[str, str, str]:
    """Model, GPU and vLLM version from a live study's server facts, or the profile of a simulated one; else ""."""
    found: dict[str, str] = {}
    for file in (path / "profile.json", *sorted(path.glob("servers/**/facts.json"))):
        try:
            require_file(file)
            data = load_json(file.read_bytes())
        except (OSError, ValueError, InvalidInput):
            continue
        if isinstance(data, dict):
            names = (("model", "model"), ("gpu", "gpu"), ("vllm", "vllm_version"))
            found |= {key: data[name] for key, name in names if isinstance(data.get(name), str)}
    return found.get("model", ""), found.get("gpu", ""), found.get("vllm", "")


def _finalists(path: Path) -> dict[str, PolicyParams]:
    """Role to setting of the held-out comparison: their requests stand without their settings; {} where unfinished."""
    try:
        require_file(path / "results.json")
        results = load_json((path / "results.json").read_bytes())
        return {str(one["role"]): PolicyParams.from_dict(one["setting"]["params"]) for one in results["held_out"]}
    except (OSError, ValueError, TypeError, KeyError, InvalidInput):
        return {}


def _settings(requests: Path) -> PolicyParams | None:
    file = requests.with_name("settings.json")
    if not file.is_file():
        return None
    try:
        data = load_json(file.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is no object")
        return PolicyParams.from_dict(data)
    except (OSError, ValueError, InvalidSettings) as error:
        raise InvalidInput(f"{file}: holds no setting: {error}") from None


def _traces(file: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    require_file(file)
    try:
        table = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file}: cannot be read: {error}") from None
    if missing := sorted(_COLUMNS - set(table.columns)):
        raise InvalidInput(
            f"{file}: has no column {missing[0]!r}; a run folder's table has {', '.join(sorted(_COLUMNS))}"
        )
    for name, rows in table.groupby("trace", sort=False):
        yield str(name), rows


def _run(
    where: str, folder: str, params: PolicyParams, trace: str, table: pd.DataFrame, served: tuple[str, str, str]
) -> RunResult:
    try:
        times = {name: table[name].to_numpy(np.float64) for name in _TIMES}
        records = RequestRecords(
            **times,
            prompt_tokens=table["prompt_tokens"].to_numpy(np.int64),
            output_tokens=table["output_tokens"].to_numpy(np.int64),
            status=tuple(table["status"].astype(str)),
            chunk_time_s=np.empty(0),
            chunk_tokens=np.empty(0, np.int64),
            chunk_offsets=np.zeros(len(table) + 1, np.int64),
        )
        arrays = RequestArrays(records.planned_s, records.prompt_tokens, records.output_tokens)
        origin = Origin(str(table["origin"].iloc[0]))
    except (ValueError, TypeError, InvalidInput) as error:
        raise InvalidInput(f"{where}: cannot be read: {error}") from None
    values = {name: metrics.value(name, records) for name in METRICS}
    failures = records.failures()
    return RunResult(
        source=where,
        file=folder,
        config=params.label(),
        workload=Workload(label=trace, given_regime=str(table["regime"].iloc[0]), arrays=arrays),
        metrics={name: value for name, value in values.items() if np.isfinite(value)},
        num_requests=len(records),
        failed=sum(failures.values()),
        error=", ".join(f"{count} {reason}" for reason, count in sorted(failures.items())),
        model=served[0],
        gpu=served[1],
        vllm=served[2],
        params=params,
        origin=origin,
        requests=RequestResults(
            ids=tuple(map(str, range(len(records)))),
            ok=np.array([word == OK for word in records.status]),
            latency_s=metrics.latency_s(records),
            ttft_s=metrics.ttft_s(records),
            tpot_s=metrics.tpot_s(records),
            arrival_s=records.planned_s,
            prompt_tokens=records.prompt_tokens,
            output_tokens=records.output_tokens,
        ),
    )
