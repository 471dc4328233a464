"""A profile of a server from its own step logs: measure it, or take replays; step cost, delay and their doubts come out."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from autotune import interrupt, metrics, provenance, stages
from autotune.calibration.device import device_name
from autotune.calibration.replays import DEFAULT_TARGET_S, Aim, Pace, check_seconds, check_trace
from autotune.calibration.replays import plan as replays_of
from autotune.evaluate import Evaluator, SimulatedEvaluator
from autotune.plan import Plan
from autotune.progress import Progress, Silent
from autotune.records import FloatArray, Replay
from ppas_core import __version__
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.sim.cost import StepCost
from ppas_core.sim.fit import StepFeatures, StepFit, fit_steps, lone_requests
from ppas_core.sim.profile import Profile
from ppas_core.sim.requests import RequestArrays
from ppas_core.sim.simulate import simulate
from traces.format import Trace

CHECKED: Final = ("mean_latency_s", "p95_latency_s", "mean_ttft_s", "mean_tpot_s", "makespan_s")
"""Metrics by which a fitted profile is held against the replays."""
_GRID: Final = 2000
"""Settings of a space looked through for the budgets that it may ask for."""
_PRIVATE: Final = ("api_key", "hf_token", "host", "port", "model")
"""Flags of the server that a profile does not repeat: secrets, and what says nothing of its speed."""
_DEPTHS: Final = {"SyncPpasScheduler": 1, "AsyncPpasScheduler": 2}


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """What a profile needs besides times; all of it said by the server, see `Profile`. about: what else it said."""

    model: str
    gpu: str
    vllm_version: str
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    pipeline_depth: int
    prefix_caching: bool
    about: Mapping[str, Any]

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], *, gpu: str) -> MeasuredServer:
        """From `ServerFacts.to_dict()`. Raises InvalidInput, with the remedy, where the server did not tell."""
        remedies = {
            "model": "does it serve /v1/models?",
            "vllm_version": "does it serve /version?",
            "max_model_len": "does it serve /v1/models? An API key may be missing",
            "kv_blocks": "its /metrics must hold vllm:cache_config_info: start it without --disable-log-stats",
            "block_size": "its /metrics must hold vllm:cache_config_info: start it without --disable-log-stats",
        }
        for name, remedy in remedies.items():
            if facts.get(name) is None:
                raise InvalidInput(f"the server does not tell its {name}, and a profile must not guess it; {remedy}")
        depth = _DEPTHS.get(str(facts.get("scheduler")))
        if depth is None:
            raise InvalidInput(
                f"the server's scheduler is {facts.get('scheduler')!r}, so it is not known whether it plans ahead; allowed: "
                f"{' or '.join(_DEPTHS)}, which the log of a server started by ppas names"
            )
        return cls(
            model=str(facts["model"]),
            gpu=gpu,
            vllm_version=str(facts["vllm_version"]),
            num_kv_blocks=int(facts["kv_blocks"]),
            block_size=int(facts["block_size"]),
            max_model_len=int(facts["max_model_len"]),
            pipeline_depth=depth,
            prefix_caching=str((facts.get("cache") or {}).get("enable_prefix_caching")) == "True",
            about={
                "scheduler": facts["scheduler"],
                "flags": {name: value for name, value in (facts.get("flags") or {}).items() if name not in _PRIVATE},
            },
        )

    @classmethod
    def from_profile(cls, profile: Profile) -> MeasuredServer:
        """A simulated server: as its profile says."""
        return cls(
            model=profile.model,
            gpu=profile.gpu,
            vllm_version=profile.vllm_version,
            num_kv_blocks=profile.num_kv_blocks,
            block_size=profile.block_size,
            max_model_len=profile.max_model_len,
            pipeline_depth=profile.pipeline_depth,
            prefix_caching=profile.prefix_caching,
            about={"simulated_from": profile.name, "simulated_from_digest": profile.digest},
        )


def calibrate(
    evaluator: Evaluator,
    traces: Sequence[Trace],
    *,
    budgets: Sequence[int],
    max_num_seqs: int,
    reference: PolicyParams | None,
    name: str,
    device: str | None = None,
    target_s: float = DEFAULT_TARGET_S,
    progress: Progress | None = None,
    seed: int = 0,
) -> Profile:
    """Measures the evaluator's server with replays of static budgets and returns the profile fitted to them.

    To be called within the evaluator's session. A live server must be one that the tuner starts: its step log is
    read. A simulated one plays the truth that is to be found again.

    traces: the workload; its lengths are covered, and its busiest stretch is the check. budgets: that will be asked
    for; the least and the greatest are covered. reference: the setting of the check, which is not fitted; None for no
    check. device: the GPU's name for the profile; None asks this machine. target_s: seconds of load aimed at.
    Raises InvalidInput for what cannot be calibrated, NoResult when the first replay fails or too little was measured.
    """
    progress = progress or Silent()
    if isinstance(evaluator, SimulatedEvaluator):
        evaluator = replace(evaluator, record_steps=True)
    started = time.perf_counter()
    aim = Aim.of(traces, budgets, max_num_seqs)
    progress.begin("Replaying once before calibrating", 1)
    params, trace = aim.first
    first = evaluator.replay(params, trace)
    _require_usable(first)
    progress.advance()
    progress.end()
    server = _server_of(evaluator, device)
    pool_tokens = (server.num_kv_blocks - 1) * server.block_size
    records = first.requests
    pace = Pace(
        prefill_s=float(records.first_token_s[0] - records.sent_s[0]),
        decode_s=float(records.last_token_s[0] - records.first_token_s[0]) / max(1, aim.output_tokens - 1),
    )
    planned = replays_of(
        aim,
        pace,
        pool_tokens=pool_tokens,
        longest_tokens=min(server.max_model_len, pool_tokens + 1),
        target_s=target_s,
    )
    checks = [(reference, check_trace(traces, check_seconds(target_s)))] if reference is not None else []
    measured: list[Replay] = [first]
    checked: list[Replay] = []
    failed: dict[str, str] = {}
    progress.begin(stages.CALIBRATION, len(planned) + len(checks))
    for place, (params, trace) in enumerate([*planned, *checks]):
        interrupt.check()
        try:
            (measured if place < len(planned) else checked).append(evaluator.replay(params, trace))
        except NoResult as error:
            if error.stops_study:
                raise
            failed[trace.name] = str(error).splitlines()[0]
        progress.advance(trace.name)
    progress.end()
    about = {
        "calibration": {
            "target_s": target_s,
            "took_s": round(time.perf_counter() - started, 1),
            "budgets": list(aim.budgets),
            "prompt_tokens": list(aim.prompt_tokens),
            "failed_replays": failed,
        }
    }
    return fit_profile(measured, server, name=name, check=checked, source=about, seed=seed)


def calibrate_plan(
    plan: Plan,
    *,
    name: str,
    device: str | None = None,
    target_s: float = DEFAULT_TARGET_S,
    progress: Progress | None = None,
) -> Profile:
    """`calibrate` for what a study will ask of its server: its budgets, its tuning traces, its reference as the check.

    Where the reference is a static budget, the first known or possible setting with a cap takes its place in the check.
    """
    grid = list(plan.space.grid(_GRID))
    settings = [*(params for _, params in plan.known), *grid]
    capped = [params for params in (plan.reference, *settings) if not params.is_static]
    return calibrate(
        plan.evaluator,
        plan.tuning,
        budgets=[budget for params in settings for budget in (params.b_max, params.b_cap)],
        max_num_seqs=plan.reference.max_num_seqs,
        reference=capped[0] if capped else plan.reference,
        name=name,
        device=device,
        target_s=target_s,
        progress=progress,
        seed=plan.spec.seed,
    )


def _require_usable(first: Replay) -> None:
    """Raises where the first replay shows that nothing will come of the others."""
    if first.steps is None:
        raise InvalidInput(
            "this server's step log cannot be read, and a calibration needs it; let the tuner start the server (leave "
            "out server.url)"
        )
    if failures := first.requests.failures():
        prompt, output = int(first.requests.prompt_tokens[0]), int(first.requests.output_tokens[0])
        raise NoResult(
            f"a request of {prompt} + {output} tokens, the workload's longest prompt, failed ({', '.join(failures)}): "
            "start the server with a larger --max-model-len, or take shorter prompts"
        )


def _server_of(evaluator: Evaluator, device: str | None) -> MeasuredServer:
    if isinstance(evaluator, SimulatedEvaluator):
        return MeasuredServer.from_profile(evaluator.profile)
    return MeasuredServer.from_facts(evaluator.describe().get("server") or {}, gpu=device or device_name())


def fit_profile(
    replays: Sequence[Replay],
    server: MeasuredServer,
    *,
    name: str,
    check: Sequence[Replay] = (),
    source: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Profile:
    """The profile that describes `replays`, each with its step log in `steps`.

    check: further replays, not fitted; how far the profile is off on them is its `held_out` error.
    source: entries for the provenance, such as what the replays were. Deterministic for a seed but for the date.
    Raises InvalidInput when a replay has no step log, NoResult when the logs hold too few steps.
    """
    if not replays:
        raise InvalidInput("there are 0 replays to fit; give at least one")
    for replay in replays:
        if replay.steps is None:
            raise InvalidInput(
                f"the replay of {replay.trace_name!r} under {replay.params.label()} has no step log; only a server that the "
                "tuner starts, or a simulator that records its steps, gives one"
            )
    steps = StepFeatures.join([StepFeatures.of(one.steps) for one in replays if one.steps is not None])
    fit = fit_steps(steps, seed=seed)
    delay_s, delay_notes = _frontend_delay(replays)
    profile = Profile(
        name=name,
        model=server.model,
        gpu=server.gpu,
        vllm_version=server.vllm_version,
        cost=_rounded(fit),
        frontend_delay_s=float(f"{delay_s:.6g}"),
        num_kv_blocks=server.num_kv_blocks,
        block_size=server.block_size,
        max_model_len=server.max_model_len,
        pipeline_depth=server.pipeline_depth,
        prefix_caching=server.prefix_caching,
        provenance={
            "source": "fitted to step logs by ppas calibrate",
            "date": provenance.now(),
            "ppas_autotune": __version__,
            "python": platform.python_version(),
            "server": dict(server.about),
            "origin": str(replays[0].origin),
            "replays": [_replay_notes(one, "fitted") for one in replays]
            + [_replay_notes(one, "held out") for one in check],
            "steps_sha256": _digest(replays),
            **(source or {}),
        },
    )
    notes: dict[str, Any] = {
        **fit.to_dict(),
        "frontend_delay": delay_notes,
        "measured_range": _ranges(replays, steps),
        "replays": [prediction(profile, one) for one in replays],
    }
    if check:
        checked = [prediction(profile, one) for one in check]
        notes["held_out_replays"] = checked
        notes |= _held_out_error(checked)
    return replace(profile, fit=notes)


def prediction(profile: Profile, replay: Replay) -> dict[str, Any]:
    """`replay` simulated on `profile` with the times at which its requests were really sent, beside what was measured.

    Latencies count from sending. Plain JSON values: the setting, and per metric measured, predicted and the error
    predicted / measured - 1, None where either is undefined.
    """
    records = replay.requests
    answer: dict[str, Any] = {"trace": replay.trace_name, "setting": replay.params.label(), "requests": len(records)}
    if not records.ok.all():
        return {**answer, "reason": f"{int((~records.ok).sum())} of its requests failed"}
    order = np.argsort(records.sent_s, kind="stable")
    sent_s = records.sent_s[order] - records.sent_s.min()
    arrays = RequestArrays(sent_s, records.prompt_tokens[order], records.output_tokens[order])
    result = simulate(replay.params, arrays, profile)
    measured = _figures(records.sent_s, records.first_token_s, records.last_token_s, records.output_tokens)
    predicted = _figures(sent_s, result.first_token_s, result.last_token_s, records.output_tokens[order])
    for metric in CHECKED:
        one, other = measured[metric], predicted[metric]
        if np.isfinite([one, other]).all() and one > 0:
            answer[metric] = {
                "measured": round(one, 6),
                "predicted": round(other, 6),
                "error": round(other / one - 1, 5),
            }
    return answer


def _figures(sent_s: FloatArray, first_s: FloatArray, last_s: FloatArray, outputs: Any) -> dict[str, float]:
    latency_s = last_s - sent_s
    more = outputs > 1
    tpot_s = (last_s - first_s)[more] / (outputs[more] - 1)
    return {
        "mean_latency_s": float(metrics.mean(latency_s)),
        "p95_latency_s": float(metrics.percentile(latency_s, 95)),
        "mean_ttft_s": float(metrics.mean(first_s - sent_s)),
        "mean_tpot_s": float(metrics.mean(tpot_s)),
        "makespan_s": float(last_s.max() - sent_s.min()),
    }


def _frontend_delay(replays: Sequence[Replay]) -> tuple[float, dict[str, Any]]:
    """Median over lone requests of TTFT less their steps' time, in seconds, and notes on it."""
    delays, prompts = [np.empty(0)], [np.empty(0, np.int64)]
    for replay in replays:
        records = replay.requests
        if replay.steps is None or not records.ok.all():
            continue
        found = lone_requests(
            replay.steps, records.sent_s, records.first_token_s, records.last_token_s, records.prompt_tokens
        )
        lone = np.isfinite(found)
        delays.append(found[lone])
        prompts.append(records.prompt_tokens[lone])
    delay_s, prompt_tokens = np.concatenate(delays), np.concatenate(prompts)
    if not len(delay_s):
        return 0.0, {"status": "not identified", "reason": "no request had the server to itself; 0 is assumed"}
    by_length = {
        str(length): round(float(np.median(delay_s[prompt_tokens == length])), 6) for length in np.unique(prompt_tokens)
    }
    return max(0.0, float(np.median(delay_s))), {
        "status": "identified",
        "how": "TTFT of requests that had the server to themselves, less the time of their steps; median",
        "requests": len(delay_s),
        "lowest_s": round(float(delay_s.min()), 6),
        "highest_s": round(float(delay_s.max()), 6),
        "by_prompt_tokens_s": by_length,
    }


