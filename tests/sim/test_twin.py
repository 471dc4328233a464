"""The compiled kernel and its plain Python twin are the same loop, and that loop keeps its laws."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppas_core.policy import Branch, PolicyParams, Scope
from ppas_core.sim.cost import StepCost
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import Profile
from ppas_core.sim.reference import Request, Scheduler, simulate_reference
from ppas_core.sim.result import SimResult
from ppas_core.sim.simulate import RequestArrays, RequestBatch, simulate, simulate_many

COST = StepCost(
    step_s=0.003,
    prefill_token_s=1.7e-5,
    prefill_pair_s=3e-8,
    decode_token_s=1.3e-4,
    decode_context_token_s=2.1e-7,
    prefill_step_s=0.0011,
    mixed_step_s=0.0007,
    prefill_ramp_token_s=3.3e-6,
    prefill_ramp_tokens=150.5,
)


def profile(num_kv_blocks: int = 4000, *, depth: int = 2, block_size: int = 16, delay_s: float = 0.01) -> Profile:
    return Profile("p", "m", "g", "0", COST, delay_s, num_kv_blocks, block_size, 100_000, depth)


def shared_prefixes(draw: st.DrawFn, prompts: list[int]) -> SharedPrefixes:
    """Prompts of few different blocks, so that many begin alike, and some that are their request's own."""
    block_size = draw(st.sampled_from([1, 3, 16, 40, 64]))
    branches = draw(st.integers(1, 3))
    hashes: list[list[int]] = []
    for prompt in prompts:
        length = -(-prompt // block_size)
        fork = draw(st.integers(0, length))
        hashes.append([0] * fork + [draw(st.integers(0, branches))] * (length - fork))
        if draw(st.integers(0, 9)) == 0:
            hashes[-1] = []
    return SharedPrefixes.of(block_size, hashes)


@st.composite
def cases(draw: st.DrawFn, prefix_caching: bool | None = None) -> tuple[PolicyParams, RequestArrays, Profile, float]:
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3, 1.5]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 400), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    caching = draw(st.booleans()) if prefix_caching is None else prefix_caching
    prefixes = shared_prefixes(draw, prompts) if caching else None
    requests = RequestArrays(np.cumsum(gaps), np.array(prompts), np.array(outputs), prefixes=prefixes)
    block_size = draw(st.sampled_from([1, 4, 16]))
    # From a pool that holds the longest request alone, so that nearly everything is preempted, to a roomy one.
    least = -(-requests.longest_tokens // block_size) + 1
    blocks = least + draw(st.sampled_from([0, 1, 3, 10, 50, 400]))
    scope = draw(st.sampled_from(Scope))
    max_num_seqs = draw(st.integers(1, 12))
    b_max = max_num_seqs + draw(st.integers(0, 600))
    guard = draw(st.booleans())
    least_cap = 1 if guard or scope is Scope.PREFILL else max_num_seqs
    params = PolicyParams(
        b_max=b_max,
        b_cap=draw(st.integers(least_cap, b_max)),
        n_th=draw(st.integers(1, 4)),
        t_large=draw(st.none() | st.integers(1, 300)),
        scope=scope,
        max_num_seqs=max_num_seqs,
        decode_guard=guard,
    )
    served = profile(blocks, depth=draw(st.sampled_from([1, 2])), block_size=block_size)
    served = dataclasses.replace(served, prefix_caching=caching)
    return params, requests, served, draw(st.sampled_from([0.0, 0.3]))


def assert_identical(one: SimResult, other: SimResult) -> None:
    for name in ("first_token_s", "last_token_s", "token_time_s", "preemptions", "cached_tokens"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype, name
        assert left.tobytes() == right.tobytes(), name
    assert one.steps == other.steps
    assert one.step_log is not None
    assert other.step_log is not None
    for field in dataclasses.fields(one.step_log):
        left, right = getattr(one.step_log, field.name), getattr(other.step_log, field.name)
        assert left.tobytes() == right.tobytes(), field.name


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_the_kernel_and_its_twin_agree_bit_for_bit_and_keep_the_laws(
    case: tuple[PolicyParams, RequestArrays, Profile, float],
) -> None:
    params, requests, served, sigma = case
    result = simulate(params, requests, served, noise_sigma=sigma, noise_seed=3, record_steps=True)
    assert_identical(
        result, simulate_reference(params, requests, served, noise_sigma=sigma, noise_seed=3, record_steps=True)
    )
    assert_laws(params, requests, served, result)


def assert_laws(params: PolicyParams, requests: RequestArrays, served: Profile, result: SimResult) -> None:
    log = result.step_log
    assert log is not None
    # Every request finishes once, with exactly its tokens, in order, and after it could be seen.
    assert len(result.token_time_s) == requests.output_tokens.sum()
    for index in range(len(requests)):
        times = result.token_time_s[requests.token_start[index] : requests.token_start[index + 1]]
        assert len(times) == requests.output_tokens[index]
        assert np.all(np.diff(times) > 0)
        assert times[0] > requests.arrival_s[index] + served.frontend_delay_s
        scheduled = log.entry_tokens[log.entry_request == index].sum()
        whole = requests.prompt_tokens[index] + requests.output_tokens[index] - 1
        if result.preemptions[index] == 0:
            assert scheduled == whole - result.cached_tokens[index]
        elif not served.prefix_caching:
            assert scheduled >= requests.prompt_tokens[index]
    # Hits are whole blocks, and leave at least the last token to compute.
    assert np.all(result.cached_tokens % served.block_size == 0)
    assert np.all(result.cached_tokens < requests.prompt_tokens)
    assert log.cached_tokens.sum() >= result.cached_tokens.sum()
    if not served.prefix_caching:
        assert log.cached_tokens.sum() == log.evicted_blocks.sum() == 0
    # The clock is monotone, and steps do not overlap.
    assert np.all(log.end_s > log.start_s)
    assert np.all(log.start_s[1:] >= log.end_s[:-1])
    assert np.all(np.diff(log.plan_s) >= 0)
    assert np.all(log.plan_s <= log.start_s)
    # The budget binds what the scope says it binds.
    total = log.prefill_tokens + log.decode_tokens
    assert np.all(total <= params.b_max)
    assert np.all((log.prefill_tokens if params.scope is Scope.PREFILL else total) <= log.budget)
    assert np.all(total > 0)
    assert np.array_equal(np.bincount(log.entry_step, log.entry_tokens, len(log)), total)
    assert np.all(log.num_scheduled <= params.max_num_seqs)
    # KV blocks: never more than there are, and all are back at the end, as the last step holds only what is finishing.
    assert np.all(log.free_kv_blocks >= 0)
    assert result.steps.peak_kv_blocks <= served.num_kv_blocks - 1
    assert result.steps.preemptions == result.preemptions.sum()
    assert sum(result.steps.branch_steps.values()) == result.steps.num_steps == len(log)
    assert result.steps.busy_s == pytest.approx(np.sum(log.end_s - log.start_s))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_a_batch_gives_each_trace_what_it_gets_alone(
    case: tuple[PolicyParams, RequestArrays, Profile, float],
) -> None:
    params, requests, served, sigma = case
    other = RequestArrays(np.zeros(len(requests)), requests.prompt_tokens[::-1], requests.output_tokens[::-1])
    batch = simulate_many(params, RequestBatch.pack([requests, other, requests]), served, noise_sigma=sigma)
    for place, trace in enumerate((requests, other, requests)):
        alone = simulate(params, trace, served, noise_sigma=sigma)
        assert batch.first_token_s[batch.trace(place)].tobytes() == alone.first_token_s.tobytes()
        assert batch.last_token_s[batch.trace(place)].tobytes() == alone.last_token_s.tobytes()
        assert batch.preemptions[batch.trace(place)].tobytes() == alone.preemptions.tobytes()
        assert batch.cached_tokens[batch.trace(place)].tobytes() == alone.cached_tokens.tobytes()
        assert batch.branch_steps[place].tolist() == list(alone.steps.branch_steps.values())
        assert batch.busy_s[place] == alone.steps.busy_s


BURST = RequestArrays(np.repeat([0.0, 0.5], 6), np.tile([3000, 40, 900], 4), np.tile([40, 90], 6))
GROWING = RequestArrays(np.zeros(6), np.full(6, 200), np.full(6, 200))
GROWING_TIGHT_BLOCKS = 60  # of 16 tokens: holds the prompts of four, but only two once they have grown


def test_a_tight_pool_preempts_and_a_roomy_one_does_not() -> None:
    params = PolicyParams.static(512)
    assert simulate(params, GROWING, profile(GROWING_TIGHT_BLOCKS)).steps.preemptions > 0
    assert simulate(params, GROWING, profile(4000)).steps.preemptions == 0


@pytest.mark.parametrize("scope", Scope)
def test_every_branch_is_reached_under_load(scope: Scope) -> None:
    plus = PolicyParams(2048, 256, n_th=3, t_large=500, scope=scope, max_num_seqs=64)
    steps = simulate(plus, BURST, profile()).steps
    assert all(steps.branch_steps.values())
    assert sum(steps.branch_steps.values()) == steps.num_steps


def test_a_policy_whose_cap_is_its_budget_gives_the_stock_schedule() -> None:
    stock = simulate(PolicyParams.static(1024), GROWING, profile(GROWING_TIGHT_BLOCKS))
    for scope in Scope:
        params = PolicyParams(1024, 1024, n_th=1, t_large=1, scope=scope)
        same = simulate(params, GROWING, profile(GROWING_TIGHT_BLOCKS))
        assert same.token_time_s.tobytes() == stock.token_time_s.tobytes()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones() -> None:
    params = PolicyParams(2048, 256)

    def times(seed: int) -> bytes:
        return simulate(params, BURST, profile(), noise_sigma=0.1, noise_seed=seed).token_time_s.tobytes()

    assert times(1) == times(1)
    assert times(1) != times(2)
    assert times(1) != simulate(params, BURST, profile()).token_time_s.tobytes()


def test_under_the_prefill_scope_a_prefill_without_budget_is_passed_over_and_those_behind_it_decode() -> None:
    # b_max admits request 0 whole, 1 whole and 30 tokens of 2; then pressure caps the prefills at 100 tokens.
    requests = RequestArrays(np.zeros(4), np.array([900, 20, 900, 20]), np.array([4, 30, 4, 30]))
    params = PolicyParams(950, 100, n_th=1, scope=Scope.PREFILL, max_num_seqs=8)
    log = simulate(params, requests, profile(depth=1), record_steps=True).step_log
    assert log is not None
    assert log.scheduled(0) == {0: 900, 1: 20, 2: 30}
    assert log.scheduled(1) == {0: 1, 1: 1, 2: 100}
    # Two running prefills, the first of which takes the whole prefill budget; a decode stands behind the second.
    behind = RequestArrays(np.zeros(3), np.array([900, 900, 20]), np.array([4, 4, 30]))
    tight = PolicyParams(600, 600, scope=Scope.PREFILL, max_num_seqs=8)
    stock = simulate(tight, behind, profile(depth=1), record_steps=True).step_log
    assert stock is not None
    assert stock.scheduled(1) == {0: 300, 1: 300}


def test_async_scheduling_sees_an_arrival_one_step_later() -> None:
    # Request 1 becomes visible while the first step runs, after the second step has been planned.
    requests = RequestArrays(np.array([0.0, 0.001]), np.array([300, 50]), np.array([5, 5]))
    params = PolicyParams.static(400)
    first_seen = []
    for depth in (1, 2):
        log = simulate(params, requests, profile(depth=depth, delay_s=0.0), record_steps=True).step_log
        assert log is not None
        first_seen.append(int(log.entry_step[log.entry_request == 1][0]))
    assert first_seen == [1, 2]


def test_a_step_log_larger_than_the_first_guess_is_kept_whole() -> None:
    requests = RequestArrays(np.zeros(1), np.array([5000]), np.array([1]))
    log = simulate(PolicyParams.static(1, max_num_seqs=1), requests, profile(), record_steps=True).step_log
    assert log is not None
    assert len(log) == 5000
    assert log.prefill_tokens.sum() == 5000


def test_a_hand_computed_trace_comes_out_as_computed() -> None:
    # 100 prompt tokens in chunks of 60 and 40, then one decode, without delay and overlap.
    requests = RequestArrays(np.array([1.0]), np.array([100]), np.array([2]))
    result = simulate(
        PolicyParams.static(60, max_num_seqs=4), requests, profile(depth=1, delay_s=0.0), record_steps=True
    )
    first = COST.seconds(60, 60 * 61 // 2, 0, 0)
    second = COST.seconds(40, 40 * 60 + 40 * 41 // 2, 0, 0)
    third = COST.seconds(0, 0, 1, 101)
    assert result.token_time_s.tolist() == pytest.approx([1 + first + second, 1 + first + second + third])
    assert result.steps.branch_steps[Branch.MAX] == 3
    assert result.step_log is not None
    assert result.step_log.free_kv_blocks.tolist() == [3999 - 4, 3999 - 7, 3999 - 7]


def test_a_request_preempted_while_its_last_token_is_in_flight_finishes_without_being_computed_again() -> None:
    requests = RequestArrays(np.zeros(2), np.array([40, 10]), np.array([16, 5]))
    tight = profile(16, block_size=4, delay_s=0.0)
    result = simulate(PolicyParams.static(64, max_num_seqs=8), requests, tight, record_steps=True)
    assert result.preemptions.tolist() == [0, 1]
    assert result.step_log is not None
    assert result.step_log.entry_tokens[result.step_log.entry_request == 1].sum() == 10 + 5 - 1
    assert result.last_token_s[1] < result.last_token_s[0]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_kv_blocks_are_conserved_at_every_step(
    case: tuple[PolicyParams, RequestArrays, Profile, float],
) -> None:
    params, requests, served, _ = case
    scheduler = Scheduler(params, served, requests.prefixes)
    for index in range(len(requests)):
        request = Request(index, 0.0, int(requests.prompt_tokens[index]), int(requests.output_tokens[index]))
        scheduler.waiting.append(request)
    while scheduler.running or scheduler.waiting:
        step = scheduler.plan(0.0)
        for request in scheduler.running:
            assert request.num_blocks == -(-request.num_computed_tokens // served.block_size)
        assert all(request.num_blocks == request.num_computed_tokens == 0 for request in scheduler.waiting)
        held = sum(request.num_blocks for request in scheduler.running)
        if scheduler.cache is None:
            assert scheduler.num_free_blocks + held == served.num_kv_blocks - 1
        else:  # blocks may be shared
            assert served.num_kv_blocks - 1 - held <= scheduler.num_free_blocks <= served.num_kv_blocks - 1
            assert scheduler.num_free_blocks == scheduler.cache.num_free
        scheduler.deliver(step)
    assert scheduler.num_free_blocks == served.num_kv_blocks - 1


def test_the_kernel_compiles_within_fifteen_seconds_and_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    code = (
        "import time; start_s = time.process_time()\n"  # a busy machine is no fault of the kernel
        "import numpy as np\n"
        "from ppas_core.sim.simulate import RequestArrays, simulate\n"
        "from ppas_core.sim.profile import load_profile\n"
        "from ppas_core.policy import PolicyParams\n"
        "one = RequestArrays(np.zeros(1), np.ones(1, int), np.ones(1, int))\n"
        "simulate(PolicyParams.static(512), one, load_profile('rtx5090-qwen2.5-3b'))\n"
        "from ppas_core.sim import kernel\n"
        "stats = kernel.replay_batch.stats\n"
        "print(time.process_time() - start_s, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}

    def first_use() -> tuple[float, int, int]:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=root, env=environment, check=True, capture_output=True, text=True
        )
        seconds, hits, misses = done.stdout.split()
        return float(seconds), int(hits), int(misses)

    seconds, hits, misses = first_use()
    assert (hits, misses) == (0, 1)
    assert seconds < 15
    assert first_use()[1:] == (1, 0)
