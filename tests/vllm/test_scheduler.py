"""The scheduler subclass on the real schedulers: off is stock, the prefill scope is the paper's, counting is cheap."""

import dataclasses
import pickle
import random
import timeit
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

real = pytest.importorskip("real_scheduler")

from ppas_core.errors import InvalidSettings  # noqa: E402
from ppas_core.policy import Branch, PolicyParams, QueueState, Scope, decide  # noqa: E402
from ppas_core.sim.profile import DEFAULT_PROFILE, Profile, load_profile  # noqa: E402
from ppas_core.sim.requests import RequestArrays  # noqa: E402
from ppas_core.vllm import compat, queues  # noqa: E402
from ppas_core.vllm import scheduler as scheduler_module  # noqa: E402

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["Scheduler", "AsyncScheduler"])


@DEPTHS
def test_switched_off_it_schedules_byte_for_byte_as_stock_vllm(depth: int) -> None:
    for number in range(8):
        trace, profile = random_trace(random.Random(f"off {depth} {number}"), depth)
        outputs = []
        for stock in (True, False):
            scheduler = real.build_scheduler(
                None,
                asynchronous=depth == 2,
                num_kv_blocks=profile.num_kv_blocks,
                stock=stock,
                max_num_seqs=8,
                max_num_batched_tokens=256,
            )
            steps: list[bytes] = []
            real.replay(
                scheduler, trace, profile, after_schedule=lambda _, out, steps=steps: steps.append(as_bytes(out))
            )
            outputs.append(steps)
        assert outputs[0] == outputs[1]
        assert len(outputs[0]) > 10


@DEPTHS
@pytest.mark.parametrize("threshold", [0, 40], ids=["in order", "overtaking"])
def test_the_prefill_scope_gives_each_request_what_the_definition_says(depth: int, threshold: int) -> None:
    """With room for every KV block, so that the definition alone decides. Overtaking puts decodes behind prefills."""
    capped = behind = 0
    for number in range(30):
        r = random.Random(f"scope {depth} {threshold} {number}")
        trace, profile = random_trace(r, depth, blocks=20_000)
        b_max = r.choice([64, 128, 512])
        params = PolicyParams(
            b_max=b_max, b_cap=r.randint(1, b_max), n_th=r.randint(1, 3), max_num_seqs=r.choice([3, 8])
        )
        scheduler = real.build_scheduler(
            params, asynchronous=depth == 2, num_kv_blocks=20_000, long_prefill_token_threshold=threshold
        )
        expected: list[list[tuple[int, int]]] = []

        def before(scheduler: Any, expected: Any = expected, params: Any = params) -> None:
            expected.append(by_definition(scheduler, params, threshold))

        def after(scheduler: Any, output: Any, expected: Any = expected) -> None:
            nonlocal capped, behind
            assert [(int(i), n) for i, n in output.num_scheduled_tokens.items()] == expected[-1]
            assert all(request.num_output_placeholders >= 0 for request in scheduler.requests.values())
            capped += scheduler.ppas_decision.branch is not Branch.MAX

        def count_behind(scheduler: Any) -> None:
            nonlocal behind
            behind += queues.read_queues(scheduler.running, [], waiting_may_hold_tokens=False).decode_behind_prefill

        def both(scheduler: Any, before: Any = before) -> None:
            before(scheduler)
            count_behind(scheduler)

        real.replay(scheduler, trace, profile, before_schedule=both, after_schedule=after)
    assert capped > 100
    assert (behind > 50) == (threshold > 0)


