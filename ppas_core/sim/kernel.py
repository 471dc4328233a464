"""The compiled step loop: the same loop as `reference`, which is the one to read, for searches that need thousands.

It knows only arrays of numbers. `simulate` fills them, and `reference` says in full what each rule means and where in
vLLM it comes from. The two must stay equal bit for bit: every sum of floats is written in the same order, and counts
are 64-bit integers throughout. There are two compiled forms: without a prefix cache (`cache is None`) blocks are only
counted, and the branches for the other are not in it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ppas_core.sim.kernel_blocks import EVICTED, FREE, admit, allocate, compiled, find_hits, keep, release, reset

# Places in the settings array.
B_MAX: Final = 0
B_CAP: Final = 1
N_TH: Final = 2
T_LARGE: Final = 3  # -1: P-PAS
PREFILL_SCOPE: Final = 4
MAX_NUM_SEQS: Final = 5
DECODE_GUARD: Final = 6
USABLE_BLOCKS: Final = 7
BLOCK_SIZE: Final = 8
MAX_MODEL_LEN: Final = 9
DEPTH: Final = 10
NUM_SETTINGS: Final = 11

# Places in a trace's counters; the first three count steps by branch, in the order of `result.BRANCHES`.
PEAK_BLOCKS: Final = 3
PEAK_WAITING: Final = 4
PEAK_RUNNING: Final = 5
NUM_PREEMPTIONS: Final = 6
NUM_EVICTED: Final = 7
NUM_COUNTERS: Final = 8

# Columns of the step log.
LOG_BUDGET: Final = 0
LOG_BRANCH: Final = 1
LOG_RUNNING_PREFILLS: Final = 2
LOG_RUNNING_DECODES: Final = 3
LOG_WAITING_PREFILLS: Final = 4
LOG_REMAINING: Final = 5
LOG_PREFILL_TOKENS: Final = 6
LOG_PREFILL_PAIRS: Final = 7
LOG_DECODE_TOKENS: Final = 8
LOG_DECODE_CONTEXT: Final = 9
LOG_FREE_BLOCKS: Final = 10
LOG_PREEMPTIONS: Final = 11
LOG_SCHEDULED: Final = 12
LOG_CACHED_TOKENS: Final = 13
LOG_EVICTED: Final = 14
NUM_LOG_COLUMNS: Final = 15

# What `replay_batch` answers.
OK: Final = 0
STALLED: Final = 1
LOG_FULL: Final = 2


@compiled
def _seconds(cost: Any, prefill_tokens: int, prefill_pairs: int, decode_tokens: int, decode_context: int) -> float:
    duration: float = cost[0]
    if prefill_tokens > 0:
        duration += cost[5]
        duration += cost[1] * prefill_tokens
        duration += cost[2] * prefill_pairs
        duration += cost[7] * min(float(prefill_tokens), cost[8])
    if decode_tokens > 0:
        duration += cost[3] * decode_tokens
        duration += cost[4] * decode_context
        if prefill_tokens > 0:
            duration += cost[6]
    return duration


@compiled
def _decide(settings: Any, prefills: int, decodes: int, waiting: int, remaining: int) -> tuple[int, int]:
    branch = 0
    if prefills + waiting >= settings[N_TH] and decodes > 0:
        branch = 1
    elif settings[T_LARGE] >= 0 and prefills == 1 and decodes >= 2 and remaining >= settings[T_LARGE]:
        branch = 2
    if branch == 0:
        return settings[B_MAX], branch
    if settings[DECODE_GUARD] == 1 and settings[PREFILL_SCOPE] == 0:
        return min(settings[B_CAP] + decodes, settings[B_MAX]), branch
    return settings[B_CAP], branch


@compiled
def _replay(
    settings: Any,
    cost: Any,
    delay_s: float,
    noise: Any,
    arrival: Any,
    prompt: Any,
    output: Any,
    token_start: Any,
    token_time: Any,
    preemptions: Any,
    counters: Any,
    log: Any,
    cache: Any,
    trace: int,
    first_request: int,
) -> tuple[float, int]:
    """One trace; arguments as in `replay_batch`, cut to it but for `cache`. Returns the GPU's busy seconds, the status."""
    log_int, log_float, log_entries, log_size = log
    recording = log_int.shape[0] > 0
    num_requests = arrival.shape[0]
    depth = settings[DEPTH]
    block_size = settings[BLOCK_SIZE]
    max_num_seqs = settings[MAX_NUM_SEQS]

    # Requests: tokens scheduled, tokens out, KV blocks held, and tokens that steps in flight will bring.
    computed = np.zeros(num_requests, np.int64)
    generated = np.zeros(num_requests, np.int64)
    blocks = np.zeros(num_requests, np.int64)
    pending = np.zeros(num_requests, np.int64)
    preemptions[:] = 0
    # Queues: running in list order; waiting is a stack of preempted ones before the arrived but not yet admitted.
    running = np.empty(num_requests, np.int64)
    stack = np.empty(num_requests, np.int64)
    num_running = num_stacked = arrived = admitted = 0
    free = settings[USABLE_BLOCKS]
    prefills = 0  # running prefills, and their prompt tokens to go
    remaining = 0
    num_preemptions = 0
    # Steps in flight: up to two slots of (request, its preemptions when scheduled, whether it samples, tokens).
    slots = np.empty((2, min(num_requests, max_num_seqs), 4), np.int64)
    slot_size = np.zeros(2, np.int64)
    slot_end_s = np.zeros(2)
    oldest = 0
    in_flight = 0

    longest = 0
    for request in range(num_requests):
        longest = max(longest, prompt[request] + output[request])
    patience = 2 * longest + 8
    if cache is not None:
        pool = cache[4]
        reset(pool)
        node_start = cache[0][first_request : first_request + num_requests + 1]
        prefixes = (node_start, cache[1], cache[2][trace])
        cached = cache[3][first_request : first_request + num_requests]
    plans_since_token = 0
    now_s = gpu_free_s = busy_s = 0.0
    finished = num_steps = noise_place = logged_preemptions = logged_evicted = 0

    while finished < num_requests:
        while arrived < num_requests and arrival[arrived] + delay_s <= now_s:
            arrived += 1
        waiting = num_stacked + arrived - admitted
        if num_running + waiting > 0:
            plans_since_token += 1
            if plans_since_token > patience:
                return busy_s, STALLED

            # Plan: the budget, then running requests in list order, then waiting ones.
            state_prefills, state_decodes, state_remaining = prefills, num_running - prefills, remaining
            budget, branch = _decide(settings, state_prefills, state_decodes, waiting, state_remaining)
            prefill_left = budget
            step_left = settings[B_MAX] if settings[PREFILL_SCOPE] == 1 else budget
            prefill_tokens = prefill_pairs = decode_tokens = decode_context = scheduled = cached_tokens = 0
            slot = (oldest + in_flight) & 1
            preempted = False
            admitting = False
            index = 0
            while step_left > 0:
                if index < num_running and not admitting:
                    request = running[index]
                    index += 1
                    context = computed[request]
                    if pending[request] > 0 and context + 2 - pending[request] >= prompt[request] + output[request]:
                        continue
                    tokens = prompt[request] + generated[request] + pending[request] - context
                    is_prefill = context < prompt[request]
                    tokens = min(tokens, step_left)
                    if is_prefill:
                        tokens = min(tokens, prefill_left)
                    tokens = min(tokens, settings[MAX_MODEL_LEN] - context - 1)
                    if tokens <= 0:
                        continue
                    new_blocks = 0
                    if context + tokens > blocks[request] * block_size:
                        new_blocks = (context + tokens + block_size - 1) // block_size - blocks[request]
                        victim = -1
                        while new_blocks > free and victim != request:
                            preempted = True
                            num_running -= 1
                            victim = running[num_running]
                            if cache is None:
                                free += blocks[victim]
                            else:
                                release(pool, victim, blocks[victim])
                                free = pool.counts[FREE]
                            if computed[victim] < prompt[victim]:
                                prefills -= 1
                                remaining -= prompt[victim] - computed[victim]
                            blocks[victim] = computed[victim] = pending[victim] = 0
                            preemptions[victim] += 1
                            num_preemptions += 1
                            stack[num_stacked] = victim
                            num_stacked += 1
                        if victim == request:
                            break
                else:
                    admitting = True
                    if preempted or prefill_left <= 0 or num_running >= max_num_seqs:
                        break
                    if num_stacked > 0:
                        request = stack[num_stacked - 1]
                    elif admitted < arrived:
                        request = admitted
                    else:
                        break
                    tokens = prompt[request] + generated[request]
                    if cache is None:
                        context = 0
                        if (tokens + block_size - 1) // block_size > free:
                            break
                    else:
                        hits, idle = find_hits(pool, prefixes, block_size, request, prompt[request], tokens)
                        if (tokens + block_size - 1) // block_size - hits + idle > free:
                            break
                        admit(pool, request, hits)
                        free = pool.counts[FREE]
                        blocks[request] = hits
                        context = hits * block_size
                        tokens -= context
                        cached_tokens += context
                        if preemptions[request] == 0:
                            cached[request] = context
                    if num_stacked > 0:
                        num_stacked -= 1
                    else:
                        admitted += 1
                    running[num_running] = request
                    num_running += 1
                    is_prefill = context < prompt[request]
                    tokens = min(tokens, min(step_left, prefill_left))
                    if is_prefill:
                        prefills += 1
                        remaining += prompt[request] - context
                    else:
                        prefill_left -= tokens  # what is admitted is bounded like a prefill
                    new_blocks = (context + tokens + block_size - 1) // block_size - blocks[request]
                done = context + tokens
                if cache is not None:
                    allocate(pool, request, blocks[request], new_blocks)
                    known = min(done, prompt[request] + generated[request])
                    keep(pool, prefixes, block_size, request, prompt[request], known)
                blocks[request] += new_blocks
                free -= new_blocks
                step_left -= tokens
                if is_prefill:
                    prefill_left -= tokens
                    prefill_tokens += tokens
                    prefill_pairs += tokens * context + ((tokens * (tokens + 1)) >> 1)
                    remaining -= min(done, prompt[request]) - context
                    if done >= prompt[request]:
                        prefills -= 1
                else:
                    decode_tokens += tokens
                    decode_context += done
                computed[request] = done
                samples = 0
                if done >= prompt[request] + generated[request] + pending[request]:
                    samples = 1
                    pending[request] += 1
                slots[slot, scheduled, 0] = request
                slots[slot, scheduled, 1] = preemptions[request]
                slots[slot, scheduled, 2] = samples
                slots[slot, scheduled, 3] = tokens
                scheduled += 1

            counters[PEAK_WAITING] = max(counters[PEAK_WAITING], waiting)
            counters[PEAK_RUNNING] = max(counters[PEAK_RUNNING], num_running)
            counters[PEAK_BLOCKS] = max(counters[PEAK_BLOCKS], settings[USABLE_BLOCKS] - free)
            if scheduled > 0:
                duration_s = _seconds(cost, prefill_tokens, prefill_pairs, decode_tokens, decode_context)
                duration_s *= noise[noise_place]
                noise_place += 1
                if noise_place == noise.shape[0]:
                    noise_place = 0
                busy_s += duration_s
                start_s = max(now_s, gpu_free_s)
                gpu_free_s = start_s + duration_s
                slot_end_s[slot] = gpu_free_s
                slot_size[slot] = scheduled
                in_flight += 1
                counters[branch] += 1
                if recording:
                    first = log_size[1]
                    if num_steps >= log_int.shape[0] or first + scheduled > log_entries.shape[0]:
                        return busy_s, LOG_FULL
                    row = log_int[num_steps]
                    row[LOG_BUDGET] = budget
                    row[LOG_BRANCH] = branch
                    row[LOG_RUNNING_PREFILLS] = state_prefills
                    row[LOG_RUNNING_DECODES] = state_decodes
                    row[LOG_WAITING_PREFILLS] = waiting
                    row[LOG_REMAINING] = state_remaining
                    row[LOG_PREFILL_TOKENS] = prefill_tokens
                    row[LOG_PREFILL_PAIRS] = prefill_pairs
                    row[LOG_DECODE_TOKENS] = decode_tokens
                    row[LOG_DECODE_CONTEXT] = decode_context
                    row[LOG_FREE_BLOCKS] = free
                    row[LOG_PREEMPTIONS] = num_preemptions - logged_preemptions
                    row[LOG_SCHEDULED] = scheduled
                    row[LOG_CACHED_TOKENS] = cached_tokens
                    row[LOG_EVICTED] = 0
                    if cache is not None:
                        row[LOG_EVICTED] = pool.counts[EVICTED] - logged_evicted
                        logged_evicted = pool.counts[EVICTED]
                    logged_preemptions = num_preemptions
                    log_float[num_steps, 0] = now_s
                    log_float[num_steps, 1] = start_s
                    log_float[num_steps, 2] = gpu_free_s
                    for entry in range(scheduled):
                        log_entries[first + entry, 0] = num_steps
                        log_entries[first + entry, 1] = slots[slot, entry, 0]
                        log_entries[first + entry, 2] = slots[slot, entry, 3]
                    log_size[0] = num_steps + 1
                    log_size[1] = first + scheduled
                num_steps += 1
                if in_flight < depth:
                    continue
            elif in_flight == 0:
                continue
        elif in_flight == 0:
            now_s = arrival[arrived] + delay_s
            continue

        # Deliver: wait for the oldest step, and take its tokens in.
        now_s = slot_end_s[oldest]
        left_running = False
        for entry in range(slot_size[oldest]):
            if slots[oldest, entry, 2] == 0:
                continue
            plans_since_token = 0
            request = slots[oldest, entry, 0]
            token_time[token_start[request] + generated[request]] = now_s
            generated[request] += 1
            is_running = slots[oldest, entry, 1] == preemptions[request]
            if is_running:
                pending[request] -= 1
                if cache is not None:
                    known = computed[request] - pending[request]
                    keep(pool, prefixes, block_size, request, prompt[request], known)
            if generated[request] < output[request]:
                continue
            finished += 1
            if is_running:
                left_running = True
                if cache is None:
                    free += blocks[request]
                else:
                    release(pool, request, blocks[request])
                    free = pool.counts[FREE]
                blocks[request] = 0
            else:
                place = 0
                while stack[place] != request:
                    place += 1
                num_stacked -= 1
                for later in range(place, num_stacked):
                    stack[later] = stack[later + 1]
        if left_running:
            kept = 0
            for index in range(num_running):
                request = running[index]
                if generated[request] < output[request]:
                    running[kept] = request
                    kept += 1
            num_running = kept
        # Two slots always alternate; with depth 1 each step is delivered before the next is planned.
        oldest = 1 - oldest
        in_flight -= 1
    counters[NUM_PREEMPTIONS] = num_preemptions
    if cache is not None:
        counters[NUM_EVICTED] = pool.counts[EVICTED]
    return busy_s, OK


