"""How noisy one study's measurements are: its A/A test, and whatever else it measured twice.

Noise comes in bursts, which a few measurements in a row may miss. So a setting that was measured again later, and
settings that did the very same as each other, count as further A/A samples. They never lower what is said to be visible.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from autotune import metrics
from autotune.alike import Behaviour, behaviour
from autotune.noise import NoiseFloor, half_width, pooled, undefined_on, variance_share
from autotune.plan import NOISE_RUNS, Plan
from autotune.records import FloatArray, Replay
from autotune.results import NoiseInfo
from autotune.study import Outcome
from ppas_core.errors import NoResult
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, finite, load_json
from ppas_core.policy import PolicyParams
from traces.format import Trace

FILE: Final = "noise.json"
_RUNS_FILE: Final = "noise-runs.json"

Runs = dict[str, FloatArray]
"""Metric name to its values in the A/A test, float64[measurements, tuning traces]; NaN where one is undefined."""
Samples = Iterable[tuple[PolicyParams, Outcome]]
"""Settings on the tuning traces, with what was measured of them."""


def per_regime(replays: Iterable[Trace | Replay]) -> list[int]:
    """How many of the traces, or of their replays, each regime has."""
    return list(Counter(replay.regime for replay in replays).values())


def noisier(these: Iterable[Trace | Replay], tuning: Iterable[Trace]) -> float:
    """By how much an objective over `these` is noisier than one over the tuning traces, as a factor."""
    return math.sqrt(variance_share(per_regime(these)) / variance_share(per_regime(tuning)))


class StudyNoise:
    """The noise of a study's preferred metrics, and of others beside them.

    runs: the A/A test. kept: what an earlier process found from it; only where its runs are not known, `runs` is empty.
    Raises NoResult where a preferred metric is zero or undefined on a trace.
    """

    def __init__(
        self,
        plan: Plan,
        preferred: Sequence[str],
        reference_steps: Mapping[str, int],
        runs: Runs,
        kept: Sequence[NoiseInfo] = (),
    ) -> None:
        self._plan = plan
        self._reference_steps = reference_steps
        self._runs = runs
        self._first = {info.metric: _floor(info) for info in kept} or {name: self._of_runs(name) for name in preferred}
        self._now = dict(self._first)

    @property
    def infos(self) -> list[NoiseInfo]:
        """What is known by now of each preferred metric, as results hold it."""
        return [self._info(floor) for floor in self._now.values()]

    def beside(self, names: Iterable[str]) -> list[NoiseInfo]:
        """As `infos`, of those of `names` that are no preferred metric and whose noise is known."""
        floors = [self.of(name) for name in names if name not in self._now]
        return [self._info(floor) for floor in floors if floor is not None]

    @property
    def alike_pct(self) -> float:
        """The largest difference that noise alone makes between two trials in a preferred metric."""
        return max(self._alike_pct(floor) for floor in self._now.values())

    @property
    def before_pct(self) -> float:
        """The smallest difference between two settings that the A/A test alone lets one see on the tuning traces."""
        return max(floor.visible_pct for floor in self._first.values())

    def of(self, metric: str) -> NoiseFloor | None:
        """The noise of any metric; None where it was undefined in the A/A test.

        What widened the preferred metrics is taken to hold for the others alike.
        """
        if metric in self._now:
            return self._now[metric]
        try:
            found = self._of_runs(metric)
        except (NoResult, KeyError):
            return None
        factor = max(
            (self._now[name].replay_pct / first.replay_pct for name, first in self._first.items() if first.replay_pct),
            default=1.0,
        )
        return replace(
            found,
            replay_pct=factor * found.replay_pct,
            objective_pct=factor * found.objective_pct,
            visible_pct=factor * found.visible_pct,
        )

    def widen(self, measured: Samples, held_out: Iterable[Sequence[Replay]] = ()) -> None:
        """Takes all further measurements that there are by now into account, beside the A/A test's own.

        held_out: finalists' replays of the held-out traces.
        """
        complete = [(params, outcome) for params, outcome in measured if outcome.is_complete and outcome.by_trace]
        reference = self._plan.reference
        acted: dict[PolicyParams, set[Behaviour | None]] = {reference: {behaviour(reference, self._reference_steps)}}
        for params, outcome in complete:
            acted.setdefault(params, set()).add(behaviour(params, outcome.branch_steps))
        finalists = list({replays[0].params: replays for replays in held_out}.values())
        for metric, first in self._first.items():
            runs = list(np.log(self._runs[metric])) if metric in self._runs else []
            of_key: dict[object, list[FloatArray]] = {_key(reference, acted[reference]): list(runs)}
            for params, outcome in complete:
                if (row := self._row(outcome, metric)) is not None:
                    of_key.setdefault(_key(params, acted[params]), []).append(row)
            groups = [np.array(rows) for rows in of_key.values() if len(rows) > 1]
            groups += self._alike(finalists, metric)
            further = sum(map(len, groups)) - len(runs)
            if further > 0:
                found = pooled(
                    groups,
                    metric,
                    traces_per_regime=per_regime(self._plan.tuning),
                    wanted_pct=self._plan.spec.min_gain_pct,
                    further=further,
                )
                self._now[metric] = found if found.visible_pct > first.visible_pct else first

    def _info(self, floor: NoiseFloor) -> NoiseInfo:
        more = noisier(self._plan.held_out, self._plan.tuning)
        alike_pct = self._alike_pct(floor)
        return NoiseInfo(visible_held_out_pct=floor.visible_pct * more, alike_pct=alike_pct, **asdict(floor))

    def _alike_pct(self, floor: NoiseFloor) -> float:
        return 100 * half_width(floor, per_regime(self._plan.tuning), self._plan.spec.confidence)

    def _of_runs(self, metric: str) -> NoiseFloor:
        values = self._runs[metric]
        if not np.all(values > 0):
            trace = self._plan.tuning[int(np.argmax(~np.all(values > 0, axis=0)))].name
            raise undefined_on(metric, trace)
        wanted_pct = self._plan.spec.min_gain_pct
        regimes = per_regime(self._plan.tuning)
        return pooled([np.log(values)], metric, traces_per_regime=regimes, wanted_pct=wanted_pct)

    def _row(self, outcome: Outcome, metric: str) -> FloatArray | None:
        """float64[tuning traces]: logs of the metric; None where one is not known."""
        rows = [outcome.by_trace.get(trace.name, {}).get(metric, math.nan) for trace in self._plan.tuning]
        values = np.array(rows, dtype=np.float64)
        return np.log(values) if np.all(values > 0) else None

    def _alike(self, finalists: Sequence[Sequence[Replay]], metric: str) -> list[FloatArray]:
        """Finalists that did the very same on every held-out trace, as groups."""
        limits = self._plan.spec.metric_limits()
        groups: dict[object, list[FloatArray]] = {}
        for replays in finalists:
            acted = tuple(behaviour(replay.params, replay.branch_steps) for replay in replays)
            values = np.array([metrics.value(metric, replay.requests, limits) for replay in replays])
            if None not in acted and np.all(values > 0):
                groups.setdefault(acted, []).append(np.log(values))
        return [np.array(rows) for rows in groups.values() if len(rows) > 1]


def keep(folder: Path, infos: Sequence[NoiseInfo], runs: Runs) -> None:
    """Writes the A/A test to `folder`."""
    entries: list[dict[str, Any]] = [info.model_dump() for info in infos]
    values = finite({metric: rows.tolist() for metric, rows in runs.items()})
    write_atomically(folder / _RUNS_FILE, dump_json(values).encode())
    write_atomically(folder / FILE, dump_json(entries, indent=1).encode())


def kept(folder: Path, preferred: Sequence[str], num_traces: int) -> tuple[list[NoiseInfo], Runs] | None:
    """What `keep` wrote: its runs, or what was found from them where they cannot be read; None where neither is of use.

    The runs say more: what is preferred, and what gain is worth having, may have changed since.
    """
    runs = _kept_runs(folder, num_traces)
    if all(name in runs and np.all(runs[name] > 0) for name in preferred):
        return [], runs
    try:
        infos = [NoiseInfo.model_validate(entry) for entry in load_json((folder / FILE).read_bytes())]
    except (OSError, ValueError, TypeError):
        return None
    return (infos, {}) if [info.metric for info in infos] == list(preferred) else None


def _kept_runs(folder: Path, num_traces: int) -> Runs:
    """The A/A test; empty where it cannot be read, or is not of as many traces."""
    try:
        data = load_json((folder / _RUNS_FILE).read_bytes())
        runs = {str(metric): np.array(rows, dtype=np.float64) for metric, rows in data.items()}  # null becomes NaN
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}
    whole = all(rows.ndim == 2 and len(rows) > 1 and rows.shape[1] == num_traces for rows in runs.values())
    return runs if whole and not any(np.isinf(rows).any() for rows in runs.values()) else {}


def _key(params: PolicyParams, acted: set[Behaviour | None]) -> object:
    """What measurements of the same thing share: the behaviour of a setting that never capped, else the setting."""
    return params if None in acted else next(iter(acted))


def _floor(info: NoiseInfo) -> NoiseFloor:
    derived = ("visible_held_out_pct", "alike_pct")
    known = {name: value for name, value in info.model_dump().items() if name not in derived}
    return NoiseFloor(**{**known, "freedom": info.freedom or (NOISE_RUNS - 1) * info.num_traces})
