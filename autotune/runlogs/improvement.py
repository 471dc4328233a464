"""The paper's aggregates of a sweep: how much better a setting is than a baseline on the same traces."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from autotune import aggregate
from autotune.runlogs.model import METRICS, RunResult
from autotune.stats import TIE_S
from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean

_STATIC: Final = re.compile(r"(?:mbt|static)[-_ ]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Matched:
    """Requests of the same trace under both settings, as far as both completed.

    faster, slower: share of them with the lower and the higher latency under the candidate, however little.
    tied: share of them that differ by less than a millisecond. unmatched: requests that only one side completed.
    """

    requests: int
    faster: float
    slower: float
    tied: float
    unmatched: int


@dataclass(frozen=True, slots=True)
class Improvement:
    """One setting against one baseline.

    overall: metric name to per cent, positive is better: mean over a regime's traces, ratio, geometric mean over
        regimes; None where the log does not say it for every regime. regimes: the same for each regime alone.
    num_traces: traces that both settings ran. unpaired: traces that only one of them ran.
    """

    candidate: str
    baseline: str
    overall: Mapping[str, float | None]
    regimes: Mapping[str, Mapping[str, float | None]]
    num_traces: int
    unpaired: int
    matched: Matched | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        matched = self.matched
        return {
            "candidate": self.candidate,
            "baseline": self.baseline,
            "improvement_pct": dict(self.overall),
            "regimes": {regime: dict(values) for regime, values in self.regimes.items()},
            "num_traces": self.num_traces,
            "unpaired_traces": self.unpaired,
            "matched_requests": matched
            and {
                "requests": matched.requests,
                "share_faster": matched.faster,
                "share_slower": matched.slower,
                "share_within_1_ms": matched.tied,
                "unmatched": matched.unmatched,
            },
        }


def whole_runs(runs: Sequence[RunResult]) -> tuple[list[RunResult], list[str]]:
    """The runs in which every request completed, and one sentence for each other one."""
    lost = [
        f"{run.source}: {run.config}, {run.workload.regime}, seed {run.workload.seed}: {run.failed} of "
        f"{run.num_requests} requests failed{f' ({run.error[:80]})' if run.error else ''}"
        for run in runs
        if not run.whole
    ]
    return [run for run in runs if run.whole], lost


def static_budget(run: RunResult) -> int | None:
    """The budget of a run whose setting is static by its parameters or its name; None for any other."""
    if run.params is not None:
        return run.params.b_max if run.params.is_static else None
    match = _STATIC.match(run.config)
    return int(match[1]) if match and len(match[1]) < 9 else None


def settings_of(runs: Sequence[RunResult]) -> tuple[list[str], list[str]]:
    """Names of the adaptive settings in order of appearance, and of the static ones by ascending budget."""
    budgets = {run.config: static_budget(run) for run in runs}
    static = {name: budget for name, budget in budgets.items() if budget is not None}
    return [name for name in budgets if name not in static], sorted(static, key=lambda name: (static[name], name))


def find_setting(wanted: str, names: Sequence[str]) -> str:
    """The one of `names` that `wanted` means: itself, `mbt-2048` for `mbt_2048_s256`, `ppas` for `ppas_`, or `2048`.

    Raises InvalidInput, with the names, when none or several fit.
    """
    if wanted in names:
        return wanted
    plain = re.sub(r"[-_ ]+", "_", wanted.lower()).strip("_")
    plain = f"mbt_{plain}" if plain.isdigit() else plain
    shaped = {name: re.sub(r"[-_ ]+", "_", name.lower()).strip("_") for name in names}
    exact = [name for name, shape in shaped.items() if shape == plain]
    fits = exact or [name for name, shape in shaped.items() if shape.startswith(f"{plain}_")]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise InvalidInput(f"{wanted!r} may be any of {', '.join(fits)}; name one in full")
    raise InvalidInput(f"no setting {wanted!r} in these runs{did_you_mean(wanted, names)}")


def improvement(runs: Sequence[RunResult], candidate: str, baseline: str) -> Improvement:
    """`candidate` against `baseline`, paired by trace; runs repeated on a trace count with their mean.

    Raises InvalidInput when no trace was run under both.
    """
    ours, theirs = _by_trace(runs, candidate), _by_trace(runs, baseline)
    both = [key for key in ours if key in theirs]
    if not both:
        raise InvalidInput(f"{candidate} and {baseline} share no trace in these runs; nothing can be compared")
    keys: dict[str, list[str]] = {}
    for key in both:
        keys.setdefault(ours[key][0].workload.regime, []).append(key)
    ratios = {
        regime: {name: _ratio([ours[k] for k in own], [theirs[k] for k in own], name) for name in METRICS}
        for regime, own in sorted(keys.items(), key=_numeric)
    }
    overall = {name: _percent(aggregate.geometric_mean(ratio[name] for ratio in ratios.values())) for name in METRICS}
    return Improvement(
        candidate=candidate,
        baseline=baseline,
        overall=overall,
        regimes={regime: {n: _percent(value) for n, value in by_name.items()} for regime, by_name in ratios.items()},
        num_traces=len(both),
        unpaired=len(ours.keys() ^ theirs.keys()),
        matched=_matched([(a, b) for key in both for a, b in zip(ours[key], theirs[key], strict=False)]),
    )


def best_baseline(found: Sequence[Improvement], metric: str = "mean_latency_s") -> Improvement | None:
    """The comparison with the baseline that does best in `metric`: the one that the candidate gains least on."""
    known = [(value, one) for one in found if (value := one.overall[metric]) is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def _by_trace(runs: Sequence[RunResult], config: str) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        if run.config == config:
            found.setdefault(run.workload.key, []).append(run)
    return found


def _ratio(ours: Sequence[Sequence[RunResult]], theirs: Sequence[Sequence[RunResult]], name: str) -> float:
    """Ratio of the means over one regime's traces; NaN where a run does not say the metric."""
    sides = [
        math.fsum(_mean([run.metrics.get(name, math.nan) for run in repeats]) for repeats in side)
        for side in (ours, theirs)
    ]
    return sides[0] / sides[1] if sides[1] > 0 else math.nan


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _percent(ratio: float) -> float | None:
    return aggregate.improvement_pct(ratio) if math.isfinite(ratio) and ratio > 0 else None


