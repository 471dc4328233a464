"""What a trace means on a profile, before anything is tuned: does it fit, how near is saturation, which branches act.

All of it is simulated. A knob that no step of the trace asks for cannot be identified from it, whatever the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from autotune.evaluate import SimulatedEvaluator, request_arrays
from autotune.records import FloatArray
from autotune.simulated import simulate_trace
from ppas_core.policy import Branch, PolicyParams
from ppas_core.sim.profile import Profile
from ppas_core.sim.result import SimResult
from ppas_core.sim.simulate import RequestArrays, simulate
from search_spaces.knobs import thin
from search_spaces.space import Space
from traces.format import SESSIONS, Trace, TraceRequest
from traces.session import beginning_anew

MAX_TOKENS: Final = 5_000_000
"""Output tokens that are simulated; of a longer trace its beginning."""
NEAR_SATURATION: Final = 0.8
"""Busy share of the GPU from which queues grow long."""
OVERLOAD_DRAIN: Final = 0.25
"""A queue that takes this share of the trace's duration to drain was growing."""

_MOST_VALUES: Final = 12
_APART_S: Final = 1e6


def look(trace: Trace, profile: Profile, setting: PolicyParams, space: Space) -> dict[str, Any]:
    """What `trace` means on `profile` under `setting`, and over the thresholds of `space`, as plain JSON values.

    fit: against the model length and the KV pool. load: from one replay. branches: steps under `setting`, and with each
    n_th (and t_large) of the space in its place. findings: what follows, a sentence each; the first is about the load.
    Requests that could never be served are left out of the replays, and so is what exceeds MAX_TOKENS.
    """
    evaluator = SimulatedEvaluator(profile)
    longest = [request.prompt_tokens + request.output_tokens for request in trace.requests]
    too_long = sum(tokens > profile.longest_servable_tokens for tokens in longest)
    fit = {
        "longest_request_tokens": max(longest),
        "longest_servable_tokens": profile.longest_servable_tokens,
        "max_model_len": profile.max_model_len,
        "kv_tokens": (profile.num_kv_blocks - 1) * profile.block_size,
        "requests_too_long": too_long,
    }
    about = {"origin": "simulated", "profile": profile.name, "setting": setting.to_dict(), "fit": fit}
    findings = _about_fit(profile, fit, len(longest))
    if too_long == len(longest):
        return {**about, "load": None, "branches": None, "findings": findings}
    part = _servable(trace, profile)
    left_out = len(longest) - too_long - len(part.requests)
    if left_out:
        findings.append(
            f"Simulated are the first {len(part.requests)} requests; {left_out} further ones are beyond {MAX_TOKENS} "
            "output tokens."
        )
    requests = request_arrays(part, prefixes=profile.prefix_caching)
    result, planned_s = simulate_trace(setting, part, requests, profile)
    load = _load(part, requests, profile, result, planned_s, _lone_latency_s(requests, profile, setting))
    thresholds = {"n_th": _tried(part, requests, profile, setting, "n_th", space.n_th.values)}
    if space.t_large is not None:
        thresholds["t_large"] = _tried(part, requests, profile, setting, "t_large", space.t_large.values)
    branches = {
        "steps": {str(branch): steps for branch, steps in result.steps.branch_steps.items()},
        **thresholds,
    }
    findings = [
        _about_load(load),
        *findings,
        *_about_kv(load),
        *_about_pressure(setting, branches),
        *_about_large_prefills(thresholds.get("t_large")),
        *evaluator.doubts(setting, [part]),
    ]
    return {**about, "load": load, "branches": branches, "findings": findings}


def _servable(trace: Trace, profile: Profile) -> Trace:
    """The requests that fit, up to MAX_TOKENS of output."""
    kept: list[TraceRequest] = []
    tokens = 0
    for request in trace.requests:
        if request.prompt_tokens + request.output_tokens > profile.longest_servable_tokens:
            continue
        tokens += request.output_tokens
        if tokens > MAX_TOKENS and kept:
            break
        kept.append(request)
    whole = len(kept) == len(trace.requests)
    return trace if whole else replace(trace, requests=tuple(beginning_anew(kept)))


def _lone_latency_s(requests: RequestArrays, profile: Profile, setting: PolicyParams) -> FloatArray:
    """float64[N]: each request's latency on an idle server; equal shapes are simulated once."""
    shapes, which = np.unique(np.stack([requests.prompt_tokens, requests.output_tokens]), axis=1, return_inverse=True)
    apart = RequestArrays(np.arange(shapes.shape[1], dtype=np.float64) * _APART_S, shapes[0], shapes[1])
    latency_s = simulate(setting, apart, profile).last_token_s - apart.arrival_s
    return np.asarray(latency_s[which.reshape(-1)], dtype=np.float64)


def _load(
    trace: Trace,
    requests: RequestArrays,
    profile: Profile,
    result: SimResult,
    planned_s: FloatArray,
    lone_s: FloatArray,
) -> dict[str, Any]:
    """busy_share: of the time from the first arrival to the last answer. drain_s: from the last arrival on.

    slowdown: mean latency over the mean latency of the same requests each alone, nothing cached.
    unfinished_at_last_arrival: requests.
    requests_per_busy_s: what the GPU would serve if it never waited for work, batched as it was.
    """
    latency_s = result.last_token_s - planned_s
    first_s, last_s, end_s = float(planned_s.min()), float(planned_s.max()), float(result.last_token_s.max())
    offered = (len(trace.requests) - 1) / (last_s - first_s) if last_s > first_s else None
    return {
        "requests": len(trace.requests),
        "requests_per_s": offered,
        "requests_per_busy_s": len(trace.requests) / result.steps.busy_s,
        "busy_share": result.steps.busy_s / (end_s - first_s),
        "duration_s": last_s - first_s,
        "drain_s": end_s - last_s,
        "unfinished_at_last_arrival": int((result.last_token_s > last_s).sum()),
        "mean_latency_s": float(latency_s.mean()),
        "slowdown": float(latency_s.mean() / lone_s.mean()),
        "peak_waiting": result.steps.peak_waiting,
        "peak_running": result.steps.peak_running,
        "peak_kv_blocks": result.steps.peak_kv_blocks,
        "kv_blocks": profile.num_kv_blocks - 1,
        "preemptions": result.steps.preemptions,
        "cached_prompt_tokens": int(result.cached_tokens.sum()),
        "closed_loop": trace.mode == SESSIONS,
    }


