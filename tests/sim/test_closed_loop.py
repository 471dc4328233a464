"""Sessions in the simulator equal a loop in which answers bring the next turn, step by step and to the last bit."""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from ppas_core.sim.closed_loop import Turns, simulate_sessions
from ppas_core.sim.cost import StepCost
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import Profile
from ppas_core.sim.reference import Request, Scheduler
from ppas_core.sim.simulate import RequestArrays, noise_factors, simulate

COST = StepCost(
    step_s=0.003, prefill_token_s=1.7e-5, prefill_pair_s=3e-8, decode_token_s=1.3e-4, decode_context_token_s=2.1e-7,
    prefill_step_s=0.0011, mixed_step_s=0.0007,
)  # fmt: skip
PROFILE = Profile("p", "m", "g", "0", COST, 0.01, 60, 16, 100_000, 2)
PARAMS = PolicyParams(b_max=128, b_cap=32, n_th=2, max_num_seqs=6)

Case = tuple[RequestArrays, Turns, Profile, float]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    who = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    think_s = draw(st.lists(st.sampled_from([0.0, 0.004, 0.1, 2.0]), min_size=count, max_size=count))
    last: dict[int, int] = {}
    before = []
    for place, session in enumerate(who):
        before.append(last.get(session, -1) if session else -1)  # session 0: of nobody
        last[session] = place
    blocks = [tuple((who[place], number) for number in range(-(-prompt // 40))) for place, prompt in enumerate(prompts)]
    requests = RequestArrays(
        np.cumsum(gaps), np.array(prompts), np.array(outputs), prefixes=SharedPrefixes.of(40, blocks)
    )
    profile = replace(
        PROFILE,
        pipeline_depth=draw(st.integers(1, 2)),
        prefix_caching=draw(st.booleans()),
        frontend_delay_s=draw(st.sampled_from([0.0, 0.01])),
        num_kv_blocks=draw(st.sampled_from([22, 60, 1000])),
    )
    return requests, Turns(np.array(before), np.array(think_s)), profile, draw(st.sampled_from([0.0, 0.2]))


def directly(requests: RequestArrays, turns: Turns, profile: Profile, sigma: float) -> tuple[list[list[float]], ...]:
    """The twin's step loop with one difference: an answer that ends brings the turn that waits for it."""
    noise = noise_factors(sigma, 7).tolist()
    scheduler = Scheduler(PARAMS, profile, requests.prefixes)
    arrivals = requests.arrival_s.tolist()
    coming = [(arrivals[place], place) for place in range(len(requests)) if turns.before[place] < 0]
    heapq.heapify(coming)
    everyone: dict[int, Request] = {}
    in_flight: deque = deque()  # type: ignore[type-arg]
    now_s = gpu_free_s = 0.0
    steps = finished = 0
    while finished < len(requests):
        while coming and coming[0][0] + profile.frontend_delay_s <= now_s:
            arrival_s, place = heapq.heappop(coming)
            everyone[place] = Request(
                place, arrival_s, int(requests.prompt_tokens[place]), int(requests.output_tokens[place])
            )
            scheduler.waiting.append(everyone[place])
        if scheduler.running or scheduler.waiting:
            step = scheduler.plan(now_s)
            if step.entries:
                duration_s = profile.cost.seconds(
                    step.prefill_tokens, step.prefill_pairs, step.decode_tokens, step.decode_context_tokens
                )
                step.start_s = max(now_s, gpu_free_s)
                step.end_s = gpu_free_s = step.start_s + duration_s * noise[steps % len(noise)]
                steps += 1
                in_flight.append(step)
                if len(in_flight) < profile.pipeline_depth:
                    continue
            elif not in_flight:
                continue
        elif not in_flight:
            now_s = coming[0][0] + profile.frontend_delay_s
            continue
        oldest = in_flight.popleft()
        now_s = oldest.end_s
        for request in scheduler.deliver(oldest):
            finished += 1
            for place in np.flatnonzero(turns.before == request.index).tolist():
                arrivals[place] = now_s + turns.think_s[place]
                heapq.heappush(coming, (arrivals[place], place))
    return [everyone[place].token_time_s for place in range(len(requests))], [arrivals]


@settings(max_examples=120)
@given(cases())
def test_it_equals_a_loop_in_which_an_answer_brings_the_next_turn(case: Case) -> None:
    requests, turns, profile, sigma = case
    token_times, (arrivals,) = directly(requests, turns, profile, sigma)
    result, arrival_s = simulate_sessions(
        PARAMS, requests, turns, profile, noise_sigma=sigma, noise_seed=7, record_steps=True
    )
    assert arrival_s.tolist() == arrivals
    assert result.token_time_s.tolist() == [time_s for times in token_times for time_s in times]
    assert result.first_token_s.tolist() == [times[0] for times in token_times]
    assert result.last_token_s.tolist() == [times[-1] for times in token_times]
    log = result.step_log
    assert log is not None
    computed = np.bincount(log.entry_request, weights=log.entry_tokens, minlength=len(requests))
    least = requests.prompt_tokens + requests.output_tokens - 1 - result.cached_tokens
    assert (computed >= least).all()
    assert (computed[result.preemptions == 0] == least[result.preemptions == 0]).all()


def test_requests_that_wait_for_nobody_are_replayed_as_ever() -> None:
    requests = RequestArrays(np.arange(20) * 0.05, np.full(20, 100), np.full(20, 8))
    turns = Turns(np.full(20, -1), np.zeros(20))
    found, arrival_s = simulate_sessions(PARAMS, requests, turns, PROFILE)
    assert found.token_time_s.tolist() == simulate(PARAMS, requests, PROFILE).token_time_s.tolist()
    assert arrival_s.tolist() == requests.arrival_s.tolist()


def test_three_hundred_turns_under_heavy_load_settle_soon() -> None:
    rng = np.random.default_rng(0)
    before = np.array([place - 50 if place >= 50 else -1 for place in range(300)])
    requests = RequestArrays(np.sort(rng.uniform(0, 20, 300)), rng.integers(10, 400, 300), rng.integers(1, 60, 300))
    turns = Turns(before, rng.exponential(0.2, 300))
    simulate_sessions(PARAMS, requests, turns, PROFILE)  # compiles
    started = time.process_time()
    result, arrival_s = simulate_sessions(PARAMS, requests, turns, PROFILE, noise_sigma=0.1)
    assert time.process_time() - started < 3  # 0.1 s on an idle machine
    assert arrival_s[50:].tolist() == (result.last_token_s[before[50:]] + turns.think_s[50:]).tolist()
    assert result.steps.busy_s / (result.last_token_s.max() - arrival_s.min()) > 0.9


@pytest.mark.parametrize(
    ("before", "think_s", "words"),
    [
        ([-1, 1], [0.0, 0.0], "request 1 waits for request 1; allowed: one before it"),
        ([-2, 0], [0.0, 0.0], "request 0 waits for request -2"),
        ([-1, 0], [0.0, -1.0], "think_s of request 1 is -1.0"),
        ([-1, 0], [0.0, float("inf")], "think_s of request 1 is inf"),
        ([-1, 0], [0.0], "2 turns, but 1 think times"),
    ],
)
def test_turns_that_cannot_be_are_refused(before: list[int], think_s: list[float], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Turns(np.array(before), np.array(think_s))
