"""What a study measured of another setting than the exported one, as cost of taking it instead."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune import aggregate, choose
from autotune.results import StudyResults, Trial
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """ratio: of the preferred objective to the exported setting's, above 1 is worse. where: on which traces, in words."""

    ratio: float
    where: str


def acting(params: PolicyParams) -> PolicyParams:
    """`params` without the knobs that cannot act: those of a static budget."""
    return PolicyParams.static(params.b_max, max_num_seqs=params.max_num_seqs) if params.is_static else params


def preferred_label(results: StudyResults) -> str:
    """What the costs are of, for people."""
    preferred = _preferred(results)
    labels = [objective.label for objective in results.objectives if objective.metric in preferred]
    return labels[0] if len(labels) == 1 else "the preferred objective"


def measured_cost(results: StudyResults, setting: PolicyParams, other: PolicyParams) -> MeasuredCost | None:
    """What `other` costs against `setting`: on the held-out traces where both were replayed there, else on the tuning
    traces; None where the study did not measure both.
    """
    preferred = _preferred(results)
    if not preferred:
        return None
    taken, base = _held_out(results, other), _held_out(results, setting)
    if taken is not None and base is not None:
        try:
            ratios = [aggregate.objective(name, taken, base) for name in preferred]
            return MeasuredCost(aggregate.geometric_mean(ratios), "on the held-out traces")
        except (NoResult, KeyError):
            pass
    ours, theirs = _trial(results, setting), _trial(results, other)
    if ours is None or theirs is None:
        return None
    ratio = choose.score(theirs.objectives, preferred) / choose.score(ours.objectives, preferred)
    where = f"on the tuning traces, trial {theirs.number} against trial {ours.number}"
    return MeasuredCost(ratio, where) if math.isfinite(ratio) else None


def _preferred(results: StudyResults) -> tuple[str, ...]:
    """The metrics that decide; none where results by hand name one that is no objective of theirs."""
    try:
        return choose.preferred_of(results)
    except InvalidInput:
        return ()


def _held_out(results: StudyResults, params: PolicyParams) -> dict[str, dict[str, float]] | None:
    found = (held.regimes for held in results.held_out if acting(held.setting.to_params()) == params)
    return next(found, None)


def _trial(results: StudyResults, params: PolicyParams) -> Trial | None:
    found = (trial for trial in results.trials if trial.state == "ok" and acting(trial.setting.to_params()) == params)
    return next(found, None)
