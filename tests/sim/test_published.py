"""The published comparison comes back in simulation, with profiles that never saw a P-PAS run.

Expected figures: means over seeds 0-4 of the raw runs that the P-PAS author published (repository ppas-vllm, tag
v1.0-paper, `paper_results/RTX5090_qwen_3b.txt` and `RTX5090_qwen_05b.txt`, Apache-2.0). The geometric means over the
six rates are the paper's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from autotune.calibration.runs_simulated import Fleet, simulatable
from autotune.runlogs.read import read_runs
from ppas_core.defaults import published
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile
from ppas_core.sim.simulate import RequestArrays, RequestBatch, simulate_many
from traces.generate import rag_bursts

RATES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
SEEDS = range(5)
PPAS = published("ppas")
# Qwen2.5-3B on an RTX 5090, seconds, by rate.
MEAN_LATENCY_S = {
    PPAS: (2.735, 3.764, 4.705, 7.037, 10.251, 12.895),
    PolicyParams.static(2048): (3.348, 4.399, 5.214, 7.451, 10.687, 12.560),
    PolicyParams.static(16384): (2.761, 3.678, 4.900, 8.420, 13.264, 16.649),
}
PPAS_P95_LATENCY_S = (4.672, 6.659, 8.387, 11.796, 16.869, 20.537)
PPAS_TTFT_S = (1.678, 2.020, 2.579, 4.288, 6.856, 9.416)
PAPER_IMPROVEMENT_PERCENT = {PolicyParams.static(2048): 8.5, PolicyParams.static(16384): 11.3}
# Qwen2.5-0.5B on an RTX 5090.
SMALL_RATES = (0.4, 1.0, 2.0, 3.0, 4.0, 5.0)
SMALL_PPAS_MEAN_LATENCY_S = (0.469, 0.571, 0.780, 1.536, 2.576, 3.947)

LOGS = Path(__file__).parents[2] / "../shared/paper"


def arrays(rate_per_s: float, seed: int) -> RequestArrays:
    shape = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in rag_bursts(rate_per_s, seed).requests]
    arrival_s, prompts, outputs = zip(*shape, strict=True)
    return RequestArrays(np.array(arrival_s), np.array(prompts), np.array(outputs))


@cache
def simulated(profile: str, params: PolicyParams, rate_per_s: float) -> tuple[float, float, float]:
    """Mean latency, P95 latency and mean TTFT, each a mean over seeds of the run's figure."""
    batch = RequestBatch.pack([arrays(rate_per_s, seed) for seed in SEEDS])
    result = simulate_many(params, batch, load_profile(profile))
    latency_s = result.last_token_s - batch.arrival_s
    ttft_s = result.first_token_s - batch.arrival_s
    runs = [result.trace(seed) for seed in SEEDS]
    figures = [(latency_s[r].mean(), np.percentile(latency_s[r], 95), ttft_s[r].mean()) for r in runs]
    mean = np.mean(figures, axis=0)
    return float(mean[0]), float(mean[1]), float(mean[2])


def mean_latencies_s(params: PolicyParams) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([simulated("rtx5090-qwen2.5-3b", params, rate)[0] for rate in RATES])


@pytest.mark.parametrize("static", PAPER_IMPROVEMENT_PERCENT)
def test_the_published_improvement_in_mean_latency_comes_back_within_four_points(static: PolicyParams) -> None:
    ratio = np.exp(np.mean(np.log(mean_latencies_s(PPAS) / mean_latencies_s(static))))
    assert (1 - ratio) * 100 == pytest.approx(PAPER_IMPROVEMENT_PERCENT[static], abs=4.0)


@pytest.mark.parametrize("static", PAPER_IMPROVEMENT_PERCENT)
def test_the_better_of_two_settings_is_the_published_one_wherever_they_differ_by_more_than_five_percent(
    static: PolicyParams,
) -> None:
    measured = np.array(MEAN_LATENCY_S[PPAS]) / np.array(MEAN_LATENCY_S[static])
    clear = np.abs(measured - 1) > 0.05
    assert clear.sum() >= 3
    ratio = mean_latencies_s(PPAS) / mean_latencies_s(static)
    assert np.array_equal(ratio[clear] < 1, measured[clear] < 1)


@pytest.mark.parametrize(
    ("place", "measured", "bound"),
    [(0, MEAN_LATENCY_S[PPAS], 0.03), (1, PPAS_P95_LATENCY_S, 0.06), (2, PPAS_TTFT_S, 0.04)],
    ids=["mean latency", "P95 latency", "TTFT"],
)
def test_held_out_runs_are_predicted_within_the_bound_over_regimes(
    place: int, measured: tuple[float, ...], bound: float
) -> None:
    predicted = np.array([simulated("rtx5090-qwen2.5-3b", PPAS, rate)[place] for rate in RATES])
    assert np.mean(np.abs(predicted / np.array(measured) - 1)) < bound


def test_held_out_runs_of_the_small_model_are_predicted_within_three_percent_over_regimes() -> None:
    predicted = np.array([simulated("rtx5090-qwen2.5-0.5b", PPAS, rate)[0] for rate in SMALL_RATES])
    assert np.mean(np.abs(predicted / np.array(SMALL_PPAS_MEAN_LATENCY_S) - 1)) < 0.03


@pytest.mark.shared
@pytest.mark.parametrize(
    ("log", "name"),
    [("RTX5090_qwen_3b.txt", "rtx5090-qwen2.5-3b"), ("RTX5090_qwen_05b.txt", "rtx5090-qwen2.5-0.5b")],
)
def test_the_errors_written_in_a_profile_are_the_errors_it_makes_on_the_raw_runs(log: str, name: str) -> None:
    if not LOGS.is_dir():
        pytest.skip("the raw runs of the paper are not beside the project")
    script, profile = fit_script(), load_profile(name)
    assert profile.provenance["log_sha256"] == hashlib.sha256((LOGS / log).read_bytes()).hexdigest()
    runs, left_out = simulatable(read_runs([LOGS / log]).runs, {})
    assert left_out == []
    fleet = Fleet(runs)
    predicted = fleet.predict(profile)
    per_run = np.abs(predicted / fleet.measured - 1)
    is_static = np.array([run.params.is_static for run in runs])
    mean = profile.fit["static_error_per_run"]["mean"]
    assert per_run[is_static].mean(0) == pytest.approx([mean[metric] for metric in script.LOG_NAMES], abs=5e-3)
    held_out = profile.fit["held_out_ppas_error_per_run"]
    assert per_run[~is_static].mean(0) == pytest.approx([held_out[metric] for metric in script.LOG_NAMES], abs=5e-3)
    assert per_run[~is_static, 0].mean() < 0.05
    # The setting that it puts first, over all regimes, is within 2 % of the one measured best.
    assert script.ranking_regret(fleet, predicted)["over_regimes"] < 0.02


def fit_script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "fit_published.py"
    spec = importlib.util.spec_from_file_location("fit_published", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
