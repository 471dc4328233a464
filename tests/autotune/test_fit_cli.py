"""`ppas fit`: a profile from measured runs, by the command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile
from ppas_core.sim.simulate import simulate
from traces.generate import rag_bursts

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep log as the paper's author writes them, measured on the shipped 3B profile."""
    from autotune.evaluate import request_arrays

    profile = load_profile("rtx5090-qwen2.5-3b")
    path = tmp_path_factory.mktemp("log") / "sweep.txt"
    lines = []
    for config, params in (
        *((f"mbt{budget}", PolicyParams.static(budget)) for budget in (1024, 2048, 8192, 16384)),
        ("ppas", PolicyParams(16384, 2048)),
    ):
        for rate in (0.6, 1.2):
            trace = rag_bursts(rate, 0)
            arrays = request_arrays(trace)
            result = simulate(params, arrays, profile)
            latency = result.last_token_s - arrays.arrival_s
            ttft = result.first_token_s - arrays.arrival_s
            tpot = (result.last_token_s - result.first_token_s) / 31
            row = {
                "trace_id": 0, "config_name": config, "seed": 0, "num_requests": len(trace.requests),
                "completed": len(trace.requests), "failed": 0, "max_num_batched_tokens": params.b_max,
                "configured_prompt_tokens": 25_000, "configured_output_tokens": 32,
                "phase_schedule": f"10:0.2,10:{rate},10:0.2,10:{rate},10:0.2",
                "avg_latency": float(latency.mean()), "avg_ttft": float(ttft.mean()), "avg_tpot": float(tpot.mean()),
                "makespan": float(result.last_token_s.max() - arrays.arrival_s[0]),
            }  # fmt: skip
            lines.append(repr(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_gives_a_profile_with_its_error_on_the_runs_held_out(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    found = RUNNER.invoke(app, ["fit", str(log), "-o", str(output), "--gpu", "some GPU", "--time-limit", "20s"])
    assert found.exit_code == 0, found.output
    profile = load_profile(str(output))
    assert (profile.name, profile.gpu) == ("mine", "some GPU")
    assert profile.fit["held_out_ppas_error_per_regime"]["mean_absolute"]["avg_latency"] < 0.05
    assert "All prompts have 25000 tokens" in " ".join(found.output.split())
    assert json.loads(output.read_text())["fit"]["identified"]["in_words"]


def test_a_profile_must_be_named_json_and_a_log_must_hold_runs(log: Path, tmp_path: Path) -> None:
    assert RUNNER.invoke(app, ["fit", str(log), "-o", str(tmp_path / "mine.txt")]).exit_code == 2
    empty = tmp_path / "empty.txt"
    empty.write_text("nothing\n")
    assert RUNNER.invoke(app, ["fit", str(empty), "-o", str(tmp_path / "mine.json")]).exit_code == 2
