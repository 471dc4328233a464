"""How a trace is replayed in the simulator: in open loop, or as its sessions say. Knows no metric and no study."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.records import FloatArray
from ppas_core.policy import PolicyParams
from ppas_core.sim.closed_loop import Turns, simulate_sessions
from ppas_core.sim.profile import Profile
from ppas_core.sim.simulate import RequestArrays, SimResult, simulate
from traces.format import OPEN_LOOP, Trace
from traces.session import predecessors


def simulate_trace(
    params: PolicyParams, trace: Trace, requests: RequestArrays, profile: Profile, **options: Any
) -> tuple[SimResult, FloatArray]:
    """The replay of `trace`, and when each request was planned: float64[N], seconds from the trace's start.

    requests: the arrays of `trace`. options: as of `ppas_core.sim.simulate.simulate`. Raises as that and
    `simulate_sessions` do.
    """
    if trace.mode == OPEN_LOOP:
        return simulate(params, requests, profile, **options), requests.arrival_s
    before = [-1 if place is None else place for place in predecessors(trace)]
    think_s = [request.think_time_s or 0.0 for request in trace.requests]
    turns = Turns(np.array(before, np.int64), np.array(think_s, np.float64))
    return simulate_sessions(params, requests, turns, profile, **options)
