"""The run-level fit: it finds a known truth through noisy logs, predicts settings it never saw, and says what is open."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_study import write_study
from sweep_log import row, simulated_log, write_rows
from typer.testing import CliRunner

from autotune.calibration.fit_runs import Server, fit_runs, with_held_out
from autotune.calibration.runs_simulated import FitRun, Fleet, simulatable
from autotune.cli import app
from autotune.runlogs.configs import parse_mapping, setting_of
from autotune.runlogs.read import read_runs
from autotune.runlogs.workloads import requests_of
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams, Scope
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import Profile, load_profile
from traces.generate import heterogeneous, parse_phases, rag_bursts

ROOT = Path(__file__).parents[2]
TRUTH = replace(
    load_profile("rtx5090-qwen2.5-3b"),
    name="truth",
    model="example/Unknown-7B",
    cost=StepCost(0.009, 4e-5, 2.5e-9, 1.2e-4, 3e-8, 0.003, 0.006),
    frontend_delay_s=0.03,
    max_model_len=132_000,
)
"""A server that no prior knows: slower than the shipped ones, with other proportions."""
STATICS = {f"mbt_{budget}_s256": PolicyParams.static(budget) for budget in (1024, 4096, 16384)}


def split(log: Path) -> tuple[list[FitRun], list[FitRun], Server]:
    found = read_runs([log])
    runs, left_out = simulatable(found.runs, {})
    assert left_out == []
    first = found.runs[0]
    static = [run for run in runs if run.params.is_static]
    return static, [run for run in runs if not run.params.is_static], Server(first.model, first.gpu, first.vllm)


@pytest.fixture(scope="module")
def two_lengths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, list[FitRun]]:
    shapes = ((8000, 32), (25000, 64))
    traces = [
        rag_bursts(rate, seed, prompt_tokens=prompt, output_tokens=output)
        for rate in (0.3, 0.7)
        for seed in (0, 1, 2)
        for prompt, output in shapes
    ]
    path = tmp_path_factory.mktemp("logs") / "two.txt"
    settings = STATICS | {"ppas_": published("ppas")}
    static, adaptive, server = split(simulated_log(path, TRUTH, settings, traces, noise_sigma=0.03))
    return fit_runs(static, name="two lengths", server=server, starts=1), adaptive


def test_two_prompt_lengths_give_back_the_coefficients_of_an_unknown_server(
    two_lengths: tuple[Profile, list[FitRun]],
) -> None:
    cost = two_lengths[0].cost
    for name in ("step_s", "prefill_token_s", "prefill_pair_s"):
        assert getattr(cost, name) == pytest.approx(getattr(TRUTH.cost, name), rel=0.1), name
        assert ": identified, within" in two_lengths[0].fit["identified"]["in_words"][name]


def test_ppas_is_predicted_within_two_percent_from_static_budgets_alone(
    two_lengths: tuple[Profile, list[FitRun]],
) -> None:
    profile, adaptive = two_lengths
    held_out = with_held_out(profile, adaptive).fit["held_out_ppas_error_per_regime"]
    assert held_out["runs"] == 12
    for metric in ("mean_latency_s", "mean_ttft_s", "p95_latency_s"):
        assert 0 < held_out["mean_absolute"][metric] < 0.02, metric


def test_what_one_prompt_length_leaves_open_is_said_and_two_lengths_do_not_say_it(
    tmp_path: Path, two_lengths: tuple[Profile, list[FitRun]]
) -> None:
    traces = [rag_bursts(rate, seed) for rate in (0.3, 0.7) for seed in (0, 1)]
    static, _, server = split(simulated_log(tmp_path / "one.txt", TRUTH, STATICS, traces))
    notes = fit_runs(static, name="one length", server=server, starts=1).fit
    assert "All prompts have 25000 tokens" in notes["identified"]["because_of_the_runs"][0]
    assert "not identified" in notes["identified"]["in_words"]["decode_token_s"]
    assert not any("All prompts" in said for said in two_lengths[0].fit["identified"]["because_of_the_runs"])
    assert notes["measured_range"]["prompt_tokens"] == [25000, 25000]


def test_a_ppas_plus_sweep_of_mixed_shapes_is_fitted_from_its_log_alone(tmp_path: Path) -> None:
    truth = replace(TRUTH, model="Qwen/Qwen3.8-27B-NVFP4")
    plus = published("ppas-plus-qwen3.8-27b")
    statics = {f"mbt_{b}_s20": PolicyParams.static(b, max_num_seqs=20) for b in (512, 2048, 16384)}
    traces = [
        heterogeneous(parse_phases(f"20:0.05,{length}:{rate},20:0.05"), seed)
        for length in (20, 40)
        for rate in (0.1, 0.4)
        for seed in (0, 1, 2)
    ]
    told = {"configured_prompt_tokens": 25000, "configured_output_tokens": 32, "workload_type": "heterogeneous"}
    log = simulated_log(
        tmp_path / "plus.txt", truth, statics | {"ppas_plus_s20": plus}, traces, with_requests=True, told=told
    )
    static, adaptive, server = split(log)
    assert {run.params for run in adaptive} == {plus}
    assert sorted({int(n) for run in static for n in run.arrays.prompt_tokens}) == [8192, 16384, 32768, 65536]
    fleet = Fleet(adaptive)
    predicted = fleet.predict(fit_runs(static, name="plus", server=server, starts=1))
    assert np.abs(fleet.regime_errors(predicted)).mean(0)[:3].max() < 0.02


def test_the_fleet_gives_the_figures_that_the_log_has_when_the_profile_is_the_truth(tmp_path: Path) -> None:
    traces = [rag_bursts(0.7, seed, output_tokens=3) for seed in range(3)]
    static, adaptive, _ = split(
        simulated_log(tmp_path / "log.txt", TRUTH, STATICS | {"ppas_": published("ppas")}, traces)
    )
    fleet = Fleet([*static, *adaptive])
    assert fleet.predict(TRUTH) == pytest.approx(fleet.measured, rel=1e-9)
    assert np.abs(fleet.regime_errors(fleet.predict(TRUTH))).max() < 1e-9


def test_a_fit_out_of_time_gives_the_best_it_has_and_says_so(tmp_path: Path) -> None:
    traces = [rag_bursts(0.7, seed) for seed in range(2)]
    static, _, server = split(simulated_log(tmp_path / "log.txt", TRUTH, STATICS, traces))
    profile = fit_runs(static, name="hurried", server=server, time_limit_s=0.3)
    assert profile.fit["stopped_early"]
    assert profile.cost.step_s > 0


def test_too_few_runs_are_refused(tmp_path: Path) -> None:
    static, _, server = split(simulated_log(tmp_path / "log.txt", TRUTH, STATICS, [rag_bursts(0.7, 0)]))
    with pytest.raises(InvalidInput, match="at least 4"):
        fit_runs(static, name="few", server=server)


@pytest.mark.parametrize(
    ("config", "model", "told", "expected"),
    [
        ("mbt_512_s256", "m", {"max_num_batched_tokens": 512}, PolicyParams.static(512)),
        (
            "mbt_512_s20",
            "m",
            {"max_num_batched_tokens": 512, "max_num_seqs": 20},
            PolicyParams.static(512, max_num_seqs=20),
        ),
        ("ppas_", "Qwen/Qwen2.5-3B-Instruct", {}, published("ppas")),
        ("adaptive", "m", {"max_num_batched_tokens": 8192}, PolicyParams(8192, 2048)),
        (
            "ppas_plus_s20",
            "Qwen/Qwen3.8-27B-NVFP4",
            {"max_num_batched_tokens": 2048, "max_num_seqs": 20},
            published("ppas-plus-qwen3.8-27b"),
        ),
        ("ppas_plus_", "x/Nemotron-3.5-Lightning-30B-A3B-NVFP4", {}, published("ppas-plus-nemotron-30b")),
        (
            "ppas_plus_cap512_t8192",
            "m",
            {"max_num_seqs": 20},
            PolicyParams(16384, 512, t_large=8192, scope=Scope.GLOBAL, max_num_seqs=20),
        ),
        (
            "ppas_",
            "m",
            {"vllm_version": "0.27.1", "ppas_b_cap": 1280},
            PolicyParams(16384, 1280, scope=Scope.GLOBAL),
        ),
    ],
)
def test_the_names_of_published_logs_become_settings(
    tmp_path: Path, config: str, model: str, told: dict[str, object], expected: PolicyParams
) -> None:
    log = write_rows(tmp_path / "log.txt", [row(config, **{"max_num_batched_tokens": 16384, **told})], model)
    assert setting_of(read_runs([log]).runs[0], {}) == expected


@pytest.mark.parametrize("config", ["ppas_plus", "mystery", "mbt_2048_s256", "../../etc/passwd.json"])
def test_a_setting_that_is_not_told_in_full_is_refused_with_the_way_to_say_it(tmp_path: Path, config: str) -> None:
    log = write_rows(tmp_path / "log.txt", [row(config, max_num_batched_tokens=16384)])
    run = read_runs([log]).runs[0]
    with pytest.raises(InvalidInput, match="--setting"):
        setting_of(run, {})
    mapping = parse_mapping([f"{config}=2/16384/1280/T65536/global"])
    assert setting_of(run, mapping).b_cap == 1280


def test_a_trace_that_comes_out_otherwise_than_the_log_says_is_not_simulated(tmp_path: Path) -> None:
    log = write_rows(tmp_path / "log.txt", [row(num_requests=15), row("mbt_512_s256", num_requests=16)])
    found = read_runs([log]).runs
    assert len(requests_of(found[0])) == 15
    runs, left_out = simulatable(found, {})
    assert len(runs) == 1
    assert "it says 16 requests, phases and seed give 15" in left_out[0]


def test_our_run_folders_and_tables_can_be_fitted_too(tmp_path: Path) -> None:
    study = write_study(tmp_path, trials=2)
    result = CliRunner().invoke(app, ["tune", str(study), "--run", str(tmp_path / "run"), "--quiet"])
    assert result.exit_code == 0, result.output
    runs, left_out = simulatable(read_runs([tmp_path / "run"]).runs, {})
    assert left_out == []
    profile = fit_runs(runs, name="folder", starts=1)
    fleet = Fleet(runs)
    assert np.abs(fleet.predict(profile)[:, 0] / fleet.measured[:, 0] - 1).mean() < 0.02

    table = tmp_path / "runs.csv"
    phases = '"10:0.2,10:0.7,10:0.2,10:0.7,10:0.2"'
    static, _, _ = split(simulated_log(tmp_path / "log.txt", TRUTH, STATICS, [rag_bursts(0.7, s) for s in (0, 1)]))
    lines = ["config,phases,seed,prompt_tokens,output_tokens,num_requests,avg_latency,avg_ttft"]
    lines += [
        f"{run.config},{phases},{run.seed},25000,32,{len(run.arrays)},"
        f"{run.metrics['mean_latency_s']},{run.metrics['mean_ttft_s']}"
        for run in static
    ]
    table.write_text("\n".join(lines) + "\n")
    runs, _ = simulatable(read_runs([table]).runs, {})
    profile = fit_runs(runs, name="table", starts=1)
    fleet = Fleet(runs)
    assert np.abs(fleet.predict(profile)[:, 0] / fleet.measured[:, 0] - 1).mean() < 0.02
    assert profile.fit["fitted_error_per_run"]["mean_tpot_s"] is None


@pytest.mark.shared
def test_published_ppas_runs_are_predicted_within_the_bars_from_static_runs_alone(shared: Path) -> None:
    log = shared / "paper/RTX5090_qwen_3b.txt"
    command = [sys.executable, "benchmarks/predict_runs.py", str(log), "--starts", "1", "--json", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)
    assert answer["fitted_runs"] == 180
    assert len(answer["runs"]) == 30
    assert max(answer["mean_absolute_error"]["regime"].values()) <= 0.04
    assert max(answer["mean_absolute_error"]["run"].values()) <= 0.06


def test_the_benchmark_fits_and_predicts_the_runs_it_is_told_to(tmp_path: Path) -> None:
    settings = {f"mbt_{budget}_s256": PolicyParams.static(budget) for budget in (2048, 8192)}
    traces = [rag_bursts(0.7, seed, prompt_tokens=12000) for seed in range(5)]
    simulated_log(tmp_path / "a.txt", TRUTH, settings | {"odd": published("ppas")}, traces)
    command = [sys.executable, str(ROOT / "benchmarks/predict_runs.py"), "a.txt", "--starts", "1", "--json"]
    choice = ["--fit-seeds", "0-2", "--predict-seeds", "3,4", "--predict-configs", "odd,mbt_8192*"]

    refused = subprocess.run([*command, *choice], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "--setting 'odd=" in refused.stderr

    told = [*command, *choice, "--setting", "odd=2/16384/2048/prefill"]
    done = subprocess.run(told, cwd=tmp_path, capture_output=True, text=True, check=True)
    (answer,) = json.loads(done.stdout)
    assert answer["fitted_runs"] == 6
    assert {(run["setting"], run["seed"]) for run in answer["runs"]} == {
        (name, seed) for name in ("odd", "mbt_8192_s256") for seed in (3, 4)
    }
