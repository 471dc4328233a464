"""What the simulator says of every setting of a space, on all tuning traces at once.

A simulated replay costs some microseconds, so a space is swept whole where that takes half a minute or less, and on an
even grid of it where it would take longer. The bound counts scheduled chunks, not seconds: the same study is swept
alike on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from autotune import interrupt, metrics
from autotune.evaluate import SimulatedEvaluator, request_arrays
from autotune.landscape import over_budgets
from autotune.metrics import Limits
from autotune.race import in_turn
from autotune.records import OK, FloatArray, RequestRecords
from autotune.results import Landscape
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import Profile
from ppas_core.sim.simulate import RequestBatch, simulate_many
from search_spaces.space import Space
from traces.format import OPEN_LOOP, Trace

SWEEP_CHUNKS: Final = 1_000_000_000
"""Most chunks (a decode, or a stretch of a prompt) that a sweep may schedule: half a minute on one core at 25 ns each."""
_CHUNK_TOKENS: Final = 2048
"""Prompt tokens that count as one chunk."""
_SLOW: Final = 20
"""By how much a sweep is shortened where a metric must be computed replay by replay."""
MAP_POINTS: Final = 16
"""Values per axis of a map."""
_LEAST: Final = 12
"""Settings swept in any case."""
_TICK: Final = 256
"""Settings between two reports of progress."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """A swept space.

    settings: S of them, no two alike. by_trace: metric name to float64[S, T]. ratios: metric name to float64[S], the
    objective against the reference. regimes: of each of the T traces. sweep_s: how long it took.
    """

    profile: Profile
    settings: tuple[PolicyParams, ...]
    by_trace: Mapping[str, FloatArray]
    ratios: Mapping[str, FloatArray]
    regimes: tuple[str, ...]
    sweep_s: float
    places: Mapping[PolicyParams, int] = field(repr=False)
    predictor: Predictor = field(repr=False)
    _beside: dict[PolicyParams, dict[str, float]] = field(default_factory=dict, repr=False)

    def ratio(self, params: PolicyParams) -> dict[str, float]:
        """Metric name to predicted ratio to the reference, of any setting; one that was not swept is simulated, once."""
        place = self.places.get(params)
        if place is not None:
            return {name: float(values[place]) for name, values in self.ratios.items()}
        if params not in self._beside:
            self._beside[params] = {
                name: float(_ratios(name, row[None, :], base, self.regimes)[0])
                for name, row, base in zip(self.ratios, self.predictor(params), self.predictor.base, strict=True)
            }
        return self._beside[params]

    def score(self, preferred: Sequence[str]) -> FloatArray:
        """float64[S]: what the choice rule minimises, the geometric mean of the preferred objectives' ratios."""
        logs = np.mean([np.log(self.ratios[name]) for name in preferred], axis=0)
        return np.asarray(np.exp(logs), dtype=np.float64)

    def trace_order(self, preferred: Sequence[str], share: float = 0.25) -> list[int]:
        """The traces' places, best first: by how well each tells the better settings apart, one of each regime in turn.

        share: of the settings, the predicted best, among which telling apart matters.
        """
        score = self.score(preferred)
        near = score <= np.quantile(score, share)
        spread = np.mean([np.log(self.by_trace[name][near]).std(axis=0) for name in preferred], axis=0)
        return in_turn(np.argsort(-spread, kind="stable").tolist(), self.regimes)

    def maps(self, metric: str, most: int = 24) -> list[Landscape]:
        """Exact maps of one metric's ratio over b_max (columns) and b_cap (rows), one for each n_th, t_large and so on.

        most: maps at most; the ones left out are evenly spread. Empty where a budget does not vary.
        """
        ratio = self.ratios[metric]
        planes: dict[tuple[tuple[str, object], ...], dict[tuple[int, int], float]] = {}
        for params, value in zip(self.settings, ratio.tolist(), strict=True):
            if not params.is_static:
                rest = tuple((key, v) for key, v in params.to_dict().items() if key not in ("b_max", "b_cap"))
                planes.setdefault(rest, {})[params.b_max, params.b_cap] = value
        statics = {params.b_max: float(ratio[place]) for params, place in self.places.items() if params.is_static}
        places = np.unique(np.linspace(0, len(planes) - 1, min(most, len(planes))).round().astype(int)).tolist()
        every = list(planes.items())
        kept = [every[place] for place in places]
        found = [_plane(metric, dict(rest), points, statics) for rest, points in kept]
        return [plane for plane in found if plane is not None and len(plane.x) > 1 and len(plane.y) > 1]


