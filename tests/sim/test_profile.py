"""Profiles and requests are checked when they are made, and say what is wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import DEFAULT_PROFILE, Profile, load_profile, profile_names
from ppas_core.sim.simulate import RequestArrays, RequestBatch, noise_factors, simulate, simulate_many


def profile_dict(**changes: Any) -> dict[str, Any]:
    return {**load_profile(DEFAULT_PROFILE).to_dict(), **changes}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in profile_dict().items() if name != key}


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_round_trips_and_states_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    again = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert again == profile
    assert again.digest == profile.digest
    for key in ("source", "date", "script", "assumed"):
        assert profile.provenance[key], key
    assert profile.fit["not_identified"]
    assert (profile.doubt is not None) == name.endswith("-not-measured")
    if profile.doubt is None:
        assert all(profile.provenance[key] for key in ("license", "runs_fitted", "runs_held_out"))
        assert all(profile.fit[key] for key in ("static_error_per_run", "held_out_ppas_error_per_regime"))


def test_the_default_profile_is_shipped_with_the_other_published_models() -> None:
    assert DEFAULT_PROFILE == "rtx5090-qwen2.5-3b"
    assert profile_names() == (
        "rtx5090-nemotron-30b-not-measured",
        "rtx5090-qwen2.5-0.5b",
        "rtx5090-qwen2.5-3b",
        "rtx5090-qwen3.8-27b-not-measured",
    )


def test_the_digest_changes_with_any_number() -> None:
    profile = load_profile(DEFAULT_PROFILE)
    assert replace(profile, num_kv_blocks=profile.num_kv_blocks + 1).digest != profile.digest


def test_a_profile_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile_dict(name="mine", num_kv_blocks=77)))
    assert load_profile(str(path)).num_kv_blocks == 77


def test_an_unknown_name_is_answered_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        InvalidInput, match=r"rtx5090-qwen2\.5-0\.5b, rtx5090-qwen2\.5-3b, .*; did you mean rtx5090-qwen2\.5-3b\?"
    ):
        load_profile("rtx5090-qwen2.5-3")


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


def error_of(value: object) -> dict[str, Any]:
    return {"held_out_ppas_error_per_regime": {"mean_absolute": {"avg_latency": value}}}


@pytest.mark.parametrize("name", ["a\0.json", "\ud800.json", "x" * 300 + ".json"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        load_profile(name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (profile_dict(format="other"), "format is 'other'"),
        (profile_dict(version=2), "profile version 2; this release reads version 1; a newer ppas"),
        (profile_dict(num_blocks=3), "unknown profile entry 'num_blocks'"),
        (without("block_size"), "entry 'block_size' is missing"),
        (profile_dict(cost={"step_s": 1.0}), "step cost 'prefill_token_s' is missing"),
        (profile_dict(cost={**profile_dict()["cost"], "step_ms": 1.0}), "unknown step cost 'step_ms'"),
        (profile_dict(cost={**profile_dict()["cost"], "step_s": -1.0}), "step_s is -1.0; allowed: a finite number"),
        (profile_dict(cost={**profile_dict()["cost"], "step_s": math.nan}), "step_s is nan"),
        (profile_dict(cost=[1]), "allowed: an object of step costs"),
        (profile_dict(pipeline_depth=3), "pipeline_depth is 3; allowed: 1 to 2"),
        (profile_dict(num_kv_blocks=True), "num_kv_blocks is True"),
        (profile_dict(frontend_delay_s=-0.1), "frontend_delay_s is -0.1"),
        (profile_dict(gpu=""), "gpu is ''"),
        (profile_dict(fit=[]), "allowed: an object with named entries"),
        (profile_dict(cost={**profile_dict()["cost"], "step_s": 1e308}), r"step_s is 1e\+308; .* 0 to 1e\+07"),
        (profile_dict(cost={**profile_dict()["cost"], "step_s": 10**400}), "step_s is 1000"),
        (profile_dict(frontend_delay_s=10**400), "frontend_delay_s is 1000"),
        (profile_dict(frontend_delay_s=math.nan), "frontend_delay_s is nan; allowed: 0 to 3600"),
        (profile_dict(model="\ud800"), "profile model .* half a character"),
        (profile_dict(provenance={"x": [math.nan]}), "provenance.x is nan"),
        (profile_dict(fit={"x": math.inf}), "fit.x is inf"),
        (profile_dict(provenance=nested(40)), "provenance nests deeper than 32 levels"),
        (profile_dict(fit={"measured_range": [1]}), r"fit\.measured_range is \[1\]; allowed: an object"),
        (profile_dict(fit={"measured_range": {"budget_tokens": "ab"}}), "budget_tokens is 'ab'; allowed: \\[lowest"),
        (profile_dict(fit={"measured_range": {"budget_tokens": []}}), "two ascending numbers"),
        (profile_dict(fit={"measured_range": {"budget_tokens": [2, 1]}}), "two ascending numbers"),
        (profile_dict(fit={"measured_range": {"budget_tokens": [1, None]}}), "two ascending numbers"),
        (profile_dict(fit={"held_out_ppas_error_per_regime": "x"}), "held_out_ppas_error_per_regime is 'x'"),
        (profile_dict(fit=error_of("x")), "mean_absolute.avg_latency is 'x'"),
        (profile_dict(fit=error_of(None)), "mean_absolute.avg_latency is None"),
        (profile_dict(fit=error_of(-0.1)), "mean_absolute.avg_latency is -0.1"),
    ],
)
def test_a_profile_with_an_error_is_refused_with_its_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Profile.from_dict(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "allowed: an object"),
        ("[" * 200_000, "is not JSON: it nests too deeply"),
        ('{"num_kv_blocks": ' + "1" * 5000 + "}", "is not JSON: Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        load_profile(str(path))


def test_a_step_must_take_time() -> None:
    with pytest.raises(InvalidInput, match="a step must take time"):
        StepCost(0.0, 0.0, 1.0, 0.0, 1.0)
    with pytest.raises(InvalidInput, match="must be at least 1e-09"):
        StepCost(1e-320, 0.0, 1.0, 0.0, 1.0)


def test_step_seconds_follow_the_formula() -> None:
    cost = StepCost(1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 2.0)
    assert cost.seconds(3, 4, 0, 0) == 1 + 30 + 400 + 1e5 + 2e7
    assert cost.seconds(1, 1, 0, 0) == 1 + 10 + 100 + 1e5 + 1e7
    assert cost.seconds(0, 0, 2, 5) == 1 + 2e3 + 5e4
    assert cost.seconds(3, 4, 2, 5) == 1 + 30 + 400 + 1e5 + 2e7 + 2e3 + 5e4 + 1e6


@pytest.mark.parametrize(
    ("arrival_s", "prompts", "outputs", "message"),
    [
        ([], [], [], "0 requests"),
        ([0.0, 1.0], [1], [1, 1], "2, 1 and 2 entries"),
        ([[0.0]], [1], [1], "2 dimensions"),
        ([0.0, math.nan], [1, 1], [1, 1], "arrival_s of request 1 is nan"),
        ([0.0, math.inf], [1, 1], [1, 1], "arrival_s of request 1 is inf"),
        ([-1.0], [1], [1], "arrival_s of request 0 is -1.0"),
        ([0.0, 2.0, 1.0], [1] * 3, [1] * 3, "arrival_s of request 2 is 1.0; allowed: no earlier"),
        ([0.0, 1.0], [1, 0], [1, 1], "prompt_tokens of request 1 is 0"),
        ([0.0], [1], [-5], "output_tokens of request 0 is -5"),
        ([0.0], [1.5], [1], "prompt_tokens has type float64; allowed: whole numbers"),
        ([0.0], [True], [1], "prompt_tokens has type bool"),
    ],
)
def test_requests_with_an_error_are_refused_by_number(
    arrival_s: list[Any], prompts: list[Any], outputs: list[Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        RequestArrays(
            np.array(arrival_s),
            np.array(prompts, int if not prompts else None),
            np.array(outputs, int if not outputs else None),
        )


def test_requests_are_copied_and_cannot_be_changed() -> None:
    prompts = np.array([5, 6])
    requests = RequestArrays(np.zeros(2), prompts, np.ones(2, np.int64))
    prompts[0] = 99
    assert requests.prompt_tokens.tolist() == [5, 6]
    with pytest.raises(ValueError, match="read-only"):
        requests.prompt_tokens[0] = 1


def test_a_request_that_can_never_be_served_is_refused_by_number() -> None:
    profile = replace(load_profile(DEFAULT_PROFILE), num_kv_blocks=5)  # 4 usable blocks of 16 tokens
    fits = RequestArrays(np.zeros(2), np.array([10, 60]), np.array([3, 5]))
    assert simulate(PolicyParams.static(512), fits, profile).steps.peak_kv_blocks == 4
    too_long = RequestArrays(np.zeros(2), np.array([10, 60]), np.array([3, 6]))
    for run in (
        lambda: simulate(PolicyParams.static(512), too_long, profile),
        lambda: simulate_many(PolicyParams.static(512), RequestBatch.pack([fits, too_long]), profile),
    ):
        with pytest.raises(InvalidInput, match=r"request 1 has 60 prompt and 6 output tokens; .* at most 65 tokens"):
            run()
    with pytest.raises(InvalidInput, match="at most 32768 tokens"):
        simulate(
            PolicyParams.static(512),
            RequestArrays(np.zeros(1), np.array([32_768]), np.array([1])),
            load_profile(DEFAULT_PROFILE),
        )


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidInput, match="0 traces"):
        RequestBatch.pack([])


def test_noise_has_mean_one_and_the_asked_spread_and_its_range_is_checked() -> None:
    factors = noise_factors(0.2, 7)
    assert float(factors.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(np.log(factors).std()) == pytest.approx(0.2, rel=0.02)
    assert noise_factors(0.0, 7).tolist() == [1.0]
    with pytest.raises(InvalidInput, match=r"noise_sigma is -0\.1; allowed: 0 to 1"):
        noise_factors(-0.1, 0)
    with pytest.raises(InvalidInput, match="noise_seed is -1"):
        noise_factors(0.1, -1)


def test_a_profile_that_was_not_measured_must_say_why_in_words() -> None:
    with pytest.raises(InvalidInput, match=r"fit\.not_measured is True; allowed: the reason, as a text"):
        replace(load_profile(DEFAULT_PROFILE), fit={"not_measured": True})
