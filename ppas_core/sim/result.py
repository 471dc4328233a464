"""What a replay in the simulator gives back: token times, preemptions, and the steps in sum or one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppas_core.policy import Branch

BRANCHES: tuple[Branch, ...] = (Branch.MAX, Branch.PRESSURE, Branch.LARGE_PREFILL)
"""Branch codes in step logs are places in this tuple."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The steps of a replay in sum.

    num_steps: steps that computed at least one token. branch_steps: how many of them each branch set the budget of.
    busy_s: seconds in which the GPU worked. peak_kv_blocks: most KV blocks held. peak_waiting: most requests waiting
    at the start of a step. peak_running: most requests running at once. preemptions: over all requests.
    evicted_blocks: cached blocks that were handed out anew; 0 without prefix caching.
    """

    num_steps: int
    branch_steps: dict[Branch, int]
    busy_s: float
    peak_kv_blocks: int
    peak_waiting: int
    peak_running: int
    preemptions: int
    evicted_blocks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepLog:
    """Every step that computed at least one token, in order; arrays of length S unless said otherwise.

    plan_s: when the scheduler decided it; start_s, end_s: when the GPU ran it.
    budget (tokens), branch (place in BRANCHES), and the state that decided: running_prefills, running_decodes,
    waiting_prefills, remaining_running_prefill_tokens.
    prefill_tokens, decode_tokens: tokens of the step in prefills and in decodes, by the policy's definition.
    prefill_pairs, decode_context_tokens: see `StepCost`.
    free_kv_blocks: blocks left after the plan. preemptions: requests preempted since the plan of the step before.
    cached_tokens: tokens that the requests admitted in the step found in the prefix cache, recomputing ones included.
    evicted_blocks: cached blocks handed out anew since the plan of the step before.
    entry_step, entry_request, entry_tokens: int64[E], what was scheduled, in scheduling order.
    """

    plan_s: npt.NDArray[np.float64]
    start_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    budget: npt.NDArray[np.int64]
    branch: npt.NDArray[np.int64]
    running_prefills: npt.NDArray[np.int64]
    running_decodes: npt.NDArray[np.int64]
    waiting_prefills: npt.NDArray[np.int64]
    remaining_running_prefill_tokens: npt.NDArray[np.int64]
    prefill_tokens: npt.NDArray[np.int64]
    prefill_pairs: npt.NDArray[np.int64]
    decode_tokens: npt.NDArray[np.int64]
    decode_context_tokens: npt.NDArray[np.int64]
    free_kv_blocks: npt.NDArray[np.int64]
    preemptions: npt.NDArray[np.int64]
    num_scheduled: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    evicted_blocks: npt.NDArray[np.int64]
    entry_step: npt.NDArray[np.int64]
    entry_request: npt.NDArray[np.int64]
    entry_tokens: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start_s)

    def scheduled(self, step: int) -> dict[int, int]:
        """Request to tokens of one step, in scheduling order."""
        first = int(np.sum(self.num_scheduled[:step]))
        entries = slice(first, first + int(self.num_scheduled[step]))
        return dict(zip(self.entry_request[entries].tolist(), self.entry_tokens[entries].tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class SimResult:
    """One trace replayed under one setting. Times are seconds from the trace's start, at the moment a step ended.

    first_token_s, last_token_s: float64[N]. token_time_s: float64[sum of output tokens], request after request.
    preemptions: int64[N]. cached_tokens: int64[N], prompt tokens that a request found in the prefix cache when it was
    first admitted, as vLLM reports them in `usage`; 0 where the profile does not cache prefixes.
    steps: see `StepSummary`. step_log: present when asked for.
    """

    first_token_s: npt.NDArray[np.float64]
    last_token_s: npt.NDArray[np.float64]
    token_time_s: npt.NDArray[np.float64]
    preemptions: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    steps: StepSummary
    step_log: StepLog | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchResult:
    """Several traces replayed under one setting; the arrays of `SimResult` laid end to end in the batch's order.

    trace_start: int64[T + 1], the traces' places in the request arrays. branch_steps: int64[T, 3] in the order of
    BRANCHES. busy_s: float64[T]. trace_preemptions: int64[T].
    """

    first_token_s: npt.NDArray[np.float64]
    last_token_s: npt.NDArray[np.float64]
    token_time_s: npt.NDArray[np.float64]
    preemptions: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    trace_start: npt.NDArray[np.int64]
    branch_steps: npt.NDArray[np.int64]
    busy_s: npt.NDArray[np.float64]
    trace_preemptions: npt.NDArray[np.int64]

    def trace(self, index: int) -> slice:
        """Where one trace's requests lie in the request arrays."""
        return slice(int(self.trace_start[index]), int(self.trace_start[index + 1]))
