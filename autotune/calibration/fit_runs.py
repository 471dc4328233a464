"""A simulator profile fitted to run-level results: which step costs would have given the figures that were measured.

A non-linear least-squares fit through the simulator. Each coefficient is the exponential of a free parameter, so that it
stays positive, and is pulled weakly towards its prior (`fit_priors`): what the runs leave open must still be physical.
Single runs stray far, so a run counts less than quadratically from a few per cent on. What a step log gives at once
takes many runs here, and some of it stays open: the profile's `fit` notes say in words what.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autotune.calibration.fit_notes import HELD_FACTOR, identifiability, measured_range, run_noise
from autotune.calibration.fit_priors import COEFFICIENTS, RAMP, Prior, prior_of
from autotune.calibration.runs_simulated import FitRun, Fleet
from autotune.progress import Progress, Silent
from autotune.runlogs.model import METRICS
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import Profile

Floats = npt.NDArray[np.float64]

WEIGHTS: Final = np.array([1.0, 0.7, 0.7, 0.5, 0.5, 0.3, 0.3])
"""What a relative error of each of METRICS counts."""
SOFTNESS: Final = 0.05
"""Relative residual from which a run counts less than quadratically: single published runs stray by up to 41 %."""
PRIOR_WEIGHT: Final = 0.05
"""Residual of a coefficient that lies one prior standard deviation off, in units of relative error. Where the runs turn
out to be less noisy than that, their noise takes its place, so that the prior counts as one run does."""
_SPEEDS: Final = np.exp(np.linspace(np.log(1 / 12), np.log(12), 15))
_POOL_FACTORS: Final = (0.4, 0.6, 0.8, 1.25, 1.6, 2.5)
_CLEAR: Final = {"num_kv_blocks": 0.97, "pipeline_depth": 0.85}
"""Another value of these is taken where it lowers the cost to this share: the data must speak for it. Depth 2 is vLLM's
default, and coefficients make up for a wrong depth: 0.98 of the cost was seen, with twice the error on held-out runs."""
_BETTER: Final = 0.99
"""Share of the cost from which another place of the search is better."""
_MAX_BLOCKS: Final = 2**22
MIN_RUNS: Final = 4


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of the server that the runs are from; None is found from the runs as far as they tell, else assumed."""

    model: str = ""
    gpu: str = ""
    vllm_version: str = ""
    num_kv_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    pipeline_depth: int | None = None


_UNKNOWN: Final = Server()


@dataclass(slots=True)
class _Best:
    """The best coefficients so far of one search, so that a search cut short is not lost."""

    values: Floats
    cost: float = np.inf


class _OutOfTime(Exception):
    pass


