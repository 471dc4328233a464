"""Step costs found again in step logs of a simulated server, whose truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppas_core.defaults import published
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.sim.cost import StepCost
from ppas_core.sim.fit import StepFeatures, StepFit, design, fit_steps, lone_requests, steps_table
from ppas_core.sim.profile import Profile, load_profile
from ppas_core.sim.result import SimResult
from ppas_core.sim.simulate import RequestArrays, simulate
from ppas_core.vllm.steplog import StepRow, read_step_log

# Shapes that differ: the two published machines, and one whose mixed and decode steps are dear.
TRUTHS = {
    "3b": load_profile("rtx5090-qwen2.5-3b").cost,
    "0.5b": load_profile("rtx5090-qwen2.5-0.5b").cost,
    "dear decodes": StepCost(
        step_s=0.008, prefill_token_s=1e-5, prefill_pair_s=4e-10, decode_token_s=4e-4, decode_context_token_s=2e-7,
        prefill_step_s=0.0, mixed_step_s=0.03,
    ),
}  # fmt: skip


def machine(truth: str, depth: int = 2) -> Profile:
    return replace(load_profile("rtx5090-qwen2.5-3b"), cost=TRUTHS[truth], pipeline_depth=depth)


def requests(prompt: int, gap_s: float, number: int = 10, output: int = 40) -> RequestArrays:
    return RequestArrays(np.arange(number) * gap_s, np.full(number, prompt), np.full(number, output))


def run(
    profile: Profile, budget: int, arrays: RequestArrays, noise: float = 0.0, seed: int = 0
) -> tuple[PolicyParams, SimResult]:
    params = PolicyParams.static(budget)
    return params, simulate(params, arrays, profile, noise_sigma=noise, noise_seed=seed, record_steps=True)


def log_of(profile: Profile, budget: int, arrays: RequestArrays, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    params, result = run(profile, budget, arrays, noise, seed)
    return steps_table(result, params)


def diverse(profile: Profile, noise: float, seed: int = 0) -> StepFeatures:
    """Logs that move every coefficient: three lengths under three budgets, alone and in a crowd."""
    parts = []
    for number, (budget, prompt, gap_s, many) in enumerate(
        [
            (512, 25_000, 2.0, 6), (2048, 25_000, 1.0, 8), (16_384, 25_000, 1.0, 8), (16_384, 25_000, 9.0, 4),
            (2048, 6000, 0.2, 10), (16_384, 6000, 1.5, 6), (16_384, 300, 0.0, 64), (512, 3000, 0.1, 10),
        ]
    ):  # fmt: skip
        log = log_of(profile, budget, requests(prompt, gap_s, many), noise, 100 * seed + number)
        parts.append(StepFeatures.of(log))
    return StepFeatures.join(parts)


def by_name(fit: StepFit, name: str) -> str:
    return next(entry.status for entry in fit.coefficients if entry.name == name)


# --- durations ---


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("gap_s", [0.0, 0.9, 5.0])
def test_a_steps_duration_is_found_exactly_at_both_depths(depth: int, gap_s: float) -> None:
    params, result = run(machine("3b", depth), 2048, requests(25_000, gap_s, 5), noise=0.3)
    found = StepFeatures.of(steps_table(result, params))
    assert result.step_log is not None
    truth = result.step_log.end_s - result.step_log.start_s
    assert len(found) == len(truth)
    np.testing.assert_allclose(found.duration_s, truth, atol=3e-6)  # a log keeps microseconds


def test_from_plan_to_output_is_not_the_duration_when_steps_overlap() -> None:
    log = log_of(machine("3b", depth=2), 2048, requests(25_000, 0.9, 5))
    naive = (log["done_s"] - log["start_s"]).to_numpy()
    found = StepFeatures.of(log).duration_s
    assert np.median(naive / found) > 1.8


def test_rows_that_say_nothing_are_left_out_and_counted() -> None:
    log = log_of(machine("3b", depth=1), 2048, requests(25_000, 0.9, 3))
    log.loc[10, "done_s"] = np.nan  # this step never came back, and the next has no known beginning
    log = log.drop(index=20)
    log.loc[30, ["prefill_tokens", "decode_tokens", "prefill_pairs", "decode_context_tokens"]] = 0
    found = StepFeatures.of(log)
    assert found.left_out == {
        "computed nothing": 1, "output never came back": 1, "step before not in the log": 2,
    }  # fmt: skip
    assert len(found) == len(log) - 4


def test_what_is_no_step_log_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'decode_context_tokens'"):
        StepFeatures.of(log_of(machine("3b"), 2048, requests(100, 1.0, 2)).drop(columns="decode_context_tokens"))


def test_a_simulated_log_has_a_live_logs_columns_and_survives_its_file(tmp_path: Path) -> None:
    log = log_of(machine("3b"), 2048, requests(25_000, 0.9, 3))
    assert tuple(log.columns) == StepRow._fields
    assert (log["prefill_chunks"] + log["decodes"] > 0).all()
    assert (log["decodes"] == log["decode_tokens"]).all()  # nobody was preempted
    log.to_csv(tmp_path / "steps.csv", index=False)
    again = StepFeatures.of(read_step_log(tmp_path / "steps.csv"))
    np.testing.assert_array_equal(again.duration_s, StepFeatures.of(log).duration_s)


def test_a_result_without_a_log_is_refused() -> None:
    result = simulate(published("ppas"), requests(100, 1.0, 2), machine("3b"))
    with pytest.raises(InvalidInput, match="record_steps"):
        steps_table(result, published("ppas"))


# --- the fit ---


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("truth", TRUTHS)
def test_without_noise_the_truth_is_found_again(truth: str, depth: int) -> None:
    fit = fit_steps(diverse(machine(truth, depth), noise=0.0))
    assert fit.held_out["all"].mean_absolute < 5e-4
    for entry in fit.coefficients:
        true = getattr(TRUTHS[truth], entry.name)
        if entry.name != "prefill_ramp_token_s":  # its length is one of a few round numbers
            assert entry.value == pytest.approx(true, rel=0.02, abs=1e-9), entry.name


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("seed", range(3))
def test_with_noise_steps_of_an_unseen_setting_are_predicted_within_two_per_cent(
    truth: str, depth: int, seed: int
) -> None:
    profile = machine(truth, depth)
    fit = fit_steps(diverse(profile, noise=0.05, seed=seed))
    assert fit.noise_sigma == pytest.approx(0.05, rel=0.1)
    unseen = simulate(published("ppas"), requests(18_000, 0.8, 12), profile, record_steps=True).step_log
    assert unseen is not None
    columns = (unseen.prefill_tokens, unseen.prefill_pairs, unseen.decode_tokens, unseen.decode_context_tokens)
    shapes = list(zip(*(column.tolist() for column in columns), strict=True))
    error = [fit.cost.seconds(*shape) / TRUTHS[truth].seconds(*shape) - 1 for shape in shapes]
    assert np.abs(error).mean() < 0.02
    for entry in fit.coefficients:
        if entry.status == "identified" and entry.time_share > 0.05:
            assert entry.value == pytest.approx(getattr(TRUTHS[truth], entry.name), rel=0.25), entry.name


def test_intervals_hold_the_truth_in_most_fits() -> None:
    truth, held = TRUTHS["0.5b"], []
    for seed in range(12):
        fit = fit_steps(diverse(machine("0.5b"), noise=0.05, seed=seed))
        held += [entry.low <= getattr(truth, entry.name) <= entry.high for entry in fit.coefficients]
    assert np.mean(held) > 0.8


def test_stalls_move_no_coefficient() -> None:
    steps = diverse(machine("0.5b"), noise=0.05)
    before = fit_steps(steps)
    stalled = steps.duration_s.copy()
    stalled[np.random.default_rng(1).random(len(stalled)) < 0.01] *= 20
    after = fit_steps(replace(steps, duration_s=stalled))
    for one, other in zip(before.coefficients, after.coefficients, strict=True):
        assert other.value == pytest.approx(one.value, rel=0.08), one.name
    assert 0.005 < after.outlier_share < 0.02
    assert after.time_ratio < 0.9 < before.time_ratio, "the time in stalls is said, not modelled"


def test_noise_leaves_the_time_of_a_replay_as_it_is() -> None:
    steps = diverse(machine("dear decodes"), noise=0.4)
    fit = fit_steps(steps)
    assert fit.time_ratio == pytest.approx(1.0, abs=0.03), "the mean, although the bulk lies 8 % below it"


def test_the_ramp_is_kept_where_there_is_one() -> None:
    with_ramp = fit_steps(diverse(machine("3b"), noise=0.02))
    assert with_ramp.ramp["kept"]
    assert with_ramp.ramp["left_out_error_with"] < with_ramp.ramp["left_out_error_without"]
    without = fit_steps(diverse(machine("0.5b"), noise=0.02))
    assert not without.ramp["kept"]
    assert without.cost.prefill_ramp_tokens == 0


def test_a_few_large_chunks_are_not_outvoted_by_hundreds_of_small_ones() -> None:
    tokens = np.repeat([512.0, 1024.0, 2048.0, 16_384.0], [400, 200, 100, 20])
    nothing = np.zeros(len(tokens))
    noise = np.exp(0.05 * np.random.default_rng(0).standard_normal(len(tokens)))
    truth_s = 0.01 + 3e-5 * tokens**1.05  # no form of ours: something must give
    duration_s = truth_s * noise
    steps = StepFeatures(duration_s, tokens, nothing, nothing, nothing, np.zeros(len(tokens), np.int64), {})
    columns = design.columns(steps)
    errors = []
    for counts in (design.balance(design.kinds(steps)), np.ones(len(tokens))):
        coefficients, _ = design.solve(columns, duration_s, counts)
        errors.append(abs(float(columns[-1] @ coefficients / truth_s[-1] - 1)))
    assert errors[0] < 0.7 * errors[1]


def test_the_same_steps_give_the_same_fit() -> None:
    steps = diverse(machine("3b"), noise=0.1)
    assert fit_steps(steps).to_dict() == fit_steps(steps).to_dict()


# --- what the steps do not tell ---


def test_one_length_in_one_chunk_cannot_tell_the_prefill_coefficients_apart() -> None:
    fit = fit_steps(log_of(machine("3b"), 16_384, requests(8000, 3.0, 30), noise=0.03))
    found = {entry.name: entry for entry in fit.coefficients}
    for name in ("prefill_pair_s", "prefill_step_s"):
        assert found[name].status == "not identified"
        assert "prefill_token_s" in found[name].reason
        assert "second prompt length" in found[name].reason
    assert found["mixed_step_s"].reason.startswith("no step in which it acts")
    assert set(fit.to_dict()["not_identified"]) >= {"prefill_pair_s", "prefill_step_s", "mixed_step_s"}


def test_chunks_of_one_prompt_tell_token_and_pair_apart() -> None:
    fit = fit_steps(log_of(machine("3b"), 2048, requests(25_000, 3.0, 12), noise=0.03))
    assert by_name(fit, "prefill_pair_s") == "identified"


def test_a_coefficient_that_costs_nothing_is_negligible() -> None:
    cost = replace(TRUTHS["3b"], mixed_step_s=0.0)
    fit = fit_steps(diverse(replace(machine("3b"), cost=cost), noise=0.02))
    assert by_name(fit, "mixed_step_s") == "negligible"


def test_too_few_steps_are_no_fit() -> None:
    log = log_of(machine("3b"), 16_384, requests(100, 1.0, 1, output=20))
    with pytest.raises(NoResult, match=r"holds 20 usable steps; a fit needs at least 40"):
        fit_steps(log)


# --- requests that had the server to themselves ---


def times(result: SimResult, arrays: RequestArrays) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return arrays.arrival_s, result.first_token_s, result.last_token_s, arrays.prompt_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lone_requests_delay_is_its_ttft_less_its_steps(depth: int) -> None:
    profile = replace(machine("3b", depth), frontend_delay_s=0.0625)
    arrays = requests(6000, 4.0, 5)
    params, result = run(profile, 2048, arrays, noise=0.1)
    found = lone_requests(steps_table(result, params), *times(result, arrays))
    np.testing.assert_allclose(found, 0.0625, atol=3e-6)


def test_requests_in_company_and_steps_of_an_earlier_attempt_are_not_taken_for_lone_ones() -> None:
    profile = machine("3b")
    arrays = RequestArrays(np.array([0.0, 0.1, 9.0]), np.array([6000, 6000, 3000]), np.array([8, 8, 8]))
    params, result = run(profile, 2048, arrays)
    log = steps_table(result, params)
    first = log.assign(start_s=log["start_s"] - 100, done_s=log["done_s"] - 100)
    found = lone_requests(pd.concat([first, log], ignore_index=True), *times(result, arrays))
    assert np.isnan(found[:2]).all()
    assert found[2] == pytest.approx(profile.frontend_delay_s, abs=3e-6)


def test_a_log_of_another_replay_says_nothing_of_any_delay() -> None:
    arrays = requests(6000, 4.0, 3)
    _, result = run(machine("3b"), 2048, arrays)
    other = log_of(machine("3b"), 2048, requests(5999, 4.0, 3))
    assert np.isnan(lone_requests(other, *times(result, arrays))).all()
