"""One held-out trace step by step: what the engine did under the tuned setting and under those beside it.

The trace is the one on which the policy does most, so that a reader sees it act. Steps that are alike in all that is
drawn are merged, and above a number of stretches neighbours are too, so that a result stays small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd

from autotune.evaluate import Evaluator, SimulatedEvaluator
from autotune.records import Replay
from autotune.results import Lane, Setting, Timeline
from ppas_core.sim.result import BRANCHES, StepLog
from traces.format import Trace

MAX_STRETCHES: Final = 600
"""Stretches that a lane keeps at most."""
MAX_REQUESTS: Final = 2000
"""Requests whose arrivals are kept at most."""
_IDLE_S: Final = 0.02
"""A pause between two steps from which on the engine counts as idle."""
_STATE: Final = ("budget", "branch", "running", "waiting", "prefills")
_RULE: Final = {"pressure": "prefill pressure", "large_prefill": "large prefills"}


def make_timeline(
    evaluator: Evaluator, traces: Sequence[Trace], replays: Mapping[str, Sequence[Replay]], roles: Sequence[str]
) -> Timeline | None:
    """The time line of one of the held-out `traces` under the settings in `roles`, the tuned one first.

    replays: role to its replays of the traces, in their order. Two roles with the same setting share a lane, under the
    first name. None when no steps are known, as on a server that was only joined.
    """
    shown: dict[str, Sequence[Replay]] = {}
    for role in roles:
        if role in replays and all(replays[role][0].params != other[0].params for other in shown.values()):
            shown[role] = replays[role]
    order = _richest_first(shown)
    for place in order:
        steps = {role: steps_of(evaluator, found[place], traces[place]) for role, found in shown.items()}
        known = {role: table for role, table in steps.items() if table is not None}
        if len(known) == len(shown):
            break
    else:
        return None
    names = list(dict.fromkeys([*map(str, BRANCHES), *(name for table in known.values() for name in table["branch"])]))
    codes = {name: code for code, name in enumerate(names)}
    trace = traces[place]
    every = max(1, math.ceil(len(trace.requests) / MAX_REQUESTS))
    requests = trace.requests[::every]
    planned_s = next(iter(shown.values()))[place].requests.planned_s  # in sessions it differs by setting: the first's
    return Timeline(
        trace=trace.name,
        regime=trace.regime,
        why=_why(shown, place),
        arrival_s=[round(float(time_s), 4) for time_s in planned_s[::every]],
        prompt_tokens=[request.prompt_tokens for request in requests],
        branches=names,
        lanes=[_lane(role, shown[role][place], table, codes) for role, table in known.items()],
    )


def steps_of(evaluator: Evaluator, replay: Replay, trace: Trace) -> pd.DataFrame | None:
    """The steps of one replay: start_s and end_s from the trace's start, budget, branch, running, waiting, tokens, and
    prefills (whether it computed any). None where they were not recorded."""
    if isinstance(evaluator, SimulatedEvaluator):
        return _simulated(evaluator.step_log(replay.params, trace))
    if replay.steps is None or replay.steps.empty:
        return None
    return _live(replay)


def stretches(steps: pd.DataFrame, limit: int = MAX_STRETCHES) -> tuple[pd.DataFrame, bool]:
    """Neighbouring steps that are alike merged into one row, and whether more had to be merged to stay within `limit`.

    Where unlike steps are merged the one with the smallest budget stands for them: a short intervention stays visible.
    No stretch reaches over a pause of the engine, but one too short to be drawn.
    """
    paused = (steps["start_s"] - steps["end_s"].shift() >= _IDLE_S).cumsum()
    changed = (steps[list(_STATE)] != steps[list(_STATE)].shift()).any(axis=1).cumsum()
    merged = _merged(steps, [paused, changed])
    if len(merged) <= limit:
        return merged, False
    begin, end = float(steps["start_s"].iloc[0]), float(steps["start_s"].iloc[-1])
    cell = ((steps["start_s"] - begin) / max(end - begin, 1e-9) * (limit - 1)).astype(int)
    return _merged(steps, [cell]), True


def _merged(steps: pd.DataFrame, keys: Sequence[pd.Series]) -> pd.DataFrame:
    groups = steps.groupby([key.to_numpy() for key in keys], sort=False)
    telling = steps.loc[groups["budget"].idxmin(), ["budget", "branch"]].reset_index(drop=True)
    rows = groups.agg(
        start_s=("start_s", "first"),
        end_s=("end_s", "last"),
        steps=("budget", "size"),
        running=("running", "max"),
        waiting=("waiting", "max"),
        tokens=("tokens", "mean"),
    ).reset_index(drop=True)
    return rows.join(telling)


def _lane(role: str, replay: Replay, steps: pd.DataFrame, codes: Mapping[str, int]) -> Lane:
    rows, thinned = stretches(steps)
    return Lane(
        role=role,
        setting=Setting.of(replay.params),
        start_s=[round(float(v), 4) for v in rows["start_s"]],
        end_s=[round(float(v), 4) for v in rows["end_s"]],
        steps=[int(v) for v in rows["steps"]],
        budget=[int(v) for v in rows["budget"]],
        branch=[codes[name] for name in rows["branch"]],
        running=[int(v) for v in rows["running"]],
        waiting=[int(v) for v in rows["waiting"]],
        tokens=[round(float(v), 1) for v in rows["tokens"]],
        thinned=thinned,
    )


def _simulated(log: StepLog) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "start_s": log.start_s,
            "end_s": log.end_s,
            "budget": log.budget,
            "branch": [str(BRANCHES[code]) for code in log.branch],
            "running": log.running_prefills + log.running_decodes,
            "waiting": log.waiting_prefills,
            "tokens": log.prefill_tokens + log.decode_tokens,
            "prefills": log.prefill_tokens > 0,
        }
    )


def _live(replay: Replay) -> pd.DataFrame | None:
    """The engine's own log on the trace's clock: its last step ends when the client had its last token.

    Rows from before the trace's first request belong to a replay that was repeated, and are left out.
    """
    log = replay.steps
    if log is None:
        return None
    log = log[log["done_s"].notna()]
    last_s = float(np.nanmax(replay.requests.last_token_s, initial=-math.inf))
    if log.empty or not math.isfinite(last_s):
        return None
    offset_s = float(log["done_s"].max()) - last_s
    first_s = float(np.nanmin(replay.requests.sent_s)) - 1.0
    log = log[log["start_s"] - offset_s >= first_s]
    if log.empty:
        return None
    start_s = (log["start_s"] - offset_s).clip(lower=0.0)
    # With asynchronous scheduling a step is decided while the one before it runs: drawn, it begins when that one ends.
    start_s = start_s.combine((log["done_s"] - offset_s).shift().fillna(0.0).cummax(), max)
    return pd.DataFrame(
        {
            "start_s": start_s,
            "end_s": (log["done_s"] - offset_s).combine(start_s, max),
            "budget": log["budget"],
            "branch": log["branch"].astype(str),
            "running": log["running_prefills"] + log["running_decodes"],
            "waiting": log["waiting_prefills"],
            "tokens": log["prefill_tokens"] + log["decode_tokens"],
            "prefills": log["prefill_tokens"] > 0,
        }
    ).reset_index(drop=True)


def _richest_first(shown: Mapping[str, Sequence[Replay]]) -> list[int]:
    """The places of the traces, that with the richest mix of branches first; alike ones by their number of requests."""
    found = next(iter(_adaptive(shown).values()), None)
    if found is None:
        found = next(iter(shown.values()), ())
        return sorted(range(len(found)), key=lambda place: (-len(found[place].requests), place))
    mixes = [_mix(replay.branch_steps) for replay in found]
    return sorted(range(len(found)), key=lambda place: (-mixes[place], -len(found[place].requests), place))


def _adaptive(shown: Mapping[str, Sequence[Replay]]) -> dict[str, Sequence[Replay]]:
    return {role: found for role, found in shown.items() if not found[0].params.is_static}


def _mix(branch_steps: Mapping[str, int]) -> float:
    """Shannon entropy of the branches: 0 when one decides every step, greatest when all decide as often."""
    total = sum(branch_steps.values())
    shares = [count / total for count in branch_steps.values() if count > 0]
    return -math.fsum(share * math.log(share) for share in shares)


def _why(shown: Mapping[str, Sequence[Replay]], place: int) -> str:
    adaptive = _adaptive(shown)
    num_traces = len(next(iter(shown.values())))
    if not adaptive:
        return f"Of {num_traces} held-out traces this one has most requests; no setting here adapts its budget."
    role, found = next(iter(adaptive.items()))
    steps = found[place].branch_steps
    total = max(1, sum(steps.values()))
    parts = [f"{_RULE[name]} in {count / total:.0%}" for name, count in steps.items() if name in _RULE and count]
    caps = " and ".join(parts) or "nothing in any"
    return (
        f"Of {num_traces} held-out traces this is where the {role} setting's rules mix most: "
        f"the budget is capped by {caps} of its steps."
    )