def _held_out_error(checked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry by which the tuner itself knows a profile's error; see `Profile`."""
    names = {"mean_latency_s": "avg_latency", "p95_latency_s": "p95_latency", "mean_ttft_s": "avg_ttft"}
    errors = {
        name: round(float(np.mean([abs(one[metric]["error"]) for one in checked if metric in one])), 5)
        for metric, name in names.items()
        if any(metric in one for one in checked)
    }
    return {"held_out_ppas_error_per_regime": {"mean_absolute": errors}} if errors else {}


def _ranges(replays: Sequence[Replay], steps: StepFeatures) -> dict[str, list[int]]:
    """What was covered. Output lengths are not limited: how many decoded at once, and at which context, is what counts."""
    budgets = [budget for one in replays for budget in (one.params.b_max, one.params.b_cap)]
    prompts = np.concatenate([one.requests.prompt_tokens for one in replays])
    decodes = steps.decode_tokens[steps.is_decode]
    return {
        "budget_tokens": [min(budgets), max(budgets)],
        "prompt_tokens": [int(prompts.min()), int(prompts.max())],
        **({"decodes_in_a_step": [int(decodes.min()), int(decodes.max())]} if len(decodes) else {}),
    }


def _rounded(fit: StepFit) -> StepCost:
    return StepCost(**{name: float(f"{value:.6g}") for name, value in fit.cost.to_dict().items()})


def _replay_notes(replay: Replay, use: str) -> dict[str, Any]:
    return {
        "trace": replay.trace_name,
        "trace_digest": replay.trace_digest,
        "setting": replay.params.label(),
        "use": use,
        "steps": 0 if replay.steps is None else len(replay.steps),
    }


def _digest(replays: Sequence[Replay]) -> str:
    """SHA-256 of the step logs' numbers."""
    sha = hashlib.sha256()
    for replay in replays:
        if replay.steps is not None:
            sha.update(replay.steps.to_csv(index=False, lineterminator="\n").encode())
    return sha.hexdigest()
