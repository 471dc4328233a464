"""How long each stage of a live study will take, as its plan says: for whoever asks when the study will be over."""

from __future__ import annotations

from typing import Final

from autotune.heartbeat import SEARCH_STAGE
from autotune.plan import CONFIRMED, FINALISTS, NOISE_RUNS, REFERENCE_EVERY, Plan
from autotune.records import Origin

NOISE_STAGE: Final = "Measuring the noise (reference against itself)"
CALIBRATION_STAGE: Final = "Calibrating"
CONFIRMATION_STAGE: Final = "Measuring the best settings again"
HELD_OUT_STAGE: Final = "Replaying held-out traces"
COLD_STAGE: Final = "Checking the export on a cold server"


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
        NOISE_STAGE: NOISE_RUNS * per_setting_s,
        CALIBRATION_STAGE: found.calibration_s,
        SEARCH_STAGE: search_s if budget_s is None else min(search_s, budget_s),
        CONFIRMATION_STAGE: CONFIRMED * per_setting_s,
        HELD_OUT_STAGE: FINALISTS * per_finalist_s,
        COLD_STAGE: colds * per_finalist_s,
    }
