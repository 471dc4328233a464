"""The step loop of vLLM's V1 scheduler in plain Python: what `kernel` computes, written to be read.

Every rule here is one of vLLM 0.27.1 (`vllm/v1/core/sched/scheduler.py`, `async_scheduler.py`,
`vllm/v1/core/kv_cache_manager.py`, and the batch queue of `vllm/v1/engine/core.py`), for a server without speculative
decoding, LoRA or KV transfer, first come first served. The scheduler's own work takes no time. Without a prefix cache
blocks are only counted; with one, `blocks` knows each.

A request is in one of four places: not yet arrived, waiting, running, finished. Names are vLLM's: a request's
`num_computed_tokens` counts what has been scheduled, in flight or done, and `num_output_placeholders` the tokens that
a step in flight will sample for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ppas_core.policy import Branch, Decision, PolicyParams, QueueState, Scope, decide
from ppas_core.sim.blocks import PrefixCache
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import Profile
from ppas_core.sim.requests import RequestArrays
from ppas_core.sim.result import BRANCHES, SimResult, StepLog, StepSummary
from ppas_core.sim.simulate import noise_factors


@dataclass(slots=True, eq=False)
class Request:
    """A request and what has become of it."""

    index: int
    visible_s: float  # when the scheduler can see it
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    cached_tokens: int = 0
    token_time_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what has been generated."""
        return self.num_prompt_tokens + len(self.token_time_s)

    @property
    def is_prefill(self) -> bool:
        """The policy's definition. A preempted request that recomputes is a prefill until its prompt is done."""
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether all its tokens are out."""
        return len(self.token_time_s) == self.max_tokens

    @property
    def has_last_token_in_flight(self) -> bool:
        """Whether a step in flight brings its last token, so that no further step may be planned for it."""
        return (
            self.num_output_placeholders > 0
            and self.num_computed_tokens + 2 - self.num_output_placeholders >= self.num_prompt_tokens + self.max_tokens
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one step does for one request. `epoch` tells whether the request was preempted after being scheduled."""

    request: Request
    epoch: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class _Step:
    """One plan, and later the step that runs it; fields as in `StepLog`."""

    plan_s: float
    state: QueueState
    decision: Decision
    start_s: float = 0.0
    end_s: float = 0.0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    decode_tokens: int = 0
    decode_context_tokens: int = 0
    free_kv_blocks: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    evicted_blocks: int = 0
    entries: list[_Entry] = field(default_factory=list)


