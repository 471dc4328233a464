"""How many live trials a good setting costs: `search_cost.py [--seeds N] [--cases ...] [--arms ...]`.

A shipped profile plays the server, with noise on every step; so the true optimum is known, from a sweep without noise.
Every arm measures the same known settings first (reference, static budgets), then so many trials. What it would
recommend after each of them is held against the optimum: the three that look best so far are measured twice more and the
best average wins, as the tuner does it (these repeats are not counted as trials, in no arm). Printed per arm: the
median gap in per cent after 0, 5, 10, 20 and 40 trials with its interquartile range over the seeds, and the trials until
the gap is at most 1 %. All arms of a seed see the same noise per setting.

    random, tpe, gp, nsga2   Optuna's samplers, from scratch
    grid                     an even grid of 40 settings, in random order
    calibrated               guided by a profile that `calibrate` fitted to the noisy server
    off-25, off-100          guided by the true profile with each coefficient 25 % off, or by a factor of two, up or down
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune import aggregate
from autotune.calibration.calibrate import calibrate
from autotune.evaluate import SimulatedEvaluator
from autotune.foresight.forecast import Forecast, forecast
from autotune.foresight.guide import Guide, Measured
from autotune.plan import CONFIRMED
from autotune.study import Outcome, Search, SearchTrial
from ppas_core.defaults import STATIC_BUDGETS, published
from ppas_core.policy import PolicyParams
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import Profile, load_profile
from search_spaces.space import Space, load_space
from traces.format import Trace
from traces.generate import rag_bursts

METRIC = "mean_latency_s"
REFERENCE = published("ppas")
KNOWN = [REFERENCE, *(PolicyParams.static(budget) for budget in STATIC_BUDGETS)]
TRIALS = 40
SHOWN = (0, 5, 10, 20, 40)
GUIDED = ("calibrated", "off-25", "off-100")
SAMPLERS = ("random", "tpe", "gp", "nsga2")
TRUE_CHUNKS, GUIDE_CHUNKS = 2_000_000_000, 300_000_000


@dataclass(frozen=True)
class Case:
    """A server, a space and traffic to tune for; noise: of the log of a step's duration."""

    name: str
    profile: str
    space: str
    rates: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    noise: float

    def traces(self) -> list[Trace]:
        return [
            rag_bursts(rate, seed, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
            for rate in self.rates
            for seed in range(2)
        ]


CASES = {
    case.name: case
    for case in (
        Case("paper-3b", "rtx5090-qwen2.5-3b", "ppas", (0.4, 0.6, 0.8, 1.0, 1.2, 1.4), 25_000, 32, 0.05),
        Case("short-3b", "rtx5090-qwen2.5-3b", "ppas", (4.0, 8.0, 12.0), 4_000, 64, 0.05),
        Case("plus-3b", "rtx5090-qwen2.5-3b", "ppas-plus", (0.4, 0.6, 0.8, 1.0, 1.2, 1.4), 25_000, 32, 0.05),
    )
}


class Bench:
    """One case: the truth, and noisy measurements of it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.profile = load_profile(case.profile)
        self.space: Space = load_space(case.space)
        self.traces = case.traces()
        self.truth = forecast(
            self.profile, self.space, self.traces, REFERENCE, (METRIC,), also=KNOWN, most_chunks=TRUE_CHUNKS
        )
        self.best = float(self.truth.ratios[METRIC].min())
        self.repeats: dict[tuple[PolicyParams, int, int], float] = {}
        runs = [self.means(REFERENCE, 10**6 + seed) for seed in range(8)]
        self.noise = float(np.std([math.log(aggregate.objective(METRIC, run, runs[0])) for run in runs[1:]], ddof=1))

    def means(self, params: PolicyParams, seed: int) -> aggregate.RegimeMeans:
        server = SimulatedEvaluator(self.profile, noise_sigma=self.case.noise, seed=seed)
        return aggregate.regime_means([server.replay(params, trace) for trace in self.traces], (METRIC,))

    def gap_pct(self, params: PolicyParams) -> float:
        return max(0.0, 100 * (self.truth.ratio(params)[METRIC] / self.best - 1))

    def guide(self, arm: str, seed: int) -> Guide:
        profile = self._profile(arm, seed)
        found: Forecast = forecast(
            profile, self.space, self.traces, REFERENCE, (METRIC,), also=KNOWN, most_chunks=GUIDE_CHUNKS
        )
        noise = max(self.noise, 1e-4)
        return Guide(found, self.space, (METRIC,), known=KNOWN, noise=noise, visible=3 * math.sqrt(2) * noise)

    def _profile(self, arm: str, seed: int) -> Profile:
        if arm == "calibrated":
            return calibrate(
                SimulatedEvaluator(self.profile, noise_sigma=self.case.noise, seed=seed),
                self.traces,
                budgets=[params.b_max for params in KNOWN],
                max_num_seqs=REFERENCE.max_num_seqs,
                reference=None,
                name="calibrated",
                device="simulated",
                seed=seed,
            )
        factor = 1 + int(arm.removeprefix("off-")) / 100
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=len(self.profile.cost.to_dict()))
        cost = self.profile.cost.to_dict()
        wrong = {name: value * factor**sign for (name, value), sign in zip(cost.items(), signs, strict=True)}
        return replace(self.profile, name=arm, cost=StepCost(**wrong))

    def run(self, arm: str, seed: int) -> list[float]:
        """The gap of the recommended setting after 0, 1, … TRIALS trials beyond the known settings."""
        base = self.means(REFERENCE, seed)
        guide = self.guide(arm, seed) if arm in GUIDED else None
        grid = list(self.space.grid(2 * TRIALS)) if arm == "grid" else []  # at most so many; TRIALS of them are tried
        np.random.default_rng(seed).shuffle(grid)  # type: ignore[arg-type]
        first = [params for params in KNOWN if self.space.contains(params)]
        outside = [
            SearchTrial(-1, "static", params, self._outcome(params, base, seed))
            for params in KNOWN
            if params not in first
        ]

        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            search = Search(
                Path(folder) / "study.db",
                arm,
                space=self.space,
                objectives=(METRIC,),
                sampler=arm if arm in SAMPLERS else "gp",
                seed=seed,
                deterministic=False,
                first=[("static", params) for params in first],
            )
            done: list[SearchTrial] = []
            trusted = True
            gaps = []
            while len(done) < len(first) + TRIALS:
                if len(done) >= len(first):
                    if grid:
                        search.propose("search", grid[len(done) - len(first)])
                    elif guide is not None and trusted:
                        measured = [Measured(trial.params, trial.outcome.objectives) for trial in [*outside, *done]]
                        trusted = guide.judge(measured).trusted
                        proposal = guide.suggestion({trial.params for trial in done}, measured) if trusted else None
                        if proposal is not None:
                            search.propose("predicted", proposal)
                done.append(search.step(lambda number, params: self._outcome(params, base, seed)))
                gaps.append(self.gap_pct(self._recommended([*outside, *done], base, seed)))
        return gaps[len(first) - 1 :]

    def _recommended(self, trials: list[SearchTrial], base: aggregate.RegimeMeans, seed: int) -> PolicyParams:
        top = sorted(trials, key=lambda trial: trial.outcome.objectives[METRIC])[:CONFIRMED]

        def averaged(trial: SearchTrial) -> float:
            repeats = [self._repeat(trial.params, base, seed, number) for number in (1, 2)]
            return float(np.mean([trial.outcome.objectives[METRIC], *repeats]))

        return min(top, key=averaged).params

    def _repeat(self, params: PolicyParams, base: aggregate.RegimeMeans, seed: int, number: int) -> float:
        key = (params, seed, number)
        if key not in self.repeats:
            means = self.means(params, seed + 1000 * number)
            self.repeats[key] = aggregate.objective(METRIC, means, base)
        return self.repeats[key]

    def _outcome(self, params: PolicyParams, base: aggregate.RegimeMeans, seed: int) -> Outcome:
        means = base if params == REFERENCE else self.means(params, seed)
        return Outcome({METRIC: aggregate.objective(METRIC, means, base)}, means, {}, 0.0)


def row(arm: str, gaps: np.ndarray, seconds: float) -> str:
    shown = "  ".join(
        f"{np.median(gaps[:, k]):5.2f} [{np.quantile(gaps[:, k], 0.25):.2f}, {np.quantile(gaps[:, k], 0.75):.2f}]"
        for k in SHOWN
    )
    until = [next((k for k, gap in enumerate(one) if gap <= 1), None) for one in gaps]
    reached = [math.inf if k is None else k for k in until]
    median = float(np.median(reached))
    text = "never" if math.isinf(median) else f"{median:g}"
    within = f"within 1 %: median {text:>5}, {sum(k is not None for k in until)} of {len(until)}"
    return f"{arm:11} {shown}   {within}   {seconds:.0f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="which cases")
    parser.add_argument("--arms", default=",".join([*SAMPLERS, "grid", *GUIDED]), help="which arms")
    parser.add_argument("--seeds", type=int, default=10, help="seeds per arm")
    options = parser.parse_args(arguments)
    for name in options.cases.split(","):
        bench = Bench(CASES[name])
        best = bench.truth.settings[int(np.argmin(bench.truth.ratios[METRIC]))]
        print(
            f"\n{name} ({bench.case.profile}, simulated): {len(bench.truth.settings)} settings, best {best.label()}, "
            f"{100 * (1 - bench.best):.2f} % better than the paper default; an objective's noise is {100 * bench.noise:.2f} %"
        )
        print(
            f"{'arm':11} gap in % after {', '.join(map(str, SHOWN))} trials: median [quartiles], {options.seeds} seeds"
        )
        for arm in options.arms.split(","):
            started = time.perf_counter()
            gaps = np.array([bench.run(arm, seed) for seed in range(options.seeds)])
            print(row(arm, gaps, time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
