"""Fit simulator profiles to the runs published with the P-PAS paper: `fit_published.py LOG... [--out FOLDER]`.

Only runs with a static budget are fitted. The P-PAS runs of a log are held out: they choose nothing, neither a
coefficient nor a term; the error on them is written beside the fit.

Each coefficient is the exponential of a free parameter, so that it stays positive, and is pulled weakly towards a value
computed from the model's shape and the GPU's data sheet: one prompt length cannot separate prefill_token_s,
prefill_pair_s and the front-end delay, and what the data leave open must still be physical. The ramp term is kept when
it lowers the error on static budgets left out of the fit (or on seeds left out, when the log holds too few budgets).
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from ppas_core.defaults import published
from ppas_core.policy import PolicyParams
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import Profile
from ppas_core.sim.simulate import RequestArrays, RequestBatch, simulate_many
from traces.generate import parse_phases, rag_bursts

Floats = npt.NDArray[np.float64]

METRICS: Final = ("avg_latency", "p95_latency", "avg_ttft", "p95_ttft", "avg_tpot", "p95_tpot", "makespan")
WEIGHTS: Final = np.array([1.0, 0.7, 0.7, 0.5, 0.5, 0.3, 0.3])
SOFTNESS: Final = 0.05
"""Relative residual from which a run counts less than quadratically: single runs stray by up to 41 %."""
PRIOR_WEIGHT: Final = 0.05
"""Residual of a coefficient that lies one prior standard deviation off, in units of relative error."""
BASE: Final = (
    "step_s",
    "prefill_token_s",
    "prefill_pair_s",
    "decode_token_s",
    "decode_context_token_s",
    "prefill_step_s",
    "mixed_step_s",
    "frontend_delay_s",
)
RAMP: Final = ("prefill_ramp_token_s", "prefill_ramp_tokens")
PRIOR_SD: Final = {
    "step_s": 0.5,
    "prefill_token_s": 0.5,
    "prefill_pair_s": 0.5,
    "decode_token_s": 1.0,
    "decode_context_token_s": 1.0,
    "prefill_step_s": 1.5,
    "mixed_step_s": 1.5,
    "frontend_delay_s": 0.7,
    "prefill_ramp_token_s": 1.0,
    "prefill_ramp_tokens": 0.7,
}
"""Standard deviations of the log of a coefficient around its prior."""


@dataclass(frozen=True)
class Served:
    """A served model, from its published configuration, and the KV pool assumed for it on a 32 GB GPU."""

    name: str
    linear_params: float  # without the embedding table
    weight_bytes: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_kv_blocks: int

    def prior(self) -> dict[str, float]:
        """Coefficients as the RTX 5090's data sheet gives them: 209 TFLOP/s dense bf16, 1.79 TB/s; the rest guessed."""
        flops_per_s, bytes_per_s = 209e12, 1.79e12
        kv_bytes = 2 * self.num_layers * self.num_kv_heads * self.head_size * 2
        token_s = 2 * self.linear_params / flops_per_s
        read_s = self.weight_bytes / bytes_per_s
        return {
            "step_s": read_s + 0.001,
            "prefill_token_s": token_s,
            "prefill_pair_s": 4 * self.num_layers * self.num_heads * self.head_size / flops_per_s,
            "decode_token_s": 3e-5,
            "decode_context_token_s": kv_bytes / bytes_per_s,
            "prefill_step_s": 0.001,
            "mixed_step_s": 0.004,
            "frontend_delay_s": 0.06,
            "prefill_ramp_token_s": 0.2 * token_s,
            "prefill_ramp_tokens": 2048.0,
        }


MODELS: Final = {
    "Qwen/Qwen2.5-3B-Instruct": Served("rtx5090-qwen2.5-3b", 2.77e9, 6.17e9, 36, 16, 2, 128, 36_000),
    "Qwen/Qwen2.5-0.5B-Instruct": Served("rtx5090-qwen2.5-0.5b", 0.36e9, 0.99e9, 24, 14, 2, 64, 130_000),
}


