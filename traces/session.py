"""How a trace with conversations becomes one whose turns wait for answers, and back; and which turn follows which.

A recording says when a turn came, not when the answer before it was complete. So the time that a person thought is an
assumption: the gap between the two arrivals, less what the answer is taken to have lasted; or one number for all.

What a turn's prompt repeats: the whole prompt of the turn before, where it is longer than that and its answer together,
as a conversation is; else it is a new text. A recording's own block ids stay as they are; without any, this is written
down as block ids, so that prompts, simulator and every count of shared prefixes follow from the trace alone. The answer
itself is never repeated: the next prompt is fixed before the answer is known, and has other tokens in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ppas_core.errors import InvalidInput
from traces.format import MAX_ARRIVAL_S, OPEN_LOOP, SESSIONS, Trace, TraceRequest

HISTORY_BLOCK_TOKENS: Final = 512
"""Prompt tokens per block id where ids are written; sharing is exact at any size, as partial blocks begin whole ones."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How long is thought before a turn is sent, in seconds.

    think_s: this long before every turn; None takes each gap of the recording, less the answer.
    first_token_s, token_s: what an answer is taken to have lasted in the recording: first_token_s + token_s * tokens.

    Raises InvalidInput for numbers out of range, and for an answer's length beside a fixed think_s.
    """

    think_s: float | None = None
    first_token_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("think_s", "first_token_s", "token_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_ARRIVAL_S:
                raise InvalidInput(f"{name} is {value!r}; allowed: 0 to {MAX_ARRIVAL_S} seconds")
        if self.think_s is not None and (self.first_token_s or self.token_s):
            raise InvalidInput(
                "a fixed think time does not depend on how long answers lasted; leave out one of the two"
            )

    def between(self, before: TraceRequest, after: TraceRequest) -> tuple[float, bool]:
        """The think time before `after`, and whether the gap was too short for the answer, so that it is 0."""
        if self.think_s is not None:
            return self.think_s, False
        answer_s = self.first_token_s + self.token_s * before.output_tokens
        think_s = after.arrival_s - before.arrival_s - answer_s
        return max(0.0, think_s), think_s < 0


def predecessors(trace: Trace) -> list[int | None]:
    """For each request the place of the turn whose answer it waits for; None where it is sent at its arrival_s."""
    if trace.mode == OPEN_LOOP:
        return [None] * len(trace.requests)
    return [
        before if request.think_time_s is not None else None
        for request, before in zip(trace.requests, _turns_before(trace.requests), strict=True)
    ]


def to_sessions(trace: Trace, thinking: Thinking, name: str | None = None) -> Trace:
    """`trace` with every later turn of a session sent a think time after the answer to the turn before.

    The recorded arrivals stay, as the order and for the way back. The provenance (`shape`) says what was assumed, how
    many turns wait and how many gaps were shorter than the answer they are taken to hold.
    Raises InvalidInput when no session has a second turn, or when turns wait already.
    """
    if trace.mode == SESSIONS:
        raise InvalidInput(f"trace {trace.name!r} is in {SESSIONS} already; go back with --open-loop first")
    requests: list[TraceRequest] = []
    waiting = clamped = 0
    for request, before in zip(trace.requests, _turns_before(trace.requests), strict=True):
        if before is None:
            requests.append(request)
            continue
        think_s, too_short = thinking.between(trace.requests[before], request)
        requests.append(replace(request, think_time_s=think_s))
        waiting += 1
        clamped += too_short
    if not waiting:
        raise InvalidInput(
            f"trace {trace.name!r} has no session with a second turn, so no turn can wait for an answer; replay it in "
            "open loop, or import a format that names conversations"
        )
    step = {
        "op": "sessions",
        "think_s": thinking.think_s,
        "first_token_s": thinking.first_token_s,
        "token_s": thinking.token_s,
        "waiting_turns": waiting,
        "gaps_shorter_than_the_answer": clamped,
        "prompts": "recorded block ids" if trace.block_size else "a turn repeats the prompt of the turn before",
    }
    block_size = trace.block_size
    if block_size is None:
        block_size, requests = HISTORY_BLOCK_TOKENS, list(_with_history(requests))
    return replace(
        trace,
        name=name or trace.name,
        requests=tuple(requests),
        block_size=block_size,
        provenance=noted(trace, step),
    )


def to_open_loop(trace: Trace, name: str | None = None) -> Trace:
    """`trace` with every turn sent at its recorded arrival, whatever became of the turn before. Block ids stay."""
    requests = tuple(replace(request, think_time_s=None) for request in trace.requests)
    return replace(trace, name=name or trace.name, requests=requests, provenance=noted(trace, {"op": "open_loop"}))


def beginning_anew(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """`requests`, part of a trace, with the first one that is left of each session sent at its arrival_s."""
    begun: set[str] = set()
    for request in requests:
        if request.think_time_s is not None and request.session not in begun:
            request = replace(request, think_time_s=None)
        if request.session is not None:
            begun.add(request.session)
        yield request


def _turns_before(requests: Sequence[TraceRequest]) -> Iterator[int | None]:
    last: dict[str, int] = {}
    for place, request in enumerate(requests):
        if request.session is None:
            yield None
        else:
            yield last.get(request.session)
            last[request.session] = place


def _with_history(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """Block ids for requests that have none: a text is a run of ids, and a turn takes as many as its prompt needs."""
    texts: list[list[int]] = []  # per request, shared by the turns of one text
    next_id = 0
    for request, before in zip(requests, _turns_before(requests), strict=True):
        continues = before is not None and request.prompt_tokens > (
            requests[before].prompt_tokens + requests[before].output_tokens
        )
        text = texts[before] if before is not None and continues else []
        blocks = math.ceil(request.prompt_tokens / HISTORY_BLOCK_TOKENS)
        while len(text) < blocks:
            text.append(next_id)
            next_id += 1
        texts.append(text)
        yield replace(request, block_hashes=tuple(text[:blocks]))


def noted(trace: Trace, step: dict[str, Any]) -> dict[str, Any]:
    """The provenance with one more step of how the trace came to its shape."""
    before = trace.provenance.get("shape")
    provenance = {**trace.provenance, "shape": [*before, step] if isinstance(before, list) else [step]}
    provenance.setdefault("shaped_from", trace.digest)
    return provenance