class Problem:
    """Runs to be explained, and the profile around the coefficients."""

    def __init__(
        self,
        runs: Sequence[FitRun],
        template: Profile,
        prior: Prior,
        deadline_s: float,
        progress: Progress | None = None,
    ) -> None:
        self.fleet = Fleet(runs)
        self.template = template
        self.prior = prior
        self.deadline_s = deadline_s
        self.progress = progress or Silent()
        self.prior_weight = PRIOR_WEIGHT
        self.held: dict[str, float] = {}
        """Coefficients that a search leaves alone, by name."""

    def profile(self, names: Sequence[str], values: Floats) -> Profile:
        """The template with the coefficients `names` at the exponentials of `values`."""
        by_name = dict(zip(names, np.exp(values).tolist(), strict=True))
        by_name |= self.held
        delay_s = by_name.pop("frontend_delay_s")
        return replace(self.template, cost=StepCost(**by_name), frontend_delay_s=min(delay_s, 60.0))

    def residuals(self, names: tuple[str, ...], values: Floats) -> Floats:
        """Weighted soft relative errors of every run and metric (0 where not measured), then the pull to the prior."""
        predicted = self.fleet.predict(self.profile(names, values))
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.log(predicted / self.fleet.measured)
        error[~np.isfinite(error)] = 0.0
        soft = np.sign(error) * SOFTNESS * np.sqrt(2 * (np.sqrt(1 + (error / SOFTNESS) ** 2) - 1))
        spread = np.array([self.prior.spread[name] for name in names])
        pull = self.prior_weight * (values - np.array(self.prior.log_centre(names))) / spread
        return np.concatenate([(soft * WEIGHTS).ravel(), pull])

    def cost(self, names: tuple[str, ...], values: Floats) -> float:
        """Half the sum of squares, as the search minimises it."""
        return float(0.5 * np.sum(self.residuals(names, values) ** 2))

    def data_cost(self, names: tuple[str, ...], values: Floats) -> float:
        """As `cost`, without the pull to the prior."""
        return float(0.5 * np.sum(self.residuals(names, values)[: len(self.fleet.runs) * len(METRICS)] ** 2))

    def search(
        self, names: tuple[str, ...], starts: Sequence[Floats], evaluations: int = 30, diff_step: float = 2e-2
    ) -> _Best:
        """The best coefficients from any of `starts`, or the best met until the deadline.

        diff_step: relative step of the derivatives. Simulated figures jump where the order of steps changes; too small
            a step sees the jumps, too large a one not the slope.
        """
        best = _Best(starts[0])
        bounds = (np.log(1e-13), np.log(1e6))

        def watched(values: Floats) -> Floats:
            if time.monotonic() > self.deadline_s and np.isfinite(best.cost):
                raise _OutOfTime
            found = self.residuals(names, values)
            cost = float(0.5 * np.sum(found**2))
            if cost < best.cost:
                best.values, best.cost = values.copy(), cost
            return found

        for start in starts:
            try:
                found = least_squares(
                    watched,
                    np.clip(start, *bounds),
                    bounds=bounds,
                    diff_step=np.full(len(names), diff_step),
                    max_nfev=evaluations,
                    x_scale=0.3,
                )
            except _OutOfTime:
                break
            if found.cost <= best.cost:
                best.values, best.cost = found.x, float(found.cost)
            self.progress.advance(f"cost {best.cost:.4f}")
        return best


