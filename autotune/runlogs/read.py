"""Which reader a file or folder of runs is for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.runlogs.folder import read_folder
from autotune.runlogs.model import RunLog, RunResult
from autotune.runlogs.plain_file import require_file
from autotune.runlogs.published import looks_published, read_published
from autotune.runlogs.table import read_table


def read_runs(paths: Sequence[Path]) -> RunLog:
    """The runs of all `paths`: published sweep logs, tables (.csv, .csv.gz), run folders.

    A run that stands in several of them word for word counts once. Raises InvalidInput with file and line.
    """
    runs: list[RunResult] = []
    notes: list[str] = []
    seen: set[tuple[object, ...]] = set()
    for path in paths:
        log = _read(path)
        notes += log.notes
        # Within one file equal figures may be a repeat (a simulator repeats itself exactly); between files they are a copy.
        fresh = [run for run in log.runs if _figures(run) not in seen]
        if len(fresh) < len(log.runs):
            notes.append(f"{path.name}: {len(log.runs) - len(fresh)} runs stand in an earlier file already; left out")
        seen |= {_figures(run) for run in log.runs}
        runs += fresh
    return RunLog(tuple(_told_apart(runs)), tuple(notes))


def _read(path: Path) -> RunLog:
    if os.path.isdir(path):
        return read_folder(path)
    require_file(path)
    is_table = path.name.lower().removesuffix(".gz").endswith(".csv")
    return read_table(path) if is_table and not looks_published(path) else read_published(path)


def _figures(run: RunResult) -> tuple[object, ...]:
    return (run.served, run.config, run.workload.key, tuple(sorted(run.metrics.items())))


def _told_apart(runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs, with settings of one name but different budgets or sequence caps named apart."""
    variants: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        variants.setdefault((run.served, run.config), set()).add(_variant(run))
    return [
        run if len(variants[run.served, run.config]) == 1 else replace(run, config=f"{run.config} [{_variant(run)}]")
        for run in runs
    ]


def _variant(run: RunResult) -> str:
    """What the log says about a setting beyond its name."""
    return ", ".join(f"{name} {value}" for name, value in sorted(run.hints.items()))
