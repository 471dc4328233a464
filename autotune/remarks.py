"""What the reader of a study's results must be told beside the numbers: one sentence for each doubt about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from autotune import aggregate, choose, metrics
from autotune.noise import HOPELESS_PCT
from autotune.plan import Plan
from autotune.results import StudyResults
from autotune.stats import Interval
from ppas_core.policy import PolicyParams

_FEW_TRACES: Final = 3


def remarks(
    results: StudyResults,
    plan: Plan,
    pick: PolicyParams,
    metric: str,
    noise_before_pct: float | None,
    *,
    simulated: bool,
) -> list[str]:
    """The remarks on `results`, from the search to the check of the export.

    pick: as it was compared. metric: what decides the pick. noise_before_pct: how far the reference varies by itself, as
    measured before the search; None where measurements do not vary. simulated: whether other rates could be simulated.
    """
    return [
        *_on_the_search(results, plan, simulated=simulated),
        *_on_the_pick(results, plan, pick),
        *_on_the_gain(results, metric),
        *_on_the_static_budgets(results),
        *_on_the_comparison(results, plan, pick, metric),
        *_on_the_server(results, noise_before_pct),
        *(
            f"regime {regime} is at or past saturation: its queue still grew when the last request arrived, so that "
            "figures there say how long the trace is; they are of low confidence"
            for regime in results.saturated
        ),
    ]


def _on_the_search(results: StudyResults, plan: Plan, *, simulated: bool) -> Iterator[str]:
    unseen_pct = max((noise.visible_held_out_pct for noise in results.noise), default=0.0)
    if unseen_pct > HOPELESS_PCT:
        yield (
            f"measurements vary so much here that no gain below {unseen_pct:.0f} % could be seen: a quieter machine, "
            "longer traces or more held-out traces are needed before anything can be concluded"
        )
    if plan.spec.protect == "everywhere" and not simulated:
        yield "other rates could not be simulated, so that the pick is protected on the traffic as it is only"
    if failed := [trial for trial in results.trials if trial.state == "failed"]:
        yield f"{len(failed)} of {len(results.trials)} trials failed; the first: {failed[0].reason}"


def _on_the_pick(results: StudyResults, plan: Plan, pick: PolicyParams) -> Iterator[str]:
    picked = results.trials[results.pick_trial].setting
    if pick.is_static:
        why = "on the tuning traces no P-PAS setting was better"
        if not picked.to_params().is_static:
            why = f"on the tuning traces {picked.label} never capped a step, so it was nothing else"
        yield f"the pick is a static budget of {pick.b_max}: {why}"
    for name, end in plan.space.ends(pick).items():
        value = getattr(pick, name)
        if value != getattr(plan.reference, name):
            yield f"the pick has the {end} {name} of the search space, {value}: what lies beyond may be better still"


def _on_the_gain(results: StudyResults, metric: str) -> Iterator[str]:
    """Where the gain that led to the pick is another than the one on held-out traces."""
    compared = results.comparisons[0]
    held_out, tuning = compared.overall.get(metric), results.trials[results.pick_trial].objectives.get(metric)
    if held_out is None or tuning is None or compared.verdict == "unchanged" or compared.did_the_same:
        return
    gain_pct = aggregate.improvement_pct(tuning)
    if held_out.low_pct <= gain_pct <= held_out.high_pct or not held_out.is_measurable:
        return
    effect = Interval(held_out.improvement_pct, held_out.low_pct, held_out.high_pct)
    word = "better" if gain_pct >= 0 else "worse"
    said = (
        f"{metrics.metric(metric).label} was {abs(gain_pct):.1f} % {word} on the tuning traces and is "
        f"{choose.change(effect, compared.confidence)} on the held-out ones"
    )
    if gain_pct < held_out.high_pct:
        yield f"{said}: these are other traces, and those that the search did not see are the ones to quote"
        return
    tried = sum(trial.state == "ok" and trial.arm != "random" for trial in results.trials)
    traces = sum(trace.purpose == "tuning" for trace in results.traces)
    yield (
        f"{said}: the best of {tried} {'noisy measurements' if results.noise else 'settings'} on {traces} tuning "
        f"trace{'' if traces == 1 else 's'} is flattered, and held-out traces are other traces; expect the gain on those"
    )


def _on_the_static_budgets(results: StudyResults) -> Iterator[str]:
    """Where the best static budget lies at an end of those that were tried."""
    settings = [t.setting.to_params() for t in results.trials if t.state == "ok" and t.arm != "random"]
    tried = sorted({params.b_max for params in settings if params.is_static})
    best = results.best_static.to_params().b_max
    if len(tried) > 1 and best in (tried[0], tried[-1]):
        end, beyond = ("smallest", "smaller") if best == tried[0] else ("largest", "larger")
        yield (
            f"the best static budget, {best}, is the {end} of the {len(tried)} that were tried: a {beyond} one may be better "
            "still; add one to static_budgets"
        )


def _on_the_comparison(results: StudyResults, plan: Plan, pick: PolicyParams, metric: str) -> Iterator[str]:
    with_reference, with_static = results.comparisons[:2]
    if with_static.verdict == "worse":
        yield (
            f"the pick is clearly worse than the best static budget, {results.best_static.label}, on held-out "
            f"traces; the {results.exported_role} is exported"
        )
    fewest = min(Counter(trace.regime for trace in plan.held_out).values())
    if fewest < _FEW_TRACES:
        yield (
            f"a load regime has only {fewest} held-out trace{'' if fewest == 1 else 's'}: the intervals are wide, and "
            f"little is known of how traces differ; {_FEW_TRACES} or more are better"
        )
    yield from plan.evaluator.doubts(pick, [*plan.tuning, *plan.held_out])
    gain_pct, error_pct = with_reference.overall[metric].improvement_pct, results.simulator_error_pct
    if with_reference.verdict == "better" and aggregate.is_within_error(gain_pct, error_pct):
        yield (
            f"the gain of {gain_pct:.1f} % is within the simulator's own error of {error_pct:.1f} % on published "
            "runs: confirm it on a live server"
        )


def _on_the_server(results: StudyResults, noise_before_pct: float | None) -> Iterator[str]:
    drifts = [abs(point.change_pct) for point in results.drift if point.change_pct is not None]
    if noise_before_pct is not None and drifts and max(drifts) > noise_before_pct:
        yield (
            f"the reference drifted by up to {max(drifts):.1f} % during the search, more than its noise before explains "
            f"({noise_before_pct:.1f} %); the ranking of the trials suffers, the interleaved comparison does not"
        )
    if (memory := results.server_memory) is not None and (memory.is_near or memory.restarts):
        again = f"; servers started anew for that, between trials: {memory.restarts}" if memory.restarts else ""
        yield f"the server leaks memory: {memory.sentence}{again}"
    if (cold := results.cold) is not None and cold.change_pct is None:
        yield f"the export could not be checked on a cold server: {cold.reason}"
    elif cold is not None and cold.is_beyond_noise and (cold.change_pct or 0) > 0:
        yield f"the export does not do cold what was measured hot: {cold.reason}; find out why before it is used"
    elif cold is not None and cold.is_beyond_noise:
        yield (
            f"the export does better on a new server than it was measured: {cold.reason}; servers differ from start to start, "
            "and one that has run for long may be slower"
        )
