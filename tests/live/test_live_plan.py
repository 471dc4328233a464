"""Live studies before a server answers: what is refused, what stops them, what stays secret."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.pipeline import plan_lines
from autotune.live import LiveEvaluator
from autotune.plan import make_plan
from autotune.server_options import ServerOptions
from autotune.spec import load_spec, parse_spec
from autotune.tune import tune
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput
from traces.generate import rag_bursts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STUDY: dict[str, Any] = {
    "name": "joined",
    "backend": "vllm",
    "server": {"model": "any", "url": "http://127.0.0.1:9", "settings_file": "settings.json"},
}


@pytest.mark.parametrize(
    ("server", "word"),
    [
        ({"model": "m", "settings_file": "s.json"}, "belong to a server that runs already"),
        ({"model": "m", "token_file": "token"}, "belong to a server that runs already"),
        ({"model": "m", "url": "http://x", "settings_file": "s", "token_file": "t"}, "give one of them"),
        ({"model": "m", "url": "http://x", "flags": ["--dtype", "auto"]}, "leave out url, or them"),
        ({"model": "m", "url": "http://x", "restart_per_trial": True}, "leave out url, or them"),
        ({"model": "m", "flags": ["--port=1"]}, "is set by the tuner"),
        ({"model": "m", "flags": ["--max_num_seqs", "4"]}, "is set by the tuner"),
        ({"model": "m", "flags": ["--max-num-b 4"]}, "is set by the tuner"),
        ({"model": "m", "start_timeout": "soon"}, "'soon'"),
        ({}, "key 'server.model' is missing"),
    ],
)
def test_a_server_block_that_cannot_work_is_refused(server: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_spec({**STUDY, "server": server}, "test")
    assert word in str(caught.value)


def test_a_backend_and_its_block_go_together() -> None:
    for data in ({"name": "x", "backend": "vllm"}, {"name": "x", "server": {"model": "m"}}):
        with pytest.raises(InvalidInput, match="go together"):
            parse_spec(data, "test")


def test_a_server_that_is_not_there_stops_the_study_at_once_instead_of_burning_trials(tmp_path: Path) -> None:
    plan = make_plan(parse_spec(STUDY, "test"), tmp_path)
    with pytest.raises(InvalidInput, match=r"no server answers at http://127\.0\.0\.1:9"):
        tune(plan, tmp_path / "run")
    assert not (tmp_path / "run/trials").exists()
    # Nothing was measured, so the corrected study may use the folder.
    corrected = parse_spec({**STUDY, "server": {**STUDY["server"], "url": "http://127.0.0.1:8"}}, "test")
    plan = make_plan(corrected, tmp_path)
    with pytest.raises(InvalidInput, match=r"no server answers at http://127\.0\.0\.1:8"):
        tune(plan, tmp_path / "run")


def test_secrets_of_the_server_appear_nowhere_in_the_run_folder(tmp_path: Path) -> None:
    secret = "hunter2-token"  # noqa: S105 - made up
    study = {**STUDY, "server": {"model": "nowhere/none", "environment": {"HF_TOKEN": secret}, "start_timeout": "1s"}}
    plan = make_plan(parse_spec(study, "test"), tmp_path)
    assert isinstance(plan.evaluator, LiveEvaluator)
    assert plan.evaluator.options.environment == {"HF_TOKEN": secret}
    assert secret not in plan.resolved_spec().to_yaml()
    assert secret not in json.dumps([plan.evaluator.identity(), plan.evaluator.describe()])
    assert "HF_TOKEN" in json.dumps(plan.evaluator.identity())


def test_settings_of_another_sequence_cap_are_refused_before_anything_starts(tmp_path: Path) -> None:
    study = {**STUDY, "reference": published("ppas-plus-qwen3.8-27b").to_dict(), "space": "ppas"}
    with pytest.raises(InvalidInput, match="on one server all settings share it"):
        make_plan(parse_spec(study, "test"), tmp_path)


@pytest.mark.parametrize("flag", [["--max-model-len", "8k"], ["--max_model_len=8000"]])
def test_requests_that_the_server_would_refuse_are_refused_before_it_starts(tmp_path: Path, flag: list[str]) -> None:
    study = {"name": "x", "backend": "vllm", "server": {"model": "org/name", "flags": flag}}
    long = {"family": "rag-bursts", "rates_per_s": [1.0], "prompt_tokens": 7990, "output_tokens": 32}
    with pytest.raises(InvalidInput) as caught:
        make_plan(parse_spec({**study, "workload": long}, "test"), tmp_path)
    said = str(caught.value)
    assert said.startswith(
        "trace 'rag-bursts λ=1 p7990 o32 seed 0', request 0: 7990 prompt and 32 output tokens are 8022"
    ), said
    assert "--max-model-len allows 8000" in said
    assert said.endswith("choose shorter ones in `workload` or a larger --max-model-len")
    make_plan(parse_spec({**study, "workload": {**long, "prompt_tokens": 7968}}, "test"), tmp_path)


@pytest.mark.parametrize("model", ["./model", "../model", "/no/such/model", "~/no/such/model", "models/of/mine"])
def test_a_models_folder_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path, model: str) -> None:
    spec = parse_spec({"name": "x", "backend": "vllm", "server": {"model": model}}, "test")
    with pytest.raises(InvalidInput, match=f"there is no {model}, neither beside the study file nor here"):
        make_plan(spec, tmp_path)
    if model.startswith("./"):
        (tmp_path / model).mkdir()
        make_plan(spec, tmp_path)


@pytest.mark.parametrize("model", ["org/name", "name", "s3://bucket/a/model", "org/name/file.gguf"])
def test_what_only_vllm_can_find_is_left_to_vllm(tmp_path: Path, model: str) -> None:
    make_plan(parse_spec({"name": "x", "backend": "vllm", "server": {"model": model}}, "test"), tmp_path)
    there = {"model": "/on/its/own/machine", "url": "http://127.0.0.1:9", "settings_file": "s.json"}
    make_plan(parse_spec({"name": "x", "backend": "vllm", "server": there}, "test"), tmp_path)


def test_a_replay_outside_a_session_is_our_own_bug() -> None:
    evaluator = LiveEvaluator(ServerOptions("m"), budget=2048, max_num_seqs=256)
    with pytest.raises(AssertionError, match="within its session"):
        evaluator.replay(published("ppas"), rag_bursts(1.0, 0))


@pytest.mark.parametrize(
    ("server", "starts"),
    [
        ({}, "and two server starts:"),
        ({"cold_check": False}, "and one server start:"),
        ({"url": "http://127.0.0.1:9"}, "and no server start:"),
    ],
)
def test_the_plan_tells_the_server_starts_before_any(tmp_path: Path, server: dict[str, object], starts: str) -> None:
    plan = make_plan(parse_spec({**STUDY, "server": {"model": "any", **server}}, "test"), tmp_path)
    _, second, *_ = plan_lines(plan)
    assert starts in second
    assert ("calibrating" in second) == ("url" not in server)


def test_the_plan_says_what_the_number_of_settings_counts() -> None:
    plan = make_plan(load_spec(EXAMPLES / "live-cpu.yaml"), EXAMPLES)
    counted = (
        "12 searched + the reference + 3 static budgets = 16 settings (1 outside the space, measured beside the search)"
    )
    assert plan_lines(plan)[0].startswith(f"plan: {counted} on 2 tuning traces")
    assert plan.estimate().settings == 16


@pytest.mark.parametrize(("name", "waits"), [("live-cpu-smoke", False), ("live-cpu", True)])
def test_the_live_examples_plan_what_their_comments_say(name: str, waits: bool) -> None:
    path = EXAMPLES / f"{name}.yaml"
    plan = make_plan(load_spec(path), path.parent)
    assert isinstance(plan.evaluator, LiveEvaluator)
    assert (plan.reference == replace(published("ppas"), max_num_seqs=16)) == waits
    # Measured on two cores: a prompt of 1,500 tokens takes about 0.13 s with small-qwen2 and 0.02 s with tiny-qwen2.
    token_s = {"small-qwen2": 0.13 / 1500, "tiny-qwen2": 0.02 / 1500}[Path(str(plan.spec.server.model)).name]
    asked = [sum(r.prompt_tokens for r in trace.requests) / trace.requests[-1].arrival_s for trace in plan.tuning]
    assert (max(asked) * token_s > 0.4) == waits, asked