def _tried(
    trace: Trace, requests: RequestArrays, profile: Profile, setting: PolicyParams, knob: str, values: Sequence[int]
) -> list[dict[str, Any]]:
    """The setting with other values of one threshold: steps that it capped, and the mean latency.

    same_as_before: whether every request's times are those with the value before it, so that the two are one setting.
    """
    branch = Branch.PRESSURE if knob == "n_th" else Branch.LARGE_PREFILL
    found: list[dict[str, Any]] = []
    before = None
    for value in thin(values, _MOST_VALUES):
        changed = replace(setting, n_th=value) if knob == "n_th" else replace(setting, t_large=value)
        result, planned_s = simulate_trace(changed, trace, requests, profile)
        found.append(
            {
                "value": value,
                "steps": result.steps.branch_steps[branch],
                "share": result.steps.branch_steps[branch] / result.steps.num_steps,
                "mean_latency_s": float((result.last_token_s - planned_s).mean()),
                "same_as_before": before is not None and np.array_equal(before, result.token_time_s),
            }
        )
        before = result.token_time_s
    return found


def _about_fit(profile: Profile, fit: dict[str, Any], requests: int) -> list[str]:
    if not fit["requests_too_long"]:
        return []
    many = "no request" if fit["requests_too_long"] == requests else "not all requests"
    return [
        f"It does not fit: {many} can be served. {fit['requests_too_long']} of {requests} need more than "
        f"{fit['longest_servable_tokens']} tokens, the longest {fit['longest_request_tokens']}; profile {profile.name} has "
        f"max_model_len {fit['max_model_len']} and KV room for {fit['kv_tokens']} tokens."
    ]


def _about_load(load: dict[str, Any]) -> str:
    busy, slowdown = load["busy_share"], load["slowdown"]
    alone = "alone and without a cached prefix" if load["cached_prompt_tokens"] else "alone"
    growing = load["drain_s"] > OVERLOAD_DRAIN * load["duration_s"] and not load["closed_loop"]
    if busy >= NEAR_SATURATION and growing:
        word = (
            f"It overloads the profile: {load['unfinished_at_last_arrival']} requests are unfinished when the last arrives, "
            f"and take {load['drain_s']:.0f} s more, so latencies say how long the trace is"
        )
    elif busy >= NEAR_SATURATION:
        word = "It is near saturation: differences between settings are large, and depend on the load"
    elif slowdown < 1.2:
        word = "The load is light: requests hardly meet, so settings can hardly differ"
    else:
        word = "The load is moderate"
    return f"{word}; the GPU is busy {100 * busy:.0f} % of the time, and requests take {slowdown:.2f} times as long as {alone}."


def _about_kv(load: dict[str, Any]) -> list[str]:
    share = load["peak_kv_blocks"] / load["kv_blocks"]
    if load["preemptions"]:
        times = f"{load['preemptions']} time{'' if load['preemptions'] == 1 else 's'}, with up to {100 * share:.0f} % of it held"
        return [f"The KV pool is too small for it at times: requests were preempted {times}."]
    return ["The KV pool is full at times: requests wait for room."] if share > 0.95 and load["peak_waiting"] else []


def _about_pressure(setting: PolicyParams, branches: dict[str, Any]) -> list[str]:
    tried: list[dict[str, Any]] = branches["n_th"]
    if setting.is_static:
        return ["The setting is a static budget: no branch of P-PAS can act under it."]
    acting = [entry["value"] for entry in tried if entry["steps"]]
    if not acting:
        values = f"{tried[0]['value']} to {tried[-1]['value']}" if len(tried) > 1 else f"{tried[0]['value']}"
        return [f"Pressure is never reached for n_th of {values}: n_th and b_cap cannot be identified from this trace."]
    said = []
    if silent := [entry["value"] for entry in tried if entry["value"] > max(acting)]:
        said.append(f"Pressure is never reached from n_th = {silent[0]} on: larger values cannot be told apart here.")
    if same := [entry["value"] for entry in tried if entry["same_as_before"] and entry["value"] <= max(acting)]:
        values = ", ".join(map(str, same))
        said.append(
            f"Under n_th = {values} every request has the same times as under the next lower value: no difference."
        )
    if not branches["steps"][Branch.PRESSURE]:
        said.append(f"Under the setting itself (n_th = {setting.n_th}) no step is capped.")
    return said


def _about_large_prefills(tried: list[dict[str, Any]] | None) -> list[str]:
    if tried is None:
        return []
    acting = [entry["value"] for entry in tried if entry["steps"]]
    if not acting:
        return ["The P-PAS+ branch acts for no t_large of the space: t_large cannot be identified from this trace."]
    silent = [entry["value"] for entry in tried if entry["value"] > max(acting)]
    return [f"The P-PAS+ branch never acts from t_large = {silent[0]} on."] if silent else []
