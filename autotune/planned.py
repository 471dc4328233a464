"""How long each stage of a live study will take, as its plan says: for whoever asks when the study will be over."""

from __future__ import annotations

from autotune import stages
from autotune.plan import CONFIRMED, FINALISTS, NOISE_RUNS, REFERENCE_EVERY, Plan
from autotune.records import Origin


def planned_stages_s(plan: Plan) -> dict[str, float]:
    """Seconds of load by stage, in the order in which they come; empty for a simulated study, which does not wait.

    What a stage does beside replaying, such as starting a server, is not in it.
    """
    if plan.evaluator.origin is not Origin.LIVE:
        return {}
    found, server, budget_s = plan.estimate(), plan.spec.server, plan.spec.time_budget_s()
    again = plan.spec.trials // REFERENCE_EVERY  # the reference, to see drift
    per_setting_s = found.reference_s / (NOISE_RUNS + again + CONFIRMED)
    search_s = found.search_s + again * per_setting_s
    colds = int(server is not None and server.cold_check and server.url is None)
    per_finalist_s = found.finalists_s / (FINALISTS + colds)
    return {
        stages.NOISE: NOISE_RUNS * per_setting_s,
        stages.CALIBRATION: found.calibration_s,
        stages.SEARCH: search_s if budget_s is None else min(search_s, budget_s),
        stages.CONFIRMATION: CONFIRMED * per_setting_s,
        stages.HELD_OUT: FINALISTS * per_finalist_s,
        stages.COLD: colds * per_finalist_s,
    }