class Scheduler:
    """The queues and the KV pool. `plan` decides a step, `deliver` takes its results in."""

    def __init__(self, params: PolicyParams, profile: Profile, prefixes: SharedPrefixes | None = None) -> None:
        self.params = params
        self.block_size = profile.block_size
        self.max_model_len = profile.max_model_len
        # vLLM keeps one block back as the null block.
        self.num_usable_blocks = profile.num_kv_blocks - 1
        self.num_free_blocks = self.num_usable_blocks
        self.cache = PrefixCache(self.num_usable_blocks, self.block_size, prefixes) if profile.prefix_caching else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def state(self) -> QueueState:
        """What the policy sees. All that wait are prefills: nothing of them is computed."""
        prefills = [request for request in self.running if request.is_prefill]
        remaining = sum(request.num_prompt_tokens - request.num_computed_tokens for request in prefills)
        return QueueState(len(prefills), len(self.running) - len(prefills), len(self.waiting), remaining)

    def plan(self, now_s: float) -> _Step:
        """Decide the next step: the budget, then running requests in list order, then waiting ones."""
        state = self.state()
        step = _Step(now_s, state, decide(state, self.params))
        budget = step.decision.budget
        if self.params.scope is Scope.PREFILL:
            step_left, prefill_left = self.params.b_max, budget
        else:
            step_left, prefill_left = budget, budget
        preemptions_before = self.num_preemptions

        index = 0
        while index < len(self.running) and step_left > 0:
            request = self.running[index]
            index += 1
            if request.has_last_token_in_flight:
                continue
            is_prefill = request.is_prefill
            num_new_tokens = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            num_new_tokens = min(num_new_tokens, step_left)
            if is_prefill:
                num_new_tokens = min(num_new_tokens, prefill_left)
            num_new_tokens = min(num_new_tokens, self.max_model_len - request.num_computed_tokens - 1)
            if num_new_tokens <= 0:
                continue  # a prefill without budget is passed over; those behind it may still decode
            if not self._make_room(request, num_new_tokens):
                break
            self._schedule(step, request, num_new_tokens)
            step_left -= num_new_tokens
            if is_prefill:
                prefill_left -= num_new_tokens

        # A step that preempted admits nobody.
        if self.num_preemptions == preemptions_before:
            while self.waiting and min(step_left, prefill_left) > 0 and len(self.running) < self.params.max_num_seqs:
                request = self.waiting[0]
                if not self._admit(step, request):
                    break
                self.running.append(self.waiting.popleft())
                num_new_tokens = min(request.num_tokens - request.num_computed_tokens, step_left, prefill_left)
                self._schedule(step, request, num_new_tokens)
                step_left -= num_new_tokens
                prefill_left -= num_new_tokens

        step.free_kv_blocks = self.num_free_blocks
        return step

    def deliver(self, step: _Step) -> list[Request]:
        """Take in what `step` sampled; those that are finished leave and are returned.

        A request preempted while the step ran keeps the token, and may even be finished by it while it waits.
        """
        finished = []
        for entry in step.entries:
            if not entry.samples:
                continue
            request = entry.request
            request.token_time_s.append(step.end_s)
            if entry.epoch == request.num_preemptions:
                request.num_output_placeholders -= 1
                if self.cache is not None:
                    self.cache.keep(request, request.num_computed_tokens - request.num_output_placeholders)
            if request.is_finished:
                finished.append(request)
                self._free(request)
        self.running = [request for request in self.running if not request.is_finished]
        self.waiting = deque(request for request in self.waiting if not request.is_finished)
        return finished

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _admit(self, step: _Step, request: Request) -> bool:
        """Give `request` what the cache holds of it; False when it does not fit.

        scheduler_reserve_full_isl: all of it must fit now, although only a chunk is taken.
        """
        if self.cache is None:
            return self._blocks_for(request.num_tokens) <= self.num_free_blocks
        hits = self.cache.find_hits(request, request.num_tokens)
        if self.cache.num_needed(hits, request.num_tokens) > self.num_free_blocks:
            return False
        self.cache.admit(request, hits)
        self.num_free_blocks = self.cache.num_free
        request.num_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size
        step.cached_tokens += request.num_computed_tokens
        if request.num_preemptions == 0:
            request.cached_tokens = request.num_computed_tokens
        return True

    def _free(self, request: Request) -> None:
        """Take back the blocks of a request that leaves the running list; one preempted before has none."""
        if self.cache is None:
            self.num_free_blocks += request.num_blocks
        elif request.num_blocks > 0:
            self.cache.release(request)
            self.num_free_blocks = self.cache.num_free
        request.num_blocks = 0

    def _make_room(self, request: Request, num_new_tokens: int) -> bool:
        """Preempt from the tail of the running list until `request` gets its blocks; False when it fell itself."""
        needed = self._blocks_for(request.num_computed_tokens + num_new_tokens) - request.num_blocks
        while needed > self.num_free_blocks:
            victim = self.running.pop()
            self._free(victim)
            victim.num_computed_tokens = 0
            victim.num_output_placeholders = 0
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _schedule(self, step: _Step, request: Request, num_new_tokens: int) -> None:
        context = request.num_computed_tokens
        new_blocks = self._blocks_for(context + num_new_tokens) - request.num_blocks
        request.num_blocks += new_blocks
        self.num_free_blocks -= new_blocks
        if self.cache is not None:
            self.cache.allocate(request, new_blocks)
            # Tokens that a step in flight will sample are not known yet.
            self.cache.keep(request, min(context + num_new_tokens, request.num_tokens))
        if request.is_prefill:
            step.prefill_tokens += num_new_tokens
            step.prefill_pairs += num_new_tokens * context + num_new_tokens * (num_new_tokens + 1) // 2
        else:
            step.decode_tokens += num_new_tokens
            step.decode_context_tokens += context + num_new_tokens
        request.num_computed_tokens += num_new_tokens
        samples = request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders
        if samples:
            request.num_output_placeholders += 1
        step.entries.append(_Entry(request, request.num_preemptions, num_new_tokens, samples))


