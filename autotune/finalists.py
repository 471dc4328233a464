"""The finalists on held-out traces: interleaved, paired per request, and the pick once more on a cold server."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from autotune import aggregate, metrics, stages
from autotune.compare import compare_settings
from autotune.export import write_vllm_config
from autotune.live import LiveEvaluator
from autotune.measure import Measurement
from autotune.noise import half_width
from autotune.plan import static_like
from autotune.race import in_turn
from autotune.records import Origin, Replay
from autotune.replay.kept import keep_replay, read_replay
from autotune.results import ColdCheck, Comparison
from autotune.runfolder import folder_name
from autotune.study_noise import per_regime
from ppas_core.errors import InvalidInput, NoResult, PpasError
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams
from traces.format import Trace

_FAILURE: Final = "failed.json"
_COLD_TRACES = 4
"""Held-out traces replayed on the cold server; it costs a start and need not be precise."""


class FinalistFailed(NoResult):
    """A setting that did well on the tuning traces cannot be measured on a held-out one; `params` is that setting."""

    def __init__(self, params: PolicyParams, reason: str) -> None:
        super().__init__(reason)
        self.params = params


def replay_held_out(study: Measurement, finalists: dict[str, PolicyParams]) -> dict[str, list[Replay]]:
    """Role to replays on the held-out traces, in their order.

    The finalists take turns on every trace, forwards on one and backwards on the next (A B B A), so that a slow drift
    of the machine hits all alike. A simulated study also replays every static budget, for the picture. A live study
    keeps each finished replay, and a later process reads back the traces that all of these finalists went through. Replays
    of different days do not pair: a trace that a kill cut short is replayed anew by all, and with another finalist all
    traces are. That a finalist failed is kept as well, so that a study given again chooses the others at once.

    Raises FinalistFailed when one cannot be measured there, NoResult when that is the reference.
    """
    plan, progress = study.plan, study.progress
    turns = _kept_folder(study, "turns", finalists.values())
    _raise_known_failure(turns, finalists.values())
    roles = list(finalists)
    replays: dict[str, list[Replay]] = {role: [] for role in roles}
    others = _other_statics(study, finalists) if not isinstance(plan.evaluator, LiveEvaluator) else []
    progress.begin(stages.HELD_OUT, len(plan.held_out) * len(roles) + len(others))
    for number, trace in enumerate(plan.held_out):
        turn = _kept_turn(turns, number, finalists.values(), trace)
        for role in roles if number % 2 == 0 else roles[::-1]:
            params = finalists[role]
            if params not in turn:  # two roles may name the same setting
                replay = partial(_new_and_kept, turns, number, params, trace, plan.evaluator.replay)
                turn[params] = _usable(replay, params, plan.reference, turns)
            replays[role].append(turn[params])
            progress.advance(f"{role}, {trace.name}")
    for params in others:
        with contextlib.suppress(PpasError):  # it is there for the picture only; the search recorded why it fails
            replays[params.label()] = [plan.evaluator.replay(params, trace) for trace in plan.held_out]
        progress.advance(params.label())
    progress.end()
    for role, found in replays.items():
        study.run.save_requests(f"finalists/{role}", found)
    return replays


def compare_finalists(
    study: Measurement, held_out: dict[str, list[Replay]], saturated: Collection[str]
) -> list[Comparison]:
    """The pick against the reference and the best static budget, and these two; the runner-up against the reference.

    saturated: regimes past saturation; each effect is given without them as well.
    """
    reference = study.plan.reference_role
    pairs = [("tuned", reference), ("tuned", "best static"), (reference, "best static")]
    if "runner-up" in held_out:
        pairs.append(("runner-up", reference))
    study.progress.begin("Comparing on held-out traces", len(pairs))
    comparisons = []
    for candidate, against in pairs:
        comparisons.append(
            compare_settings(
                (candidate, held_out[candidate]),
                (against, held_out[against]),
                study.plan.spec,
                study.preferred,
                noise=study.study_noise,
                saturated=saturated,
                simulator_error_pct=study.plan.evaluator.error_pct,
            )
        )
        study.progress.advance(f"{candidate} against {against}")
    study.progress.end()
    return comparisons


def check_cold(study: Measurement, exported: PolicyParams, hot: Sequence[Replay]) -> ColdCheck | None:
    """The exported setting on a server started with exactly the exported file, against its hot measurements.

    hot: its replays on the held-out traces. None where there is nothing to start, or the study
    asks for none.
    """
    evaluator, plan = study.plan.evaluator, study.plan
    server = plan.spec.server
    if not isinstance(evaluator, LiveEvaluator) or server is None or server.url or not server.cold_check:
        return None
    config = write_vllm_config(exported, study.run.path / "servers" / "exported.yaml", server.flags)
    places = cold_places(plan.held_out)
    metric = study.preferred[0]
    folder = _kept_folder(study, "cold", [exported])
    study.progress.begin(stages.COLD, len(places))
    cold: list[Replay] = []
    try:
        with contextlib.ExitStack() as stack:
            replay: _Replays | None = None
            for number in places:
                trace = plan.held_out[number]
                found = read_replay(_kept_file(folder, number, exported), exported, trace)
                if found is None:
                    replay = replay or stack.enter_context(evaluator.cold(config))
                    found = _new_and_kept(folder, number, exported, trace, replay)
                cold.append(found)
                study.progress.advance(trace.name)
        study.run.save_requests("finalists/cold", cold)
        return cold_against_hot(metric, cold, [hot[place] for place in places], study)
    except NoResult as error:
        return ColdCheck(metric=metric, num_traces=len(cold), change_pct=None, reason=str(error))
    finally:
        study.progress.end()


def cold_places(held_out: Sequence[Trace]) -> list[int]:
    """Places of the held-out traces that the cold server gets: of each regime in turn."""
    regimes = [trace.regime for trace in held_out]
    return sorted(in_turn(range(len(regimes)), regimes)[:_COLD_TRACES])


def cold_against_hot(metric: str, cold: Sequence[Replay], hot: Sequence[Replay], study: Measurement) -> ColdCheck:
    """How far `metric` on a cold server is from what was measured hot, on the same traces, and whether noise explains it.

    Raises NoResult when a request failed, or the metric is undefined.
    """
    means = [aggregate.regime_means(side, [metric], study.limits) for side in (cold, hot)]
    sign = metrics.sign(metric)
    change_pct = 100 * (aggregate.objective(metric, *means) ** sign - 1)  # cold over hot, whichever is better
    reason = f"{metrics.metric(metric).label} on the cold server is {abs(change_pct):.1f} % "
    reason += "above hot" if change_pct > 0 else "below hot"
    noise = None if study.study_noise is None else study.study_noise.of(metric)
    noise_pct = None if noise is None else 100 * half_width(noise, per_regime(cold), study.plan.spec.confidence)
    if noise_pct is not None:
        size = "more" if abs(change_pct) > noise_pct else "no more"
        reason += f", {size} than the noise explains ({noise_pct:.1f} %)"
    return ColdCheck(
        metric=metric, num_traces=len(cold), change_pct=sign * change_pct, reason=reason, noise_pct=noise_pct
    )


def _usable(replay: Callable[[], Replay], params: PolicyParams, reference: PolicyParams, folder: Path | None) -> Replay:
    try:
        found = replay()
        aggregate.regime_means([found], ())  # refuses one with failed requests
        return found
    except NoResult as error:
        if error.stops_study:
            raise
        if params == reference:
            raise NoResult(
                f"the reference {reference.label()} cannot be measured on held-out traces: {error}; see to the server and "
                "its machine, then give the same command again"
            ) from None
        failure = FinalistFailed(params, f"on held-out traces: {error}")
        if folder is not None:
            entry = {"ppas": params.to_dict(), "reason": str(failure)}
            write_atomically(folder / _FAILURE, dump_json(entry, indent=1).encode() + b"\n")
        raise failure from None


def _raise_known_failure(folder: Path | None, settings: Iterable[PolicyParams]) -> None:
    """Raises FinalistFailed where an earlier process found that one of `settings` does."""
    if folder is None:
        return
    try:
        entry = load_json((folder / _FAILURE).read_bytes())
        params, reason = PolicyParams.from_dict(entry["ppas"]), str(entry["reason"])
    except (OSError, ValueError, TypeError, KeyError, InvalidInput):
        return  # none, or damaged: it is found out again
    if params in settings:
        raise FinalistFailed(params, reason)


_Replays = Callable[[PolicyParams, Trace], Replay]


def _kept_folder(study: Measurement, kind: str, settings: Iterable[PolicyParams]) -> Path | None:
    """Where finished replays of exactly these settings are kept; None where measuring again costs and changes nothing."""
    if study.plan.evaluator.origin is not Origin.LIVE:
        return None
    named = dump_json([sorted(params.label() for params in settings), [t.digest for t in study.plan.held_out]])
    return study.run.path / "finalists" / f"{kind}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"


def _kept_file(folder: Path | None, number: int, params: PolicyParams) -> Path:
    return (folder or Path()) / f"{number:03}-{folder_name(params.label())}.parquet"


def _kept_turn(
    folder: Path | None, number: int, settings: Iterable[PolicyParams], trace: Trace
) -> dict[PolicyParams, Replay]:
    """The kept replays of held-out trace `number`, of all `settings`; where one is missing none, and the rest is removed."""
    files = {} if folder is None else {params: _kept_file(folder, number, params) for params in settings}
    turn: dict[PolicyParams, Replay] = {}
    for params, file in files.items():
        if (found := read_replay(file, params, trace)) is None:
            break
        turn[params] = found
    else:
        return turn
    for file in files.values():
        file.unlink(missing_ok=True)
    return {}


def _new_and_kept(folder: Path | None, number: int, params: PolicyParams, trace: Trace, replay: _Replays) -> Replay:
    """Replays held-out trace `number`, and keeps that in `folder`; one with failed requests is not kept."""
    found = replay(params, trace)
    if folder is not None and not found.requests.failures():
        keep_replay(found, _kept_file(folder, number, params))
    return found


def _other_statics(study: Measurement, finalists: dict[str, PolicyParams]) -> list[PolicyParams]:
    plan = study.plan
    budgets = [static_like(plan.reference, budget) for budget in plan.spec.static_budgets]
    return [params for params in budgets if params.b_max != finalists["best static"].b_max]
