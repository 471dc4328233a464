"""A sweep without a search: given settings on all tuning traces, and the paper's table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from autotune import aggregate
from autotune.measure import Measurement
from autotune.plan import Plan
from autotune.progress import Progress, Silent
from autotune.runfolder import folder_name, open_run
from autotune.study import Outcome
from ppas_core.errors import NoResult
from ppas_core.policy import PolicyParams

PAPER_METRICS: Final = ("mean_latency_s", "p95_latency_s", "mean_ttft_s", "mean_tpot_s", "makespan_s")
"""The columns of the paper's table."""


@dataclass(frozen=True, slots=True)
class Swept:
    """One setting of a sweep, with what was measured of it or the reason why nothing was."""

    params: PolicyParams
    outcome: Outcome

    def improvement_pct(self, metric: str, baseline: Swept) -> float | None:
        """The paper's aggregate against `baseline` in per cent, positive is better.

        None where either failed, or the metric is undefined: with one-token outputs there is no TPOT.
        """
        if self.outcome.reason is not None or baseline.outcome.reason is not None:
            return None
        try:
            ratio = aggregate.objective(metric, self.outcome.regimes, baseline.outcome.regimes)
        except NoResult:
            return None
        return aggregate.improvement_pct(ratio)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "label": self.params.label(),
            "params": self.params.to_dict(),
            "reason": self.outcome.reason,
            "regimes": self.outcome.regimes,
            "branch_steps": self.outcome.branch_steps,
        }


def sweep(plan: Plan, path: Path, extra: Sequence[PolicyParams] = (), progress: Progress | None = None) -> list[Swept]:
    """Measures the plan's known settings and `extra` ones in the run folder `path`; what it holds is not measured again.

    The reference comes first. Raises NoResult when the reference cannot be measured.
    """
    progress = progress or Silent()
    settings = list(dict.fromkeys([*(params for _, params in plan.known), *extra]))
    with open_run(path, plan) as run, plan.evaluator.session(path / "servers"):
        study = Measurement(plan, run, progress)
        progress.begin("Sweeping", len(settings))
        swept = []
        for params in settings:
            swept.append(Swept(params, study.remembered(f"sweep/{folder_name(params.label())}", params)))
            progress.advance(params.label())
        progress.end()
        run.write_manifest()
        return swept