def _matched(pairs: Sequence[tuple[RunResult, RunResult]]) -> Matched | None:
    differences: list[float] = []
    unmatched = 0
    for ours, theirs in pairs:
        if ours.requests is None or theirs.requests is None:
            continue
        if not all(
            side.requests.has_ids or len(side.requests) == side.num_requests for side in (ours, theirs) if side.requests
        ):
            unmatched += ours.num_requests  # without ids, and not all listed: nobody can tell which is which
            continue
        a, b = (
            {
                key: float(latency_s)
                for key, latency_s, ok in zip(side.pairing(), side.latency_s, side.ok, strict=True)
                if ok
            }
            for side in (ours.requests, theirs.requests)
        )
        differences += [a[key] - b[key] for key in a if key in b]
        unmatched += len(a.keys() ^ b.keys())
    if not differences:
        return None
    gap = np.array(differences)
    return Matched(
        requests=len(gap),
        faster=float((gap < 0).mean()),
        slower=float((gap > 0).mean()),
        tied=float((np.abs(gap) < TIE_S).mean()),
        unmatched=unmatched,
    )


def _numeric(entry: tuple[str, object]) -> list[tuple[int, float, str]]:
    """Sorts λ=0.4 before λ=1.2 and λ=10, and text by itself."""
    parts = re.split(r"(\d+(?:\.\d+)?)", entry[0])
    return [(0, float(part), "") if place % 2 else (1, 0.0, part) for place, part in enumerate(parts)]
