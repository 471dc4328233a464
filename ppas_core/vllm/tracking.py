"""The same reading of the queues as `queues`, from requests followed since their admission: its cost does not grow with
the number of running decodes.

A scan of 256 running requests touches a thousand cold cache lines before vLLM's own loop does. But a request enters the
running list in `schedule()` alone, becomes a decode once, and gives at most one token a step; so the prefills are a short
list, and the step from which a decode can be near its end is known when it becomes one. Not for engines where a
running request can fall back or give more than one token a step (KV connector, speculative tokens, pipeline slots).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from ppas_core.policy import QueueState
from ppas_core.vllm.queues import QueueReading, count_decode_tokens

_SLACK_STEPS = 2
"""A request is looked at this many steps before it can be near its end; a look too early only costs time."""
_KEPT_ENDS = 4096
"""Entries of finished requests are dropped when their step comes, or when this many are more than two a running one."""
_NEVER = 2**62


class RunningTracker:
    """Follows the running requests of one scheduler.

    running_status: vLLM's `RequestStatus.RUNNING`. max_position, tokens_in_flight, long_prefill_token_threshold: as in
    `queues.count_decode_tokens`.

    step: the last step that was followed to its end, for the caller to set; -1 calls for a `rebuild`.
    """

    def __init__(
        self, running_status: object, *, max_position: int, tokens_in_flight: bool, long_prefill_token_threshold: int
    ) -> None:
        self.step = -1
        self._running_status = running_status
        self._max_position = max_position
        self._tokens_in_flight = tokens_in_flight
        self._threshold = long_prefill_token_threshold
        self._prefills: list[Any] = []
        self._recomputing: list[Any] = []
        self._ends: list[tuple[int, str]] = []
        self._next_look = _NEVER  # before this step every decode takes one token
        self._without_prefills: QueueReading | None = None  # the last reading that had no running prefill
        self._num_running = self._num_waiting = 0  # as that reading found them

    def rebuild(self, running: Iterable[Any], step: int) -> None:
        """Start over from the running list as it stands before `step`."""
        self.step = step - 1
        self._prefills, self._recomputing, self._ends = [], [], []
        self._next_look = _NEVER
        self.admit(running)

    def admit(self, requests: Iterable[Any]) -> None:
        """Follow `requests`, which the last step (or an earlier one) put at the end of the running list."""
        self._prefills = [*self._prefills, *requests]  # a new list: the old one was handed out by `read`

    def read(self, running: Sequence[Any], waiting: Iterable[Collection[Any]]) -> QueueReading:
        """What `queues.read_queues` gives, where no waiting request holds computed tokens.

        The very object of the last call, where nothing changed since and no prefill runs.
        """
        num_waiting = 0
        for queue in waiting:
            # vLLM's own queue is a deque whose __len__ goes through Python.
            num_waiting += deque.__len__(queue) if isinstance(queue, deque) else len(queue)
        if not self._prefills:
            num_running = len(running)
            last = self._without_prefills
            if last is None or num_running != self._num_running or num_waiting != self._num_waiting:
                self._num_running = num_running
                self._num_waiting = num_waiting
                last = self._without_prefills = QueueReading(QueueState(0, num_running, num_waiting, 0), [], False)
            return last
        running_status = self._running_status
        prefills = []
        remaining = 0
        for request in self._prefills:
            if request.status is not running_status:
                continue
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                prefills.append(request)
                remaining += left
            else:
                self._watch(request, running)
        self._prefills = prefills
        num_prefills = len(prefills)
        num_decodes = len(running) - num_prefills
        behind = num_prefills > 0 and running[num_decodes] is not prefills[0]
        # What QueueState(...) and QueueReading(...) do, without their detour through a Python function.
        state = tuple.__new__(QueueState, (num_prefills, num_decodes, num_waiting, remaining))
        return tuple.__new__(QueueReading, (state, prefills, behind))

    def count_decode_tokens(self, requests: Mapping[str, Any], num_decodes: int, step: int) -> int:
        """What `queues.count_decode_tokens` gives, after `read` of the same step. requests: all, by id."""
        if step < self._next_look:
            return num_decodes
        ends = self._ends
        looked_at = {}
        while ends and ends[0][0] <= step:
            request = requests.get(heappop(ends)[1])
            if request is not None and request.status is self._running_status:
                looked_at[request.request_id] = request
        for request in looked_at.values():
            heappush(ends, (max(self._earliest_end(request, step), step + 1), request.request_id))
        if self._recomputing:
            self._recomputing = [
                r for r in self._recomputing if r.is_prefill_chunk and r.status is self._running_status
            ]
            looked_at.update((r.request_id, r) for r in self._recomputing)
        self._next_look = 0 if self._recomputing else ends[0][0] if ends else _NEVER
        if not looked_at:
            return num_decodes
        special = [r for r in looked_at.values() if r.num_computed_tokens >= r.num_prompt_tokens]
        return (
            num_decodes
            - len(special)
            + count_decode_tokens(
                special,
                len(special),
                max_position=self._max_position,
                tokens_in_flight=self._tokens_in_flight,
                long_prefill_token_threshold=self._threshold,
            )
        )

    def _watch(self, request: Any, running: Sequence[Any]) -> None:
        """Note from when on a request that became a decode can take other than one token."""
        step = self.step + 1
        if request.is_prefill_chunk:
            self._recomputing.append(request)
            self._next_look = 0
        end = self._earliest_end(request, step)
        heappush(self._ends, (end, request.request_id))
        if end < self._next_look:
            self._next_look = end
        if len(self._ends) > 2 * len(running) + _KEPT_ENDS:
            self._ends = [(self._earliest_end(r, step), r.request_id) for r in running]
            heapify(self._ends)

    def _earliest_end(self, request: Any, step: int) -> int:
        """The first step in which `request` can take other than one token, as it may be near its end."""
        generated = request.num_output_tokens
        steps_left: int = min(request.max_tokens - 1, self._max_position - request.num_prompt_tokens) - generated
        return step + steps_left - _SLACK_STEPS