@DEPTHS
@pytest.mark.parametrize("threshold", [0, 40], ids=["in order", "overtaking"])
def test_following_requests_reads_the_same_as_looking_at_each(depth: int, threshold: int) -> None:
    """Through preemption, recomputing, requests at the model's length, and steps in which the policy was off."""
    preemptions = differing = rebuilt = 0
    for number in range(20):
        r = random.Random(f"tracker {depth} {threshold} {number}")
        trace, profile = random_trace(r, depth)
        params = PolicyParams(b_max=128, b_cap=r.randint(1, 60), n_th=1, max_num_seqs=8)
        scheduler = real.build_scheduler(
            params,
            asynchronous=depth == 2,
            num_kv_blocks=profile.num_kv_blocks,
            long_prefill_token_threshold=threshold,
        )
        read, count = scheduler._tracker.read, scheduler._tracker.count_decode_tokens
        if number % 4 == 0:
            scheduler._tracker._max_position = scheduler._max_position = int(max(trace.prompt_tokens)) + 10

        def checked_read(running: Any, waiting: Any, read: Any = read) -> Any:
            reading = read(running, waiting)
            assert reading == queues.read_queues(running, waiting, waiting_may_hold_tokens=False)
            return reading

        def checked_count(*arguments: Any, count: Any = count, scheduler: Any = scheduler) -> int:
            nonlocal differing
            found = count(*arguments)
            exact = queues.count_decode_tokens(
                scheduler.running,
                arguments[1],
                max_position=scheduler._max_position,
                long_prefill_token_threshold=threshold,
                decode_step=scheduler.current_step + 1,
            )
            assert found == exact
            differing += exact != arguments[1]
            return int(found)

        scheduler._tracker.read, scheduler._tracker.count_decode_tokens = checked_read, checked_count

        def now_and_then_off(scheduler: Any, params: Any = params) -> None:
            nonlocal rebuilt
            off = scheduler.ppas_step % 11 in (5, 6, 7)
            rebuilt += off
            scheduler._control.params = None if off else params

        replayed = real.replay(scheduler, trace, profile, before_schedule=now_and_then_off)
        preemptions += sum(step.preemptions for step in replayed.steps)
    assert preemptions > 5
    assert differing > 5
    assert rebuilt > 50


@DEPTHS
@pytest.mark.parametrize("threshold", [0, 40], ids=["in order", "overtaking"])
def test_under_kv_pressure_the_prefill_scope_never_exceeds_its_bounds(depth: int, threshold: int) -> None:
    preemptions = 0
    for number in range(20):
        r = random.Random(f"tight {depth} {threshold} {number}")
        trace, profile = random_trace(r, depth)
        params = PolicyParams(b_max=128, b_cap=r.randint(1, 60), n_th=1, max_num_seqs=8)
        scheduler = real.build_scheduler(
            params,
            asynchronous=depth == 2,
            num_kv_blocks=profile.num_kv_blocks,
            long_prefill_token_threshold=threshold,
        )

        def check(scheduler: Any, output: Any, params: PolicyParams = params) -> None:
            assert output.total_num_scheduled_tokens <= params.b_max
            assert all(request.num_output_placeholders >= 0 for request in scheduler.requests.values())

        replayed = real.replay(scheduler, trace, profile, after_schedule=check)
        for step in replayed.steps:
            assert step.prefill_tokens <= step.decision.budget
        for index, output in enumerate(trace.output_tokens):
            assert len(replayed.token_time_s[index]) == output
        preemptions += sum(step.preemptions for step in replayed.steps)
    assert preemptions > 5


def test_the_name_for_scheduler_cls_becomes_the_class_over_the_one_that_stock_would_take() -> None:
    for asynchronous, expected in ((True, real.AsyncPpasScheduler), (False, real.SyncPpasScheduler)):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=asynchronous))
        assert scheduler_module.class_for(config) is expected
        assert issubclass(expected, real.AsyncScheduler) is asynchronous


@pytest.mark.parametrize(
    ("ppas", "message"),
    [
        ({"b_max": 512, "b_cap": 64}, "b_max is 512; this server was started with 256"),
        ({"b_max": 256, "b_cap": 64, "max_num_seqs": 16}, "max_num_seqs is 16"),
        ({"b_max": 256, "b_cap": 4, "scope": "global"}, "b_cap is 4 under the global scope"),
        ({"b_max": 256, "b_cap": 64, "bcap": 1}, "unknown setting 'bcap'"),
        ([1], "the settings are"),
    ],
)
def test_a_server_does_not_start_with_settings_that_cannot_act_in_it(ppas: Any, message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        real.build_scheduler(
            None,
            asynchronous=False,
            num_kv_blocks=100,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            additional_config={"ppas": ppas},
        )


def test_a_scheduler_of_unknown_shape_is_refused_with_what_was_looked_for() -> None:
    class Strange:
        def schedule(self) -> None:
            """Nothing of vLLM's."""

        update_from_output = _make_cached_request_data = shutdown = schedule

    with pytest.raises(compat.UnknownVllm, match=r"schedule\(\) has no line with `token_budget = self.max_num"):
        compat.require_known_shape(Strange, real.Request, "9.9.9")
    compat.require_known_shape(real.Scheduler, real.Request, "0.27.1")


def test_queues_of_requests_with_tokens_are_counted_by_the_definition() -> None:
    def request(computed: int, prompt: int) -> Any:
        return SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt)

    running = [request(12, 10), request(4, 10), request(10, 10)]
    waiting = [request(0, 5), request(5, 5)]
    reading = queues.read_queues(running, [waiting, []], waiting_may_hold_tokens=True)
    assert reading.state == QueueState(1, 2, 1, 6)
    assert reading.decode_behind_prefill
    reading = queues.read_queues(running[:2], [waiting[:1], waiting[:1]], waiting_may_hold_tokens=False)
    assert reading.state == QueueState(1, 1, 2, 6)
    assert not reading.decode_behind_prefill


