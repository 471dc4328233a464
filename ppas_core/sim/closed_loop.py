"""Sessions in the simulator: a turn arrives a think time after the answer before it, which the replay itself decides.

The step loop takes arrivals as given, so it is asked again and again: replay with the arrivals supposed so far, see when
answers end, suppose the arrivals that follow. When two rounds agree, the replay is one in which every turn came exactly
when it should have. A round cannot change what happened before the earliest arrival in doubt, and everything that
follows from it is right in the next round: so doubts only move forward, and there is just one such replay. Each round
is the ordinary compiled replay, with its noise, its prefix cache and its log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import Profile
from ppas_core.sim.requests import RequestArrays
from ppas_core.sim.result import SimResult
from ppas_core.sim.simulate import simulate

_SPARE_ROUNDS: Final = 10


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Which requests wait for an answer; arrays of one entry a request, in the order of the trace.

    before: int64[N], the place of the turn before, or -1 for a request that arrives by its own time. think_s:
    float64[N], seconds from the end of that answer to the arrival. Raises InvalidInput for a turn that waits for itself
    or a later one, and for a think time that is not a finite number of at least 0.
    """

    before: npt.NDArray[np.int64]
    think_s: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        places = np.arange(len(self.before))
        if len(self.think_s) != len(self.before):
            raise InvalidInput(f"{len(self.before)} turns, but {len(self.think_s)} think times; give one a request")
        if np.any(wrong := (self.before < -1) | (self.before >= places)):
            place = int(np.argmax(wrong))
            raise InvalidInput(f"request {place} waits for request {self.before[place]}; allowed: one before it, or -1")
        if np.any(wrong := ~np.isfinite(self.think_s) | (self.think_s < 0)):
            place = int(np.argmax(wrong))
            raise InvalidInput(
                f"think_s of request {place} is {self.think_s[place]}; allowed: a finite time, 0 or more"
            )


def simulate_sessions(
    params: PolicyParams, requests: RequestArrays, turns: Turns, profile: Profile, **options: Any
) -> tuple[SimResult, npt.NDArray[np.float64]]:
    """The replay of `requests` in which the turns that wait arrive when `turns` says, and all their arrivals.

    requests: in the order of the trace; the arrivals of waiting turns are a first guess. options: as of `simulate`.
    Both results are in the order of the trace, and so is the step log's entry_request. Raises as `simulate` does, and
    NoResult when the rounds do not come to an end.
    """
    waiting = np.flatnonzero(turns.before >= 0)
    causes, think_s = turns.before[waiting], turns.think_s[waiting]
    record_steps = options.pop("record_steps", False)
    arrival_s = requests.arrival_s.copy()
    for _ in range(2 * len(waiting) + _SPARE_ROUNDS):
        order = np.argsort(arrival_s, kind="stable")
        arranged = _arranged(requests, order, arrival_s)
        last_s = np.empty(len(requests))
        last_s[order] = simulate(params, arranged, profile, **options).last_token_s
        follows_s = last_s[causes] + think_s
        if np.array_equal(follows_s, arrival_s[waiting]):
            result = simulate(params, arranged, profile, record_steps=record_steps, **options)
            return _in_trace_order(result, order, requests, arranged), arrival_s
        arrival_s[waiting] = follows_s
    raise NoResult(
        f"the sessions of {len(requests)} requests did not settle in the simulator under {params.label()}; replay them on "
        "a live server, or in open loop"
    )


def _arranged(
    requests: RequestArrays, order: npt.NDArray[np.int64], arrival_s: npt.NDArray[np.float64]
) -> RequestArrays:
    prefixes = requests.prefixes
    if prefixes is not None:
        sizes = np.diff(prefixes.node_start)[order]
        node_start = np.zeros(len(order) + 1, np.int64)
        np.cumsum(sizes, out=node_start[1:])
        prefixes = SharedPrefixes(prefixes.block_size, node_start, prefixes.nodes[_rows(prefixes.node_start, order)])
    return RequestArrays(
        arrival_s[order], requests.prompt_tokens[order], requests.output_tokens[order], prefixes=prefixes
    )


def _rows(starts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places of runs that begin at starts[i] and end at starts[i + 1], for each i of `order`, end to end."""
    sizes = np.diff(starts)[order]
    ends = np.cumsum(sizes)
    rows: npt.NDArray[np.int64] = np.arange(int(ends[-1])) + np.repeat(starts[order] - (ends - sizes), sizes)
    return rows


def _in_trace_order(
    result: SimResult, order: npt.NDArray[np.int64], requests: RequestArrays, arranged: RequestArrays
) -> SimResult:
    place_of = np.argsort(order)
    log = result.step_log
    return replace(
        result,
        first_token_s=result.first_token_s[place_of],
        last_token_s=result.last_token_s[place_of],
        token_time_s=result.token_time_s[_rows(arranged.token_start, place_of)],
        preemptions=result.preemptions[place_of],
        cached_tokens=result.cached_tokens[place_of],
        step_log=None if log is None else replace(log, entry_request=order[log.entry_request]),
    )
