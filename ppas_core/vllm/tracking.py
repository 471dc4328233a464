"""The same reading of the queues as `queues`, from requests followed since their admission: its cost does not grow with
the number of running decodes.

A scan of 256 running requests touches a thousand cold cache lines before vLLM's own loop does. But a request enters the
running list in `schedule()` alone, becomes a decode once, and gives at most one token a step; so the prefills are a short
list, and the step from which a decode can be near its end is known when it is admitted. Not for engines where a
running request can fall back or give more than one token a step (KV connector, speculative tokens, pipeline slots).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from ppas_core.policy import QueueState
from ppas_core.vllm.queues import QueueReading, count_decode_tokens

_SLACK_STEPS = 2
"""A request is looked at this many steps before it can be near its end; a look too early only costs time."""
_KEPT_ENDS = 4096
"""Entries of finished requests are dropped when their step comes, or when there are more than this beyond the running."""


class RunningTracker:
    """Follows the running requests of one scheduler.

    running_status: vLLM's `RequestStatus.RUNNING`. max_position, tokens_in_flight, long_prefill_token_threshold: as in
    `queues.count_decode_tokens`.
    """

    def __init__(
        self, running_status: object, *, max_position: int, tokens_in_flight: bool, long_prefill_token_threshold: int
    ) -> None:
        self._running_status = running_status
        self._max_position = max_position
        self._tokens_in_flight = tokens_in_flight
        self._threshold = long_prefill_token_threshold
        self._prefills: list[Any] = []
        self._recomputing: list[Any] = []
        self._ends: list[tuple[int, str]] = []

    def rebuild(self, running: Iterable[Any], step: int) -> None:
        """Start over from the running list as it stands before `step`."""
        self._prefills, self._recomputing, self._ends = [], [], []
        self.admit(running, step)

    def admit(self, requests: Iterable[Any], step: int) -> None:
        """Follow `requests`, which `step` (or an earlier one) put at the end of the running list."""
        admitted = list(requests)
        self._prefills = self._prefills + admitted  # a new list: the old one was handed out by `read`
        for request in admitted:
            heappush(self._ends, (self._earliest_end(request, step), request.request_id))

    def read(self, running: Sequence[Any], waiting: Iterable[Collection[Any]]) -> QueueReading:
        """What `queues.read_queues` gives, where no waiting request holds computed tokens."""
        prefills = []
        remaining = 0
        for request in self._prefills:
            if request.status is not self._running_status:
                continue
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                prefills.append(request)
                remaining += left
            elif request.is_prefill_chunk:
                self._recomputing.append(request)
        self._prefills = prefills
        num_decodes = len(running) - len(prefills)
        num_waiting = sum(map(len, waiting))
        behind = bool(prefills) and running[num_decodes] is not prefills[0]
        return QueueReading(QueueState(len(prefills), num_decodes, num_waiting, remaining), prefills, behind)

    def count_decode_tokens(self, requests: Mapping[str, Any], num_running: int, num_decodes: int, step: int) -> int:
        """What `queues.count_decode_tokens` gives, after `read` of the same step. requests: all, by id."""
        ends = self._ends
        if not self._recomputing and (not ends or ends[0][0] > step):
            return num_decodes
        looked_at = {}
        while ends and ends[0][0] <= step:
            request = requests.get(heappop(ends)[1])
            if request is not None and request.status is self._running_status:
                looked_at[request.request_id] = request
        for request in looked_at.values():
            heappush(ends, (max(self._earliest_end(request, step), step + 1), request.request_id))
        if len(ends) > num_running + _KEPT_ENDS:
            self._ends = list(
                {name: (end, name) for end, name in sorted(ends, reverse=True) if name in requests}.values()
            )
            heapify(self._ends)
        if self._recomputing:
            self._recomputing = [
                r for r in self._recomputing if r.is_prefill_chunk and r.status is self._running_status
            ]
            looked_at.update((r.request_id, r) for r in self._recomputing)
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

    def _earliest_end(self, request: Any, step: int) -> int:
        """The first step in which `request` can take other than one token, as it may be near its end."""
        generated = request.num_output_tokens
        steps_left: int = min(request.max_tokens - 1, self._max_position - request.num_prompt_tokens) - generated
        return step + steps_left - _SLACK_STEPS