def simulate_reference(
    params: PolicyParams,
    requests: RequestArrays,
    profile: Profile,
    *,
    noise_sigma: float = 0.0,
    noise_seed: int = 0,
    record_steps: bool = False,
) -> SimResult:
    """The same as `simulate.simulate`, bit for bit, some hundred times slower."""
    requests.require_fit(profile)
    noise = noise_factors(noise_sigma, noise_seed).tolist()
    columns = zip(
        requests.arrival_s.tolist(), requests.prompt_tokens.tolist(), requests.output_tokens.tolist(), strict=True
    )
    everyone = [
        Request(index, arrival_s + profile.frontend_delay_s, prompt, output)
        for index, (arrival_s, prompt, output) in enumerate(columns)
    ]
    arriving = deque(everyone)
    scheduler = Scheduler(params, profile, requests.prefixes)
    in_flight: deque[_Step] = deque()
    steps: list[_Step] = []
    now_s = gpu_free_s = busy_s = 0.0
    num_finished = peak_kv_blocks = peak_waiting = peak_running = preemptions_logged = evicted_logged = 0
    patience = 2 * requests.longest_tokens + 8  # a step always serves the head of the running list
    plans_since_token = 0

    while num_finished < len(everyone):
        while arriving and arriving[0].visible_s <= now_s:
            scheduler.waiting.append(arriving.popleft())
        if scheduler.running or scheduler.waiting:
            plans_since_token += 1
            if plans_since_token > patience:
                raise AssertionError(f"the step loop stopped advancing under {params!r} on {profile.name}: a bug")
            step = scheduler.plan(now_s)
            peak_waiting = max(peak_waiting, step.state.waiting_prefills)
            peak_running = max(peak_running, len(scheduler.running))
            peak_kv_blocks = max(peak_kv_blocks, scheduler.num_usable_blocks - scheduler.num_free_blocks)
            if step.entries:
                duration_s = profile.cost.seconds(
                    step.prefill_tokens, step.prefill_pairs, step.decode_tokens, step.decode_context_tokens
                )
                duration_s *= noise[len(steps) % len(noise)]
                busy_s += duration_s
                step.start_s = max(now_s, gpu_free_s)
                step.end_s = gpu_free_s = step.start_s + duration_s
                step.preemptions = scheduler.num_preemptions - preemptions_logged
                preemptions_logged = scheduler.num_preemptions
                if scheduler.cache is not None:
                    step.evicted_blocks = scheduler.cache.evicted_blocks - evicted_logged
                    evicted_logged = scheduler.cache.evicted_blocks
                steps.append(step)
                in_flight.append(step)
                # The engine fills its batch queue before it waits for results.
                if len(in_flight) < profile.pipeline_depth:
                    continue
            elif not in_flight:
                continue  # it preempted the only request it had, and takes it back at once
        elif not in_flight:
            now_s = arriving[0].visible_s
            continue
        oldest = in_flight.popleft()
        now_s = oldest.end_s
        num_finished += len(scheduler.deliver(oldest))
        if any(entry.samples for entry in oldest.entries):
            plans_since_token = 0

    branches = [step.decision.branch for step in steps]
    summary = StepSummary(
        num_steps=len(steps),
        branch_steps={branch: branches.count(branch) for branch in BRANCHES},
        busy_s=busy_s,
        peak_kv_blocks=peak_kv_blocks,
        peak_waiting=peak_waiting,
        peak_running=peak_running,
        preemptions=scheduler.num_preemptions,
        evicted_blocks=0 if scheduler.cache is None else scheduler.cache.evicted_blocks,
    )
    return SimResult(
        np.array([request.token_time_s[0] for request in everyone]),
        np.array([request.token_time_s[-1] for request in everyone]),
        np.array([time_s for request in everyone for time_s in request.token_time_s]),
        np.array([request.num_preemptions for request in everyone], np.int64),
        np.array([request.cached_tokens for request in everyone], np.int64),
        summary,
        _step_log(steps) if record_steps else None,
    )


def _step_log(steps: list[_Step]) -> StepLog:
    def integers(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(values, np.int64)

    placed = [(place, entry) for place, step in enumerate(steps) for entry in step.entries]
    return StepLog(
        plan_s=np.array([step.plan_s for step in steps]),
        start_s=np.array([step.start_s for step in steps]),
        end_s=np.array([step.end_s for step in steps]),
        budget=integers([step.decision.budget for step in steps]),
        branch=integers([BRANCHES.index(Branch(step.decision.branch)) for step in steps]),
        running_prefills=integers([step.state.running_prefills for step in steps]),
        running_decodes=integers([step.state.running_decodes for step in steps]),
        waiting_prefills=integers([step.state.waiting_prefills for step in steps]),
        remaining_running_prefill_tokens=integers([step.state.remaining_running_prefill_tokens for step in steps]),
        prefill_tokens=integers([step.prefill_tokens for step in steps]),
        prefill_pairs=integers([step.prefill_pairs for step in steps]),
        decode_tokens=integers([step.decode_tokens for step in steps]),
        decode_context_tokens=integers([step.decode_context_tokens for step in steps]),
        free_kv_blocks=integers([step.free_kv_blocks for step in steps]),
        preemptions=integers([step.preemptions for step in steps]),
        num_scheduled=integers([len(step.entries) for step in steps]),
        cached_tokens=integers([step.cached_tokens for step in steps]),
        evicted_blocks=integers([step.evicted_blocks for step in steps]),
        entry_step=integers([place for place, _ in placed]),
        entry_request=integers([entry.request.index for _, entry in placed]),
        entry_tokens=integers([entry.num_tokens for _, entry in placed]),
    )
