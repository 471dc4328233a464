"""What a running scheduler's queues look like to the policy, and how many tokens its decodes will take in the next
step.

Works on vLLM's `Request` objects by attribute alone and imports nothing of vLLM. Source of the attributes and of the
rules repeated here: `vllm/v1/core/sched/scheduler.py`, read in every version that `compat` lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from ppas_core.policy import QueueState


class QueuedRequest(Protocol):
    """The part of vLLM's `Request` that is read here. Token counts as vLLM defines them."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_placeholders: int
    max_tokens: int
    is_prefill_chunk: bool

    @property
    def num_tokens_with_spec(self) -> int:
        """Prompt, generated and speculative tokens."""


class QueueReading(NamedTuple):
    """The queues at the start of a step.

    state: what the policy decides on.
    prefills: the running prefills, in the order of the running list.
    decode_behind_prefill: whether a decode stands behind a prefill in the running list, so that the prefill could take
        the budget before it.
    """

    state: QueueState
    prefills: list[QueuedRequest]
    decode_behind_prefill: bool


def read_queues(
    running: Sequence[QueuedRequest], waiting: Iterable[Collection[QueuedRequest]], *, waiting_may_hold_tokens: bool
) -> QueueReading:
    """Count prefills and decodes.

    waiting: all queues of requests that do not run yet.
    waiting_may_hold_tokens: whether a waiting request can have computed tokens (a KV connector, streaming input).
        Otherwise each of them has none, is a prefill by definition, and only the length of the queue is needed.
    """
    prefills = [r for r in running if r.num_computed_tokens < r.num_prompt_tokens]
    remaining = 0
    for request in prefills:
        remaining += request.num_prompt_tokens - request.num_computed_tokens
    num_waiting = 0
    for queue in waiting:
        if waiting_may_hold_tokens:
            num_waiting += sum(1 for r in queue if r.num_computed_tokens < r.num_prompt_tokens)
        else:
            num_waiting += len(queue)
    num_prefills = len(prefills)
    num_decodes = len(running) - num_prefills
    # Prefills that fill the tail of the list begin exactly num_decodes places after its start.
    behind = num_prefills > 0 and running[num_decodes] is not prefills[0]
    return QueueReading(QueueState(num_prefills, num_decodes, num_waiting, remaining), prefills, behind)


def count_decode_tokens(
    running: Sequence[QueuedRequest],
    num_decodes: int,
    *,
    max_position: int,
    tokens_in_flight: bool = True,
    long_prefill_token_threshold: int = 0,
    decode_step: int | None = None,
) -> int:
    """Tokens that the running decodes will be given in the next step if the budget lasts.

    One each; more with speculative tokens or while a preempted request recomputes its generated tokens; none for a
    request whose last token is already in flight (async scheduling) or that waits for its pipeline slot.

    num_decodes: how many of `running` are decodes.
    max_position: vLLM's cap on the tokens of a request before sampling, `max_model_len - num_sampled_tokens_per_step`.
    tokens_in_flight: whether a step is planned while the one before runs (async scheduling).
    decode_step: None where each decode that is not near its end takes one token (no speculative tokens, no KV
        connector, no pipeline slots), which spares looking at each; else the number of the coming step.
    """
    if decode_step is None:
        # Recomputing, about to end, or about to fill the model's length: these alone can take other than one token.
        looked_at: Sequence[QueuedRequest]
        if tokens_in_flight:
            looked_at = [
                r
                for r in running
                if r.is_prefill_chunk
                or r.num_computed_tokens + 2 - r.num_output_placeholders >= r.num_prompt_tokens + r.max_tokens
                or r.num_computed_tokens >= max_position
            ]
        else:
            looked_at = [r for r in running if r.is_prefill_chunk or r.num_computed_tokens >= max_position]
        tokens = num_decodes
    else:
        looked_at = running
        tokens = 0
    for request in looked_at:
        computed = request.num_computed_tokens
        prompt = request.num_prompt_tokens
        if computed < prompt:
            continue
        if decode_step is None:
            tokens -= 1
        elif decode_step < getattr(request, "next_decode_eligible_step", 0):
            continue
        in_flight = request.num_output_placeholders
        if in_flight > 0 and computed + 2 - in_flight >= prompt + request.max_tokens:
            continue
        wanted = request.num_tokens_with_spec + in_flight - computed
        if 0 < long_prefill_token_threshold < wanted:
            wanted = long_prefill_token_threshold
        room = max_position - computed
        tokens += wanted if wanted < room else max(room, 0)
    return tokens
