"""The published P-PAS+ workloads can be studied on profiles that nobody measured, and every result says that."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.evaluate import SimulatedEvaluator
from autotune.plan import make_plan
from autotune.spec import load_spec
from autotune.tune import tune
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("plus-qwen", "plus-nemotron")
NOT_MEASURED = "was not measured: its step costs are computed"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline_profiles", ROOT / "scripts/roofline_profiles.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", ["QWEN", "NEMOTRON"])
def test_a_profile_that_nobody_measured_is_what_the_script_computes(script: ModuleType, model: str) -> None:
    computed = script.roofline(getattr(script, model), script.RTX5090)
    assert load_profile(computed.name) == computed
    assert computed.name.endswith("-not-measured")
    assert computed.provenance["source"].startswith("not measured")
    assert SimulatedEvaluator(computed).error_pct is None


def test_its_costs_are_the_hand_computed_ones() -> None:
    qwen, nemotron = (load_profile(f"rtx5090-{n}-not-measured").cost for n in ("qwen3.8-27b", "nemotron-30b"))
    # Qwen: 2 * 24.46e9 FLOP a token at 0.4 of 1676e12; 4 * 16 * 24 * 256 a pair at 0.6 of 209.5e12; 32 KiB of KV a token.
    assert qwen.prefill_token_s == pytest.approx(48.91e9 / 670.4e12, rel=0.01)
    assert qwen.prefill_pair_s == pytest.approx(393_216 / 125.7e12, rel=0.01)
    assert qwen.decode_context_token_s == pytest.approx(32_768 / 1433.6e9, rel=0.01)
    # Nemotron: 3 KiB of KV a token; a chunk wakes all experts, 29.37e9 weights of 0.5625 bytes.
    assert nemotron.decode_context_token_s == pytest.approx(3072 / 1433.6e9, rel=0.01)
    assert nemotron.prefill_step_s == pytest.approx(29.37e9 * 0.5625 / 1433.6e9, rel=0.01)
    assert isinstance(nemotron, StepCost)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_holds_the_published_workload_and_its_profile_serves_every_prompt(name: str) -> None:
    path = ROOT / "examples" / f"{name}.yaml"
    plan = make_plan(load_spec(path), path.parent)  # refuses traces that the profile cannot serve
    prompts = {request.prompt_tokens for trace in plan.tuning for request in trace.requests}
    longest = 65_536 if name == "plus-qwen" else 131_072
    assert prompts == {longest >> shift for shift in range(4)}
    assert plan.space.contains(plan.reference)
    assert plan.reference.t_large is not None
    (doubt,) = plan.evaluator.doubts(plan.reference, plan.tuning)
    assert NOT_MEASURED in doubt


def test_a_study_on_such_a_profile_says_in_its_result_that_it_was_not_measured(tmp_path: Path) -> None:
    path = ROOT / "examples/plus-qwen.yaml"
    spec = load_spec(path)
    workload = spec.workload.model_copy(update={"phases": ("20:0.05,20:0.4,20:0.05",)})
    short = spec.model_copy(
        update={
            "workload": workload,
            "tuning_seeds": (0, 1),
            "held_out_seeds": (100, 102),
            "static_budgets": (2048,),
            "trials": 3,
            "sampler": "tpe",
        }
    )
    results = tune(make_plan(short, path.parent), tmp_path / "run")
    assert any(NOT_MEASURED in note for note in results.warnings)
    assert "not-measured" in json.dumps(results.provenance)


def test_simulate_says_so_below_its_tables() -> None:
    said = CliRunner().invoke(
        app,
        ["simulate", "ppas-plus-qwen3.8-27b", "--study", str(ROOT / "examples/plus-qwen.yaml")],
        env={"COLUMNS": "200"},
    )
    assert said.exit_code == 0, said.output
    assert NOT_MEASURED in re.sub(r"\s+", " ", said.output)
    assert "rtx5090-qwen3.8-27b-not-measured (simulated)" in said.output