def fit_runs(
    runs: Sequence[FitRun],
    *,
    name: str,
    server: Server = _UNKNOWN,
    prior: Prior | None = None,
    starts: int = 4,
    seed: int = 0,
    time_limit_s: float = 240.0,
    progress: Progress | None = None,
) -> Profile:
    """The profile whose simulated figures are nearest to the measured ones of `runs`.

    server: facts of the server; what is None is searched for (KV pool, pipeline depth) or assumed, and said so.
    starts: starting points of the search. time_limit_s: after it the best found so far is taken; `fit.stopped_early`.
    Raises InvalidInput with fewer than MIN_RUNS runs, NoResult where no coefficients come near.
    """
    if len(runs) < MIN_RUNS:
        raise InvalidInput(f"{len(runs)} runs to fit on; at least {MIN_RUNS} are needed, better a static budget sweep")
    began_s = time.monotonic()
    progress = progress or Silent()
    prior = prior or prior_of(server.model, server.gpu)
    template, assumed = _template(runs, name, server, prior)
    problem = Problem(runs, template, prior, began_s + time_limit_s, progress)
    progress.begin(f"Fitting {name}", 2 * starts + 2 * len(COEFFICIENTS + RAMP) + 6)
    if not prior.known:
        problem.prior = prior = _at_speed(problem)
    rng = np.random.default_rng(seed)
    found: dict[str, tuple[tuple[str, ...], _Best, dict[str, float]]] = {}
    forms: dict[str, tuple[str, ...]] = {"without ramp": COEFFICIENTS, "with ramp": (*COEFFICIENTS, *RAMP)}
    for label, names in forms.items():
        best = problem.search(names, _starts(prior, names, starts, rng))
        found[label] = (names, best, left_out_errors(problem, runs, names, best.values))
        progress.advance(f"{label}: left-out error {found[label][2]['mean']:.2%}")
    kept = min(found, key=lambda label: found[label][2]["mean"])
    names, best, _ = found[kept]
    problem.prior_weight = min(PRIOR_WEIGHT, run_noise(problem.data_cost(names, best.values), len(runs)))
    best = _polished(problem, names, best.values)
    best, tried = _server_facts(problem, names, best, server)
    best, held = _explored(problem, names, best)
    if not np.isfinite(best.cost) or _mean_error(problem, names, best.values) > 1.0:
        raise NoResult("no step costs come within 100 % of these runs: are they of one server, and the settings right?")
    profile = problem.profile(names, best.values)
    cost = StepCost(**{key: float(f"{value:.5g}") for key, value in profile.cost.to_dict().items()})
    profile = replace(profile, cost=cost, frontend_delay_s=float(f"{profile.frontend_delay_s:.5g}"))
    error = np.abs(problem.fleet.predict(profile) / problem.fleet.measured - 1)
    notes: dict[str, Any] = {
        "metrics": "relative errors |predicted / measured - 1| of run-level figures; latency counts from sending",
        "fitted_error_per_run": by_metric(_mean(error)),
        "kept_form": kept,
        "left_out_error": {label: entry[2] for label, entry in found.items()},
        "assumed": assumed | {key: value for key, value in tried.items() if value},
        "prior": {"source": prior.source, "weight": round(problem.prior_weight, 4)}
        | {key: {"value": prior.centre[key], "sd_of_log": prior.spread[key]} for key in names},
        "measured_range": measured_range(runs),
        "identified": identifiability(
            runs,
            dict(zip(names, np.exp(best.values).tolist(), strict=True)),
            problem.data_cost(names, best.values),
            held,
        ),
        "stopped_early": time.monotonic() > problem.deadline_s,
    }
    progress.end()
    provenance = {
        "source": sorted({run.file for run in runs}),
        "runs_fitted": f"{len(runs)} runs: " + ", ".join(sorted({run.params.label() for run in runs}))[:400],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "fitted_by": "ppas, run-level fit (autotune.calibration.fit_runs)",
    }
    return replace(profile, provenance=provenance, fit=notes)


def with_held_out(profile: Profile, runs: Sequence[FitRun]) -> Profile:
    """`profile` with its errors on `runs`, which it was not fitted on, among its fit notes, where reports look for them."""
    fleet = Fleet(runs)
    predicted = fleet.predict(profile)
    per_run = _mean(np.abs(predicted / fleet.measured - 1))
    regimes = _mean(np.abs(fleet.regime_errors(predicted)))
    named = by_metric(regimes) | {"avg_latency": round(float(regimes[0]), 4)}
    notes = {
        "held_out_error_per_run": by_metric(per_run),
        "held_out_ppas_error_per_regime": {
            "runs": len(runs),
            "settings": sorted({run.params.label() for run in runs}),
            "mean_absolute": {name: value for name, value in named.items() if value is not None},
        },
    }
    return replace(profile, fit={**profile.fit, **notes})


def left_out_errors(
    problem: Problem, runs: Sequence[FitRun], names: tuple[str, ...], start: Floats
) -> dict[str, float]:
    """Mean absolute regime error of mean latency on each part left out: inner static budgets, else seeds, else files."""
    errors: dict[str, float] = {}
    for label, left_out in _parts(runs):
        rest = [run for run in runs if run not in left_out]
        own = Problem(rest, problem.template, problem.prior, problem.deadline_s)
        values = own.search(names, [start], evaluations=12).values
        fleet = Fleet(left_out)
        error = fleet.regime_errors(fleet.predict(problem.profile(names, values)))[:, 0]
        errors[label] = round(float(np.nanmean(np.abs(error))), 4)
    errors["mean"] = round(float(np.mean(list(errors.values()))), 4) if errors else 0.0
    return errors


def by_metric(values: Floats) -> dict[str, float | None]:
    """One number a metric, rounded; None where undefined."""
    return {name: round(float(v), 4) if np.isfinite(v) else None for name, v in zip(METRICS, values, strict=True)}