def test_counting_256_running_requests_takes_at_most_20_microseconds() -> None:
    params = PolicyParams(b_max=4096, b_cap=512, max_num_seqs=256)
    scheduler = real.build_scheduler(params, asynchronous=False, num_kv_blocks=20_000)
    for index in range(256):
        scheduler.add_request(real.make_request(index, 16, 64))
    output = scheduler.schedule()
    scheduler.update_from_output(output, real.model_output(output, dict.fromkeys(output.num_scheduled_tokens, True)))
    assert len(scheduler.running) == 256
    waiting = compat.waiting_queues(scheduler)
    best_s = min(
        timeit.repeat(
            lambda: queues.read_queues(scheduler.running, waiting, waiting_may_hold_tokens=False), number=200, repeat=20
        )
    )
    assert best_s / 200 < 20e-6


def random_trace(r: random.Random, depth: int, *, blocks: int | None = None) -> tuple[RequestArrays, Profile]:
    size = r.randint(6, 14)
    arrival_s = np.cumsum([r.expovariate(1 / 0.05) for _ in range(size)])
    prompts = np.array([r.choice([r.randint(1, 60), r.randint(100, 600)]) for _ in range(size)])
    outputs = np.array([r.randint(1, 60) for _ in range(size)])
    needed = int(np.max(-(-(prompts + outputs) // 16))) + 2
    profile = dataclasses.replace(
        load_profile(DEFAULT_PROFILE),
        num_kv_blocks=blocks or r.choice([needed, needed + 2, needed + 10]),
        max_model_len=real.MAX_MODEL_LEN,
        pipeline_depth=depth,
    )
    return RequestArrays(arrival_s, prompts, outputs), profile


def by_definition(scheduler: Any, params: PolicyParams, threshold: int) -> list[tuple[int, int]]:
    """(request, tokens) that the paper's Algorithm 1 gives this step, with KV blocks without end."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    prefills = [r for r in running if r.num_computed_tokens < r.num_prompt_tokens]
    remaining = sum(r.num_prompt_tokens - r.num_computed_tokens for r in prefills)
    budget = decide(QueueState(len(prefills), len(running) - len(prefills), len(waiting), remaining), params).budget
    step_left, prefill_left = params.b_max, budget
    scheduled: list[tuple[int, int]] = []
    for request in running:
        is_prefill = request.num_computed_tokens < request.num_prompt_tokens
        in_flight = request.num_output_placeholders
        generated = request.num_computed_tokens - request.num_prompt_tokens + 1
        if in_flight and generated - in_flight + 1 >= request.max_tokens:
            continue  # its last token is being computed
        tokens = min(request.num_tokens + in_flight - request.num_computed_tokens, step_left)
        if threshold:
            tokens = min(tokens, threshold)
        if is_prefill:
            tokens = min(tokens, prefill_left)
        if tokens > 0:
            scheduled.append((int(request.request_id), tokens))
            step_left -= tokens
            prefill_left -= tokens * is_prefill
    free_slots = scheduler.max_num_running_reqs - len(running)
    for request in waiting[:free_slots]:
        tokens = min(request.num_tokens, step_left, prefill_left)
        if threshold:
            tokens = min(tokens, threshold)
        if tokens <= 0:
            break
        scheduled.append((int(request.request_id), tokens))
        step_left -= tokens
        prefill_left -= tokens
    return scheduled


def as_bytes(output: Any) -> bytes:
    return pickle.dumps({name: repr(value) for name, value in sorted(vars(output).items())})


def test_scopes_are_named_in_what_the_server_reports() -> None:
    params = PolicyParams(b_max=256, b_cap=64, max_num_seqs=8)
    scheduler = real.build_scheduler(params, asynchronous=True, num_kv_blocks=100)
    assert scheduler.ppas_state()["in_force"]["ppas"]["scope"] == Scope.PREFILL
