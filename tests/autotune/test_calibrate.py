"""Calibrations of a simulated server, whose truth is known, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from autotune import metrics
from autotune.calibration.calibrate import MeasuredServer, calibrate, calibrate_plan, fit_profile
from autotune.calibration.device import device_name, machine
from autotune.calibration.replays import Aim, Pace, check_trace
from autotune.calibration.replays import plan as replays_of
from autotune.cli import app
from autotune.evaluate import SimulatedEvaluator
from autotune.plan import make_plan
from autotune.records import Replay
from autotune.spec import parse_spec
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import Profile, load_profile
from traces.format import Trace, TraceRequest
from traces.generate import heterogeneous, parse_phases, rag_bursts

RATES = (0.4, 0.8, 1.2)
BUDGETS = (512, 1024, 2048, 4096, 8192, 16_384)


def truth_of(name: str, depth: int) -> Profile:
    return replace(load_profile(name), pipeline_depth=depth)


@cache
def calibrated(name: str, depth: int, seed: int = 0, noise: float = 0.05) -> Profile:
    traces = [rag_bursts(rate, seed) for rate in RATES for seed in (0, 1)]
    evaluator = SimulatedEvaluator(truth_of(name, depth), noise_sigma=noise, seed=seed)
    return calibrate(
        evaluator, traces, budgets=BUDGETS, max_num_seqs=256, reference=published("ppas"), name="calibrated", device="x"
    )


# --- what comes out ---


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["rtx5090-qwen2.5-3b", "rtx5090-qwen2.5-0.5b"])
@pytest.mark.parametrize("params", [published("ppas"), PolicyParams(b_max=8192, b_cap=1024, n_th=1)])
def test_p_pas_is_predicted_within_three_per_cent_by_a_fit_to_static_budgets(
    name: str, depth: int, params: PolicyParams
) -> None:
    profile = calibrated(name, depth)
    assert {entry["setting"].split("-")[0] for entry in profile.provenance["replays"] if entry["use"] == "fitted"} == {
        "mbt"
    }
    truth, found = SimulatedEvaluator(truth_of(name, depth)), SimulatedEvaluator(profile)
    for rate in RATES:
        for metric in ("mean_latency_s", "mean_ttft_s", "p95_latency_s"):
            means = [
                np.mean(
                    [metrics.value(metric, one.replay(params, rag_bursts(rate, s)).requests) for s in range(20, 25)]
                )
                for one in (truth, found)
            ]
            assert means[1] == pytest.approx(means[0], rel=0.03), (rate, metric)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_the_server_says_is_taken_and_the_delay_is_measured(depth: int) -> None:
    truth, profile = truth_of("rtx5090-qwen2.5-3b", depth), calibrated("rtx5090-qwen2.5-3b", depth)
    for name in ("num_kv_blocks", "block_size", "max_model_len", "pipeline_depth", "model", "gpu", "vllm_version"):
        assert getattr(profile, name) == getattr(truth, name), name
    assert profile.frontend_delay_s == pytest.approx(truth.frontend_delay_s, abs=1e-5)
    assert profile.fit["frontend_delay"]["requests"] >= 6


def test_the_profile_tells_its_error_on_a_replay_that_was_not_fitted() -> None:
    profile = calibrated("rtx5090-qwen2.5-3b", 2)
    (check,) = profile.fit["held_out_replays"]
    assert check["setting"] == published("ppas").label()
    assert len([entry for entry in profile.provenance["replays"] if entry["use"] == "held out"]) == 1
    error_pct = SimulatedEvaluator(profile).error_pct
    assert error_pct == pytest.approx(100 * abs(check["mean_latency_s"]["error"]), abs=1e-3)
    assert error_pct is not None
    assert error_pct < 4
    assert {entry["setting"] for entry in profile.fit["replays"]} == {"mbt-512", "mbt-2896", "mbt-16384"}
    for entry in profile.fit["replays"]:
        assert abs(entry["makespan_s"]["error"]) < 0.08, entry


def test_a_calibrated_profile_is_read_back_and_has_no_doubts_about_its_workload(tmp_path: Path) -> None:
    profile = calibrated("rtx5090-qwen2.5-3b", 2)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(profile.to_dict()))
    again = load_profile(str(file))
    assert again.digest == profile.digest
    evaluator = SimulatedEvaluator(again)
    assert evaluator.doubts(published("ppas"), [rag_bursts(1.0, 50), rag_bursts(1.0, 50, output_tokens=500)]) == []
    assert profile.fit["measured_range"]["decodes_in_a_step"] == [1, 64]
    (doubt,) = evaluator.doubts(PolicyParams.static(32_768), [rag_bursts(1.0, 50)])
    assert "fitted on 512 to 16384 only" in doubt


def test_the_same_calibration_gives_the_same_profile() -> None:
    one, other = calibrated("rtx5090-qwen2.5-0.5b", 1), calibrated.__wrapped__("rtx5090-qwen2.5-0.5b", 1)
    assert (one.cost, one.frontend_delay_s, one.fit) == (other.cost, other.frontend_delay_s, other.fit)
    assert one.provenance["steps_sha256"] == other.provenance["steps_sha256"]


def test_what_the_study_asks_for_is_what_is_calibrated() -> None:
    spec = parse_spec(
        {
            "name": "x", "profile": "rtx5090-qwen2.5-0.5b", "static_budgets": [1024],
            "space": {"preset": "ppas", "b_max": {"low": 2048, "high": 8192, "step": 256}, "b_cap": 1024},
            "reference": "mbt-8192", "workload": {"family": "rag-bursts", "rates_per_s": [2.0], "prompt_tokens": 4000},
        },
        "test",
    )  # fmt: skip
    profile = calibrate_plan(make_plan(spec), name="x")
    assert profile.fit["measured_range"]["budget_tokens"] == [1024, 8192]
    assert profile.fit["measured_range"]["prompt_tokens"][1] == 4000
    (check,) = profile.fit["held_out_replays"]
    assert "/1024" in check["setting"], "a static reference tests nothing that was not fitted"


# --- the replays ---


PACE = Pace(prefill_s=1.5, decode_s=0.01)


def test_the_lengths_are_the_workloads_and_at_least_an_eighth_apart() -> None:
    mixed = heterogeneous(parse_phases("20:2"), 0, prompt_tokens=[100, 3000, 20_000], output_tokens=[16, 256])
    aim = Aim.of([mixed], BUDGETS, 256)
    assert aim.prompt_tokens == (100, 3000, 20_000)
    one_length = Aim.of([rag_bursts(1.0, 0)], BUDGETS, 256)
    assert one_length.prompt_tokens[0] * 8 <= one_length.prompt_tokens[2] == 25_000
    assert one_length.budgets == (512, 2896, 16_384)
    assert Aim.of([rag_bursts(1.0, 0)], [2048, 4096], 256).budgets == (2048, 4096)
    assert Aim.of([rag_bursts(1.0, 0, prompt_tokens=1)], [2048], 256).prompt_tokens == (1, 1, 1)


def test_a_budget_that_cannot_hold_the_decodes_is_no_setting_and_nothing_is_no_workload() -> None:
    assert Aim.of([rag_bursts(1.0, 0)], [64, 512], 256).budgets == (512,)
    for traces, budgets in (([rag_bursts(1.0, 0)], [64]), ([], [512])):
        with pytest.raises(InvalidInput, match="give one or more of each"):
            Aim.of(traces, budgets, 256)


@pytest.mark.parametrize("prefill_s", [0.002, 0.2, 1.5, 20.0])
@pytest.mark.parametrize("pool_tokens", [30_000, 500_000])
def test_every_request_can_be_served_and_nobody_is_preempted_on_purpose(prefill_s: float, pool_tokens: int) -> None:
    aim = Aim.of([rag_bursts(1.0, 0)], BUDGETS, 16)
    pace = Pace(prefill_s, prefill_s / 150)
    longest = min(25_040, pool_tokens)
    planned = replays_of(aim, pace, pool_tokens=pool_tokens, longest_tokens=longest, target_s=90)
    for params, trace in planned:
        assert params.is_static
        assert all(r.prompt_tokens + r.output_tokens <= longest for r in trace.requests)
        if "decode" in trace.name:
            assert sum(r.prompt_tokens + r.output_tokens for r in trace.requests) <= pool_tokens
            assert len(trace.requests) <= 16
    assert len({trace.digest for _, trace in planned}) == len(planned)


@pytest.mark.parametrize("name", ["rtx5090-qwen2.5-3b", "rtx5090-qwen2.5-0.5b"])
def test_the_papers_sizes_take_one_to_two_minutes_of_load(name: str) -> None:
    spent: list[float] = []

    class Timed(SimulatedEvaluator):
        def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
            found = super().replay(params, trace, repeat)
            spent.append(float(found.requests.last_token_s.max()))
            return found

    traces = [rag_bursts(rate, 0) for rate in RATES]
    calibrate(
        Timed(load_profile(name)), traces, budgets=BUDGETS, max_num_seqs=256, reference=published("ppas"), name="x"
    )
    assert 45 < sum(spent) < 120
    assert len(spent) == 10


def test_the_check_is_the_busiest_stretch() -> None:
    arrivals = [0.0, 5.0, 10.0, 10.5, 11.0, 11.5, 20.0]
    busy = Trace("busy", tuple(TraceRequest(at, 100 + i, 5) for i, at in enumerate(arrivals)))
    calm = Trace("calm", tuple(TraceRequest(float(at), 50, 5) for at in (0, 4, 8)))
    found = check_trace([calm, busy], 2.0)
    assert [request.arrival_s for request in found.requests] == [0.0, 0.5, 1.0, 1.5]
    assert [request.prompt_tokens for request in found.requests] == [102, 103, 104, 105]


# --- what is refused, and what goes wrong ---

FACTS: dict[str, Any] = {
    "vllm_version": "0.27.1", "model": "m", "max_model_len": 8192, "kv_blocks": 3051, "block_size": 128,
    "cache": {"enable_prefix_caching": "False"}, "scheduler": "AsyncPpasScheduler",
    "flags": {"dtype": "auto", "api_key": "hunter2", "port": 1},
}  # fmt: skip


def test_the_servers_facts_are_taken_as_they_are_and_no_secret_with_them() -> None:
    server = MeasuredServer.from_facts(FACTS, gpu="A100")
    assert (server.num_kv_blocks, server.block_size, server.max_model_len, server.pipeline_depth) == (
        3051,
        128,
        8192,
        2,
    )
    assert MeasuredServer.from_facts({**FACTS, "scheduler": "SyncPpasScheduler"}, gpu="x").pipeline_depth == 1
    assert not server.prefix_caching
    assert MeasuredServer.from_facts({**FACTS, "cache": {"enable_prefix_caching": "True"}}, gpu="x").prefix_caching
    assert server.about["flags"] == {"dtype": "auto"}


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("kv_blocks", "disable-log-stats"), ("block_size", "disable-log-stats"), ("max_model_len", "/v1/models"),
        ("vllm_version", "/version"), ("scheduler", "started by ppas"),
    ],
)  # fmt: skip
def test_what_the_server_does_not_tell_is_never_guessed(missing: str, remedy: str) -> None:
    with pytest.raises(InvalidInput, match=missing) as caught:
        MeasuredServer.from_facts({**FACTS, missing: None}, gpu="x")
    assert remedy in str(caught.value)


def test_replays_without_a_step_log_are_refused() -> None:
    truth = load_profile("rtx5090-qwen2.5-3b")
    replay = SimulatedEvaluator(truth).replay(published("ppas"), rag_bursts(1.0, 0))
    with pytest.raises(InvalidInput, match="has no step log"):
        fit_profile([replay], MeasuredServer.from_profile(truth), name="x")
    with pytest.raises(InvalidInput, match="0 replays"):
        fit_profile([], MeasuredServer.from_profile(truth), name="x")


@dataclass(frozen=True)
class Flaky(SimulatedEvaluator):
    """A simulated server on which replays of these traces give nothing."""

    lost: Sequence[str] = ()

    def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        if trace.name in self.lost:
            raise NoResult("the client was late")
        return super().replay(params, trace, repeat)


def flaky(*lost: str) -> Profile:
    return calibrate(
        Flaky(load_profile("rtx5090-qwen2.5-0.5b"), lost=lost),
        [rag_bursts(1.0, 0)],
        budgets=BUDGETS,
        max_num_seqs=256,
        reference=published("ppas"),
        name="x",
    )


def test_a_replay_that_gave_nothing_is_told_and_the_others_are_fitted() -> None:
    profile = flaky("calibration decode-long", "calibration check")
    assert profile.provenance["calibration"]["failed_replays"] == {
        "calibration decode-long": "the client was late", "calibration check": "the client was late",
    }  # fmt: skip
    assert "held_out_replays" not in profile.fit
    assert SimulatedEvaluator(profile).error_pct is None
    assert len(profile.fit["replays"]) == 8


def test_without_the_first_replay_there_is_no_calibration() -> None:
    with pytest.raises(NoResult, match="the client was late"):
        flaky("calibration first")


def test_this_machines_device_has_a_name_and_no_host_name() -> None:
    assert device_name()
    for said in (device_name(), json.dumps(machine())):
        assert Path("/etc/hostname").read_text().strip() not in said if Path("/etc/hostname").exists() else True
    assert {"system", "machine", "cpu", "cores"} <= machine().keys()


# --- the command ---


def test_the_command_writes_a_profile_that_simulate_and_tune_take(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "study.yaml"
    study.write_text(
        "name: small\nprofile: rtx5090-qwen2.5-0.5b\nnoise_sigma: 0.05\nstatic_budgets: [2048, 8192]\ntrials: 1\n"
        "workload: {family: rag-bursts, rates_per_s: [2.0], prompt_tokens: 8000}\ntuning_seeds: [0]\nheld_out_seeds: [9]\n"
    )
    found = CliRunner().invoke(app, ["calibrate", str(study), "-o", "mine.json", "--target", "20s"])
    assert found.exit_code == 0, found.output
    for word in ("prefill_token_s", "front-end delay 107.65 ms", "held out", "check", "(simulated)", "mine.json"):
        assert word in found.output, found.output
    profile = load_profile("mine.json")
    assert profile.name == "mine"
    assert profile.provenance["origin"] == "simulated"
    for command in (
        ["simulate", "ppas", "--study", str(study)],
        ["tune", str(study), "--quiet", "--sampler", "random"],
    ):
        done = CliRunner().invoke(app, [*command, "--profile", "mine.json"])
        assert done.exit_code == 0, done.output
    as_json = CliRunner().invoke(app, ["calibrate", str(study), "-o", "again.json", "--target", "20s", "--json", "-q"])
    assert json.loads(as_json.stdout)["cost"] == json.loads(Path("mine.json").read_text())["cost"]


def test_the_command_refuses_a_file_that_no_command_would_take_for_a_profile(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["calibrate", "examples/demo.yaml", "-o", str(tmp_path / "mine.txt")])
    assert found.exit_code == 2
    assert "a profile is a .json file" in found.output