class Runs:
    """The runs of one log, each with its regenerated trace; arrays are indexed by run."""

    def __init__(self, log: Path) -> None:
        text = log.read_text(encoding="utf-8")
        rows = [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{'trace_id':")]
        self.source = log.name
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.model = next(word for word in text.split() if word in MODELS)
        assert all(row["failed"] == 0 for row in rows), "a run with failed requests has no latency"
        self.rate = np.array([parse_phases(row["phase_schedule"])[1].rate_per_s for row in rows])
        self.seed = np.array([row["seed"] for row in rows])
        self.is_ppas = np.array([row["config_name"].startswith("ppas") for row in rows])
        self.budget = np.array([row["max_num_batched_tokens"] for row in rows])
        self.measured = np.array([[row[metric] for metric in METRICS] for row in rows])
        self.traces = []
        for row, rate in zip(rows, self.rate, strict=True):
            trace = rag_bursts(
                rate,
                row["seed"],
                prompt_tokens=row["configured_prompt_tokens"],
                output_tokens=row["configured_output_tokens"],
            )
            assert len(trace.requests) == row["num_requests"], row["phase_schedule"]
            shape = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests]
            arrival_s, prompts, outputs = zip(*shape, strict=True)
            self.traces.append(RequestArrays(np.array(arrival_s), np.array(prompts), np.array(outputs)))
        self.static = np.flatnonzero(~self.is_ppas)
        self.ppas = np.flatnonzero(self.is_ppas)

    def groups(self, runs: npt.NDArray[np.int64]) -> list[tuple[PolicyParams, RequestBatch, npt.NDArray[np.int64]]]:
        """These runs by setting, each with its packed traces."""
        found = []
        for is_ppas, budget in sorted({(bool(self.is_ppas[run]), int(self.budget[run])) for run in runs}):
            members = runs[(self.is_ppas[runs] == is_ppas) & (self.budget[runs] == budget)]
            params = published("ppas") if is_ppas else PolicyParams.static(budget)
            found.append((params, RequestBatch.pack([self.traces[run] for run in members]), members))
        return found


def predict(profile: Profile, runs: Runs, groups: Any) -> Floats:
    """The log's metrics for the runs in `groups`, others NaN. Latency counts from sending; P95 is interpolated."""
    answer = np.full(runs.measured.shape, np.nan)
    for params, batch, members in groups:
        result = simulate_many(params, batch, profile)
        for place, run in enumerate(members):
            own = result.trace(place)
            sent_s, first_s, last_s = batch.arrival_s[own], result.first_token_s[own], result.last_token_s[own]
            columns = (last_s - sent_s, first_s - sent_s, (last_s - first_s) / (batch.output_tokens[own] - 1))
            answer[run, :6] = [value for c in columns for value in (c.mean(), np.percentile(c, 95))]
            answer[run, 6] = last_s.max() - sent_s[0]
    return answer


def profile_of(template: Profile, names: Sequence[str], log_values: Floats) -> Profile:
    values = dict(zip(names, np.exp(log_values).tolist(), strict=True))
    delay_s = values.pop("frontend_delay_s")
    return replace(template, cost=StepCost(**values), frontend_delay_s=delay_s)


def fit(
    runs: Runs,
    template: Profile,
    names: Sequence[str],
    chosen: npt.NDArray[np.int64],
    starts: Sequence[Floats],
    *,
    fixed: dict[str, float] | None = None,
    evaluations: int = 30,
) -> tuple[Floats, float]:
    """Log coefficients of least cost over the chosen runs, from the best of `starts`; and that cost."""
    prior = MODELS[runs.model].prior()
    centre = np.log([prior[name] for name in names])
    spread = np.array([PRIOR_SD[name] for name in names])
    held = {names.index(name): np.log(value) for name, value in (fixed or {}).items()}
    groups = runs.groups(chosen)

    def full(values: Floats) -> Floats:
        values = values.copy()
        for place, value in held.items():
            values[place] = value
        return values

    def residuals(values: Floats) -> Floats:
        values = full(values)
        error = np.log(predict(profile_of(template, names, values), runs, groups)[chosen] / runs.measured[chosen])
        soft = np.sign(error) * SOFTNESS * np.sqrt(2 * (np.sqrt(1 + (error / SOFTNESS) ** 2) - 1))
        return np.concatenate([(soft * WEIGHTS).ravel(), PRIOR_WEIGHT * (values - centre) / spread])

    found = [least_squares(residuals, start, diff_step=5e-3, max_nfev=evaluations) for start in starts]
    best = min(found, key=lambda solution: solution.cost)
    return full(best.x), float(best.cost)


def regime_errors(runs: Runs, predicted: Floats, chosen: npt.NDArray[np.int64]) -> Floats:
    """Relative error of the mean over seeds, per load regime (rows) and metric."""
    rates = np.unique(runs.rate)
    rows = [chosen[runs.rate[chosen] == rate] for rate in rates]
    return np.array([predicted[row].mean(0) / runs.measured[row].mean(0) - 1 for row in rows])


def cross_validate(runs: Runs, template: Profile, names: Sequence[str], start: Floats) -> dict[str, float]:
    """Mean absolute regime error of mean latency on each part left out of the fit."""
    budgets = np.unique(runs.budget[runs.static])
    if len(budgets) >= 4:  # the end points would be extrapolated
        parts = {f"budget {b}": runs.static[runs.budget[runs.static] == b] for b in budgets[1:-1]}
    else:
        parts = {f"seed {s}": runs.static[runs.seed[runs.static] == s] for s in np.unique(runs.seed)}
    errors = {}
    for label, left_out in parts.items():
        values, _ = fit(runs, template, names, np.setdiff1d(runs.static, left_out), [start], evaluations=12)
        predicted = predict(profile_of(template, names, values), runs, runs.groups(left_out))
        errors[label] = round(float(np.abs(regime_errors(runs, predicted, left_out)[:, 0]).mean()), 4)
    errors["mean"] = round(float(np.mean(list(errors.values()))), 4)
    return errors


def ratio_to(runs: Runs, values: Floats, budget: int) -> float:
    """Improvement of P-PAS in mean latency over a static budget, geometric mean over regimes, in percent."""
    logs = []
    for rate in np.unique(runs.rate):
        here = runs.rate == rate
        static = here & ~runs.is_ppas & (runs.budget == budget)
        logs.append(np.log(values[here & runs.is_ppas, 0].mean() / values[static, 0].mean()))
    return round(float((1 - np.exp(np.mean(logs))) * 100), 2)


def ranking_regret(runs: Runs, predicted: Floats) -> dict[str, Any]:
    """By how much the setting that the simulator puts first is measured to be worse than the best one, mean latency."""
    settings = sorted({(bool(p), int(b)) for p, b in zip(runs.is_ppas, runs.budget, strict=True)})
    rates = np.unique(runs.rate)

    def means(values: Floats) -> Floats:
        rows = [
            [values[(runs.rate == rate) & (runs.is_ppas == p) & (runs.budget == b), 0].mean() for rate in rates]
            for p, b in settings
        ]
        return np.array(rows)

    simulated, measured = means(predicted), means(runs.measured)
    regret = measured[simulated.argmin(0), np.arange(len(rates))] / measured.min(0) - 1
    overall = np.exp(np.log(measured).mean(1))
    first = int(np.log(simulated).mean(1).argmin())
    return {
        "by_regime": np.round(regret, 4).tolist(),
        "over_regimes": round(float(overall[first] / overall.min() - 1), 4),
        "first_over_regimes": "P-PAS" if settings[first][0] else f"static {settings[first][1]}",
    }


def by_metric(values: Floats) -> dict[str, float]:
    return dict(zip(METRICS, np.round(values, 4).tolist(), strict=True))


def open_directions(
    runs: Runs, template: Profile, names: Sequence[str], best: Floats, best_cost: float
) -> dict[str, Any]:
    """What happens when prefill_pair_s is held at half and at twice its value and all else is fitted again."""
    place = names.index("prefill_pair_s")
    answer: dict[str, Any] = {}
    for label, factor in (("half", 0.5), ("twice", 2.0)):
        held = float(np.exp(best[place]) * factor)
        values, cost = fit(runs, template, names, runs.static, [best], fixed={"prefill_pair_s": held}, evaluations=15)
        profile, own = profile_of(template, names, values), profile_of(template, names, best)
        longer: dict[str, float] = {}
        for tokens in (12_500, 20_000, 30_000):
            alone = RequestBatch.pack([RequestArrays(np.zeros(1), np.array([tokens]), np.array([32]))])
            ttft = [simulate_many(PolicyParams.static(2048), alone, p).first_token_s[0] for p in (profile, own)]
            longer[str(tokens)] = round(float(ttft[0] / ttft[1] - 1), 4)
        answer[label] = {
            "fit_cost_ratio": round(cost / best_cost, 3),
            "prefill_token_s": profile.cost.prefill_token_s,
            "frontend_delay_s": profile.frontend_delay_s,
            "ttft_change_of_a_lone_prompt_by_tokens": longer,
        }
    return answer


def fit_log(log: Path, *, num_starts: int, vllm_version: str) -> Profile:
    runs = Runs(log)
    served = MODELS[runs.model]
    template = Profile(
        name=served.name,
        model=runs.model,
        gpu="NVIDIA GeForce RTX 5090",
        vllm_version=vllm_version,
        cost=StepCost(0.001, 0.0, 0.0, 0.0, 0.0),
        frontend_delay_s=0.0,
        num_kv_blocks=served.num_kv_blocks,
        block_size=16,
        max_model_len=32_768,
        pipeline_depth=2,
    )
    prior = served.prior()
    rng = np.random.default_rng(0)
    candidates = {}
    for label, names in (("without ramp", BASE), ("with ramp", BASE + RAMP)):
        centre = np.log([prior[name] for name in names])
        spread = np.array([PRIOR_SD[name] for name in names])
        starts = [centre] + [centre + 0.5 * spread * rng.standard_normal(len(names)) for _ in range(num_starts - 1)]
        values, cost = fit(runs, template, names, runs.static, starts)
        validation = cross_validate(runs, template, names, values)
        candidates[label] = (names, values, cost, validation)
        print(f"{log.name}, {label}: cost {cost:.4f}, left-out error {validation['mean']:.2%}", flush=True)
    kept = min(candidates, key=lambda label: candidates[label][3]["mean"])
    names, values, cost, _ = candidates[kept]
    profile = profile_of(template, names, values)
    everything = runs.groups(np.arange(len(runs.measured)))
    predicted = predict(profile, runs, everything)
    error = np.abs(predicted / runs.measured - 1)
    held_out = regime_errors(runs, predicted, runs.ppas)
    depth_1, depth_1_cost = fit(runs, replace(template, pipeline_depth=1), names, runs.static, [values])
    depth_1_error = np.abs(
        regime_errors(
            runs,
            predict(profile_of(replace(template, pipeline_depth=1), names, depth_1), runs, everything),
            runs.static,
        )
    )
    pools = {}
    for blocks in (20_000, 25_000, 30_000, 36_000, 80_000, 200_000):
        other = predict(replace(profile, num_kv_blocks=blocks), runs, everything)
        pools[str(blocks)] = round(float(np.abs(other / runs.measured - 1)[runs.static].mean()), 4)
    budgets = ", ".join(map(str, np.unique(runs.budget[runs.static])))
    rates = ", ".join(f"{rate:g}" for rate in np.unique(runs.rate))
    provenance = {
        "source": f"ppas-vllm, tag v1.0-paper, paper_results/{runs.source} (T. Sämann)",
        "license": "Apache-2.0",
        "log_sha256": runs.sha256,
        "runs_fitted": f"{len(runs.static)} runs with a static budget ({budgets}), rates {rates} per s, seeds 0-4",
        "runs_held_out": f"{len(runs.ppas)} P-PAS runs (b_max 16384, b_cap 2048, n_th 2, prefill scope)",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "script": "scripts/fit_published.py",
        "assumed": {
            "num_kv_blocks": f"{served.num_kv_blocks}: not in the log. 32 GB, 90 % of it used, less weights and about "
            "2 GB of activations, over the KV bytes of a block. Take it from the server where one is at hand. The "
            "mean error over the static runs with other pools is in fit.error_by_num_kv_blocks.",
            "pipeline_depth": "2: vLLM schedules asynchronously by default; depth 1 is compared in fit.depth_1",
            "max_model_len": "32768, the model's default",
        },
    }
    notes = {
        "metrics": "relative errors |predicted / measured - 1| of run-level figures; latency counts from sending",
        "static_error_per_run": {
            "mean": by_metric(error[runs.static].mean(0)),
            "median": by_metric(np.median(error[runs.static], 0)),
        },
        "held_out_ppas_error_per_run": by_metric(error[runs.ppas].mean(0)),
        "held_out_ppas_error_per_regime": {
            "rate_per_s": [float(rate) for rate in np.unique(runs.rate)],
            "avg_latency_signed": np.round(held_out[:, 0], 4).tolist(),
            "mean_absolute": by_metric(np.abs(held_out).mean(0)),
        },
        "improvement_of_ppas_in_mean_latency_percent": {
            str(budget): {
                "simulated": ratio_to(runs, predicted, budget),
                "measured": ratio_to(runs, runs.measured, budget),
            }
            for budget in (2048, 16384)
        },
        "ranking_regret_in_mean_latency": ranking_regret(runs, predicted),
        "kept_form": kept,
        "left_out_error": {label: candidates[label][3] for label in candidates},
        "depth_1": {
            "fit_cost_ratio": round(depth_1_cost / cost, 3),
            "static_regime_error": by_metric(depth_1_error.mean(0)),
        },
        "static_regime_error": by_metric(np.abs(regime_errors(runs, predicted, runs.static)).mean(0)),
        "error_by_num_kv_blocks": pools,
        "prior": {name: {"value": prior[name], "sd_of_log": PRIOR_SD[name]} for name in names},
        "prior_weight": PRIOR_WEIGHT,
        "measured_range": {
            "budget_tokens": [int(runs.budget[runs.static].min()), int(runs.budget[runs.static].max())],
            "prompt_tokens": [25_000, 25_000],
            "output_tokens": [32, 32],
            "rate_per_s": [float(runs.rate.min()), float(runs.rate.max())],
        },
        "not_identified": {
            "what": "All prompts have 25,000 tokens and all outputs 32. prefill_token_s, prefill_pair_s and "
            "frontend_delay_s trade against each other, decode_token_s against decode_context_token_s, and "
            "mixed_step_s may in truth grow with the context. The priors decide between them. Prompts far from "
            "25,000 tokens are extrapolation: calibrate on a server, or fit two lengths.",
            "prefill_pair_s_held": open_directions(runs, template, names, values, cost),
        },
    }
    rounded = StepCost(**{name: float(f"{value:.5g}") for name, value in profile.cost.to_dict().items()})
    delay_s = float(f"{profile.frontend_delay_s:.5g}")
    return replace(profile, cost=rounded, frontend_delay_s=delay_s, provenance=provenance, fit=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, help="raw logs of the published runs")
    folder = Path(__file__).parents[1] / "ppas_core" / "sim" / "profiles"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the profiles (default: the shipped ones)")
    parser.add_argument("--starts", type=int, default=4, help="starting points of the fit (default 4)")
    parser.add_argument("--vllm-version", default="0.22.1", help="vLLM version of the runs (default 0.22.1)")
    options = parser.parse_args()
    for log in options.logs:
        profile = fit_log(log, num_starts=options.starts, vllm_version=options.vllm_version)
        path = options.out / f"{profile.name}.json"
        path.write_text(json.dumps(profile.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        held_out = profile.fit["held_out_ppas_error_per_regime"]["mean_absolute"]["avg_latency"]
        print(f"{path.name}: P-PAS, held out, mean latency within {held_out:.2%} per regime; {profile.cost}")


if __name__ == "__main__":
    main()