@compiled
def replay_batch(
    settings: Any,
    cost: Any,
    delay_s: float,
    noise: Any,
    trace_start: Any,
    arrival: Any,
    prompt: Any,
    output: Any,
    token_start: Any,
    outputs: Any,
    log: Any,
    cache: Any,
) -> int:
    """Replay the traces one after the other under one setting. Returns OK, STALLED or LOG_FULL.

    settings: int64[NUM_SETTINGS]. cost: float64[9] in the order of `StepCost`. delay_s: front-end delay of a request.
    noise: float64[M], factor of step k is noise[k % M]. trace_start: int64[T + 1], the traces' places in the
    request arrays. token_start: int64[N + 1], the requests' places in token_time, counted over the whole batch.
    outputs: (token_time float64[sum of outputs], preemptions int64[N], counters int64[T, NUM_COUNTERS] holding 0,
    busy_s float64[T]). log: (int64[L, NUM_LOG_COLUMNS], float64[L, 3], int64[E, 3], int64[2] holding 0); L = 0 records
    nothing.
    cache: None without prefix caching, else (node_start int64[N + 1], nodes int64[sum], trace_block_size int64[T],
    cached_tokens int64[N], a `BlockPool`): see `SharedPrefixes`; cached_tokens is filled with the tokens that each
    request found in the cache when it was first admitted.
    """
    token_time, preemptions, counters, busy = outputs
    for trace in range(trace_start.shape[0] - 1):
        first = trace_start[trace]
        last = trace_start[trace + 1]
        busy[trace], status = _replay(
            settings,
            cost,
            delay_s,
            noise,
            arrival[first:last],
            prompt[first:last],
            output[first:last],
            token_start[first:last],
            token_time,
            preemptions[first:last],
            counters[trace],
            log,
            cache,
            trace,
            first,
        )
        if status != OK:
            return status
    return OK
