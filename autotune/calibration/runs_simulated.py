"""Measured runs, and what the simulator says of them: the figures of a log, for every run at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.runlogs.configs import setting_of
from autotune.runlogs.model import METRICS, RunResult
from autotune.runlogs.workloads import Shapes, requests_of
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import Profile
from ppas_core.sim.simulate import RequestArrays, RequestBatch, simulate_many

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class FitRun:
    """One measured run that can be simulated.

    config, file, regime, seed: as in its log. metrics: measured figures by name of METRICS; absent ones are unknown.
    """

    params: PolicyParams
    arrays: RequestArrays
    metrics: Mapping[str, float]
    config: str
    file: str
    regime: str
    seed: int | None


def simulatable(
    runs: Sequence[RunResult], settings: Mapping[str, PolicyParams], shapes: Sequence[Shapes] = ()
) -> tuple[list[FitRun], list[str]]:
    """The runs with settings and requests known, and a sentence for each other one. Runs that lost requests are others.

    Raises InvalidInput when a setting's name is not known (it names the remedy), or when no run is left.
    """
    found: list[FitRun] = []
    left_out: list[str] = []
    arrays: dict[str, RequestArrays | str] = {}
    for run in runs:
        if not run.whole:
            left_out.append(f"{run.source}: {run.failed} of {run.num_requests} requests failed")
            continue
        params = setting_of(run, settings)
        key = f"{run.served}|{run.workload.key}|{run.num_requests}"
        if key not in arrays:
            try:
                arrays[key] = requests_of(run, shapes)
            except InvalidInput as error:
                arrays[key] = str(error)
        known = arrays[key]
        if isinstance(known, str):
            left_out.append(known)
            continue
        workload = run.workload
        found.append(FitRun(params, known, run.metrics, run.config, run.file, workload.regime, workload.seed))
    if not found:
        raise InvalidInput("no run can be simulated: " + (left_out[0] if left_out else "there is none"))
    return found, left_out


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The runs of one setting, packed for one compiled call, with the places of their order statistics."""

    params: PolicyParams
    batch: RequestBatch
    members: Ints
    owner: Ints
    low: Ints
    high: Ints
    share: Floats
    several_tokens: npt.NDArray[np.bool_]


class Fleet:
    """Runs to simulate over and over with changing profiles.

    runs: in the order of every array here. measured: float64[N, len(METRICS)], NaN where a log does not say.
    """

    def __init__(self, runs: Sequence[FitRun]) -> None:
        self.runs = tuple(runs)
        self.measured = np.array(
            [[run.metrics.get(name, np.nan) for name in METRICS] for run in runs], dtype=np.float64
        )
        members: dict[PolicyParams, list[int]] = {}
        for place, run in enumerate(runs):
            members.setdefault(run.params, []).append(place)
        self._groups = [_group(params, [runs[i].arrays for i in own], own) for params, own in members.items()]

    def predict(self, profile: Profile) -> Floats:
        """Every run's figures in the simulator: float64[N, len(METRICS)]. Latency counts from sending."""
        answer = np.full(self.measured.shape, np.nan)
        for group in self._groups:
            result = simulate_many(group.params, group.batch, profile)
            sent_s, first_s, last_s = group.batch.arrival_s, result.first_token_s, result.last_token_s
            starts = group.batch.trace_start[:-1]
            counts = np.diff(group.batch.trace_start)
            columns = [last_s - sent_s, first_s - sent_s]
            for place, column in enumerate(columns):
                ordered = column[np.lexsort((column, group.owner))]
                answer[group.members, 2 * place] = np.add.reduceat(column, starts) / counts
                low, high = ordered[group.low], ordered[group.high]
                answer[group.members, 2 * place + 1] = low + (high - low) * group.share
            answer[group.members, 4:6] = _tpot(group, first_s, last_s)
            answer[group.members, 6] = np.maximum.reduceat(last_s, starts) - sent_s[starts]
        return answer

    def regime_errors(self, predicted: Floats) -> Floats:
        """Relative error of the mean over runs, per setting and load regime (rows, see `cells`) and metric."""
        rows = [members for _, members in self.cells()]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.array([predicted[row].mean(0) / self.measured[row].mean(0) - 1 for row in rows])

    def cells(self) -> list[tuple[tuple[str, str], list[int]]]:
        """(setting, regime) with the places of its runs, in order of appearance."""
        found: dict[tuple[str, str], list[int]] = {}
        for place, run in enumerate(self.runs):
            found.setdefault((run.params.label(), run.regime), []).append(place)
        return list(found.items())


def _group(params: PolicyParams, traces: Sequence[RequestArrays], members: Sequence[int]) -> _Group:
    batch = RequestBatch.pack(traces)
    counts = np.diff(batch.trace_start)
    rank = (counts - 1) * 0.95
    low = np.floor(rank).astype(np.int64)
    return _Group(
        params=params,
        batch=batch,
        members=np.array(members),
        owner=np.repeat(np.arange(len(counts)), counts),
        low=batch.trace_start[:-1] + low,
        high=batch.trace_start[:-1] + np.ceil(rank).astype(np.int64),
        share=rank - low,
        several_tokens=batch.output_tokens > 1,
    )


def _tpot(group: _Group, first_s: Floats, last_s: Floats) -> Floats:
    """Mean and P95 of the time per output token of each run: float64[runs, 2]; one-token outputs have none."""
    keep = group.several_tokens
    values = (last_s - first_s)[keep] / (group.batch.output_tokens[keep] - 1)
    owner = group.owner[keep]
    counts = np.bincount(owner, minlength=len(group.members))
    sums = np.bincount(owner, values, minlength=len(group.members))
    ordered = np.append(values[np.lexsort((values, owner))], np.nan)
    starts = np.cumsum(counts) - counts
    rank = np.maximum(counts - 1, 0) * 0.95
    low, high = (np.where(counts > 0, starts + f(rank).astype(np.int64), len(values)) for f in (np.floor, np.ceil))
    with np.errstate(invalid="ignore", divide="ignore"):
        p95 = ordered[low] + (ordered[high] - ordered[low]) * (rank - np.floor(rank))
        return np.stack([sums / counts, p95], axis=1)