def forecast(
    profile: Profile,
    space: Space,
    traces: Sequence[Trace],
    reference: PolicyParams,
    names: Sequence[str],
    *,
    also: Sequence[PolicyParams] = (),
    limits: Limits = metrics.NO_LIMITS,
    most_chunks: int = SWEEP_CHUNKS,
    advance: Callable[[int], None] | None = None,
) -> Forecast:
    """Sweeps `space` and the settings `also` (with the reference) on `profile`.

    names: metrics to predict. most_chunks: beyond it the space is thinned to an even grid. advance: told how many more
    settings are done. Raises InvalidInput when a request can never be served on the profile.
    """
    started = time.perf_counter()
    predict = Predictor(profile, traces, names, limits, reference)
    known = dict.fromkeys([reference, *also])
    points = min(space.size(), int(most_chunks / predict.chunks))
    known.update(dict.fromkeys(space.grid(max(_LEAST, points))))
    settings = tuple(known)
    table = np.empty((len(names), len(settings), len(traces)))
    for place, params in enumerate(settings):
        table[:, place] = predict(params)
        if place % _TICK == 0:
            interrupt.check()
            if advance is not None:
                advance(min(_TICK, len(settings) - place))
    regimes = tuple(trace.regime for trace in traces)
    return Forecast(
        profile=profile,
        settings=settings,
        by_trace=dict(zip(names, table, strict=True)),
        ratios={name: _ratios(name, table[row], predict.base[row], regimes) for row, name in enumerate(names)},
        regimes=regimes,
        sweep_s=time.perf_counter() - started,
        places={params: place for place, params in enumerate(settings)},
        predictor=predict,
    )


class Predictor:
    """Metrics of one setting on all traces: float64[M, T]. base: those of the reference."""

    def __init__(
        self, profile: Profile, traces: Sequence[Trace], names: Sequence[str], limits: Limits, reference: PolicyParams
    ) -> None:
        self._profile = profile
        self._traces = traces
        self._names = names
        self._limits = limits
        self._batch = RequestBatch.pack([request_arrays(trace, prefixes=profile.prefix_caching) for trace in traces])
        self._status = (OK,) * len(self._batch.arrival_s)
        # Sessions settle one trace at a time: their arrivals follow from the setting.
        open_loop = all(trace.mode == OPEN_LOOP for trace in traces)
        self._packed = open_loop and all(metrics.metric(name).per_request for name in names)
        self._one_by_one = SimulatedEvaluator(profile)
        self.base = self(reference)

    @property
    def chunks(self) -> float:
        """Chunks that one setting schedules on all traces, about; what a replay costs grows with them."""
        batch = self._batch
        chunks = float(batch.output_tokens.sum() + batch.prompt_tokens.sum() / _CHUNK_TOKENS)
        return chunks if self._packed else _SLOW * chunks

    def __call__(self, params: PolicyParams) -> FloatArray:
        """The metrics of `params`. Raises InvalidInput when a request can never be served on the profile."""
        if not self._packed:
            replays = [self._one_by_one.replay(params, trace).requests for trace in self._traces]
            return np.array([[metrics.value(name, r, self._limits) for r in replays] for name in self._names])
        batch = self._batch
        result = simulate_many(params, batch, self._profile)
        records = RequestRecords(
            planned_s=batch.arrival_s,
            sent_s=batch.arrival_s,
            first_token_s=result.first_token_s,
            last_token_s=result.last_token_s,
            done_s=result.last_token_s,
            prompt_tokens=batch.prompt_tokens,
            output_tokens=batch.output_tokens,
            status=self._status,
            chunk_time_s=result.token_time_s,
            chunk_tokens=batch.output_tokens,
            chunk_offsets=batch.token_start,
        )
        return np.array([metrics.values_by_trace(name, records, batch.trace_start) for name in self._names])


def _ratios(name: str, values: FloatArray, base: FloatArray, regimes: Sequence[str]) -> FloatArray:
    """The paper's aggregate of each row: mean over a regime's traces, ratio to the reference, geometric mean of those."""
    logs = []
    for regime in dict.fromkeys(regimes):
        own = [place for place, other in enumerate(regimes) if other == regime]
        setting, reference = values[:, own].mean(axis=1), float(base[own].mean())
        logs.append(metrics.sign(name) * np.log(setting / reference))
    return np.asarray(np.exp(np.mean(logs, axis=0)), dtype=np.float64)


def _plane(
    metric: str, fixed: dict[str, object], points: Mapping[tuple[int, int], float], statics: Mapping[int, float]
) -> Landscape | None:
    """One map; on its diagonal, where nothing is capped, stand the static budgets."""

    def ratio(b_max: int, b_cap: int) -> float | None:
        return points.get((b_max, b_cap), statics.get(b_max) if b_max == b_cap else None)

    return over_budgets(
        metric, {*statics, *(b_max for b_max, _ in points)}, (b_cap for _, b_cap in points), ratio, fixed, MAP_POINTS
    )