def _parts(runs: Sequence[FitRun]) -> list[tuple[str, list[FitRun]]]:
    budgets = sorted({run.params.b_max for run in runs if run.params.is_static})
    if len(budgets) >= 4:  # the end points would be extrapolated
        return [
            (f"budget {b}", [run for run in runs if run.params.is_static and run.params.b_max == b])
            for b in budgets[1:-1]
        ]
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    if len(seeds) < 2:
        return []
    step = -(-len(seeds) // 5)
    chosen = [seeds[place : place + step] for place in range(0, len(seeds), step)]
    parts = [(f"seed {', '.join(map(str, part))}", [run for run in runs if run.seed in part]) for part in chosen]
    return [(label, part) for label, part in parts if len(runs) - len(part) >= MIN_RUNS]


def _template(runs: Sequence[FitRun], name: str, server: Server, prior: Prior) -> tuple[Profile, dict[str, str]]:
    """The profile around the coefficients, and what of it is assumed, in words."""
    longest = max(run.arrays.longest_tokens for run in runs)
    block_size = server.block_size or 16
    least = -(-longest // block_size) + 2
    assumed: dict[str, str] = {}
    blocks = server.num_kv_blocks
    if blocks is None:
        wanted = prior.num_kv_blocks * 16 // block_size if prior.num_kv_blocks else _MAX_BLOCKS
        blocks = max(wanted, least)
        assumed["num_kv_blocks"] = "not in the runs; begun with what memory and weights should leave, then searched for"
    elif blocks < least:
        raise InvalidInput(
            f"num_kv_blocks is {blocks}; these runs have a request that needs {least} of {block_size} tokens"
        )
    length = server.max_model_len or max(32_768, 2 ** int(np.ceil(np.log2(longest + 1))))
    if server.max_model_len is None:
        assumed["max_model_len"] = f"{length}, not in the runs"
    if server.pipeline_depth is None:
        assumed["pipeline_depth"] = "begun with 2 (vLLM schedules asynchronously by default), depth 1 tried"
    template = Profile(
        name=name,
        model=server.model or "unknown",
        gpu=server.gpu or "unknown",
        vllm_version=server.vllm_version or "unknown",
        cost=StepCost(0.001, 0.0, 0.0, 0.0, 0.0),
        frontend_delay_s=0.0,
        num_kv_blocks=blocks,
        block_size=block_size,
        max_model_len=length,
        pipeline_depth=server.pipeline_depth or 2,
    )
    return template, assumed


def _at_speed(problem: Problem) -> Prior:
    """The prior moved to the overall speed that explains the runs best: model or GPU are only guessed."""
    names = COEFFICIENTS
    flat = problem.prior
    costs = []
    for factor in _SPEEDS:
        moved = flat.faster(float(factor))
        problem.prior = moved
        costs.append(problem.cost(names, np.array(moved.log_centre(names))))
    return flat.faster(float(_SPEEDS[int(np.argmin(costs))]))


def _starts(prior: Prior, names: tuple[str, ...], count: int, rng: np.random.Generator) -> list[Floats]:
    centre = np.array(prior.log_centre(names))
    spread = np.array([prior.spread[name] for name in names])
    return [centre] + [centre + 0.5 * spread * rng.standard_normal(len(names)) for _ in range(max(count, 1) - 1)]


def _polished(problem: Problem, names: tuple[str, ...], values: Floats) -> _Best:
    """The best near `values`, with derivatives over wide and narrow steps in turn: either alone gets stuck."""
    for diff_step in (6e-2, 5e-3, 2e-2):
        values = problem.search(names, [values], evaluations=10, diff_step=diff_step).values
    return _Best(values, problem.cost(names, values))


def _server_facts(
    problem: Problem, names: tuple[str, ...], best: _Best, server: Server
) -> tuple[_Best, dict[str, dict[str, float]]]:
    """KV pool and pipeline depth where the server's are not known: another one is kept when the runs clearly want it."""
    tried: dict[str, dict[str, float]] = {"cost_by_num_kv_blocks": {}, "cost_by_pipeline_depth": {}}
    if server.num_kv_blocks is None:
        first = problem.template
        costs = {}
        for blocks in _pools(problem):
            problem.template = replace(first, num_kv_blocks=blocks)
            costs[blocks] = problem.cost(names, best.values)
        tried["cost_by_num_kv_blocks"] = {str(blocks): round(cost, 5) for blocks, cost in sorted(costs.items())}
        wanted = min(costs, key=lambda blocks: costs[blocks])
        problem.template = first
        if costs[wanted] < _CLEAR["num_kv_blocks"] * best.cost:
            problem.template = replace(first, num_kv_blocks=wanted)
            best = problem.search(names, [best.values])
    if server.pipeline_depth is None:
        first = problem.template
        problem.template = replace(first, pipeline_depth=1)
        other = problem.search(names, [best.values])
        tried["cost_by_pipeline_depth"] = {"2": round(best.cost, 5), "1": round(other.cost, 5)}
        if other.cost < _CLEAR["pipeline_depth"] * best.cost:
            best = other
        else:
            problem.template = first
    return best, tried


def _pools(problem: Problem) -> list[int]:
    """Pool sizes worth trying: around the assumed one, and from the longest request to all of a trace at once."""
    block_size = problem.template.block_size
    least = -(-max(run.arrays.longest_tokens for run in problem.fleet.runs) // block_size) + 2
    most = (
        max(int(np.sum(run.arrays.prompt_tokens + run.arrays.output_tokens)) for run in problem.fleet.runs)
        // block_size
        + 2
    )
    start = min(problem.template.num_kv_blocks, most)
    around = [int(start * factor) for factor in _POOL_FACTORS]
    spread = np.geomspace(least, max(most, least + 1), 10).astype(int).tolist()
    return sorted({blocks for blocks in (*around, *spread, problem.template.num_kv_blocks) if blocks >= least})


def _explored(problem: Problem, names: tuple[str, ...], best: _Best) -> tuple[_Best, dict[str, tuple[float, float]]]:
    """What holding each coefficient costs; once over again from a better place, where that was found on the way."""
    held, other = _when_held(problem, names, best.values)
    if other.cost < _BETTER * best.cost and time.monotonic() < problem.deadline_s:
        best = _polished(problem, names, other.values)
        held, _ = _when_held(problem, names, best.values)
    return best, held


def _when_held(
    problem: Problem, names: tuple[str, ...], values: Floats
) -> tuple[dict[str, tuple[float, float]], _Best]:
    """Cost to the data with each coefficient held below and above its value, and the others fitted again.

    Also the best coefficients met on the way, by the whole cost: a search along a valley may end before its bottom.
    """
    costs: dict[str, tuple[float, float]] = {}
    met = _Best(values)
    for place, name in enumerate(names):
        free = names[:place] + names[place + 1 :]
        pair = []
        for factor in (1 / HELD_FACTOR, HELD_FACTOR):
            moved = values[place] + np.log(factor)
            problem.held = {name: float(np.exp(moved))}
            found = problem.search(free, [np.delete(values, place)], evaluations=8)
            pair.append(problem.data_cost(free, found.values))
            problem.held = {}
            whole = np.insert(found.values, place, moved)
            if (cost := problem.cost(names, whole)) < met.cost:
                met = _Best(whole, cost)
        if time.monotonic() < problem.deadline_s:  # a search cut short would make any coefficient look indispensable
            costs[name] = (pair[0], pair[1])
    return costs, met


def _mean_error(problem: Problem, names: tuple[str, ...], values: Floats) -> float:
    predicted = problem.fleet.predict(problem.profile(names, values))
    return float(np.nanmedian(np.abs(predicted[:, 0] / problem.fleet.measured[:, 0] - 1)))


def _mean(error: Floats) -> Floats:
    return np.array([np.nanmean(column) if np.isfinite(column).any() else np.nan for column in error.T])
