"""What another setting would cost, in the simulator of a study: its own, or the one beside a live study while it was trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune import aggregate, choose
from autotune.evaluate import SimulatedEvaluator
from autotune.plan import Plan, make_plan, simulated_evaluator
from autotune.results import Setting, StudyResults
from autotune.runfolder import RunFolder
from autotune.spec import StudySpec
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile
from traces.format import Trace

Predict = Callable[[PolicyParams], float | None]


def predicted_cost(
    results: StudyResults, run: RunFolder, setting: Setting, plan: Plan | None = None
) -> tuple[Predict | None, str]:
    """What predicts the cost of taking another setting than `setting`, and how far it is to be believed; or None, and
    why nothing is predicted. Words are "" where there is nothing to say.

    The cost is the preferred objective on the tuning traces as ratio to that of `setting`: above 1 is worse; None where
    it cannot be simulated. plan: of this study, where it is at hand.
    """
    spec = run.spec()
    if spec.backend != "vllm":
        plan = plan or make_plan(spec, run.path)
        return _predictor(plan.evaluator, plan.tuning, spec, setting), ""
    found = results.prediction
    if found is None:
        return None, "the study had no simulator"
    if found.verdict == "dropped":
        return None, "the simulator was dropped, since the study's trials contradicted it"
    if found.verdict == "refitted":
        return None, "the simulator was refitted during the study, and that fit is not kept"
    try:
        if found.source == "given":
            evaluator = simulated_evaluator(spec, run.path)
        else:
            evaluator = SimulatedEvaluator(load_profile(str(run.path / "calibrated.json")))
        # Of a live study no plan is made: the model that it names may be on another machine by now.
        traces = plan.tuning if plan is not None else spec.build_traces(run.path)[0]
        predict = _predictor(evaluator, traces, spec, setting)
    except (InvalidInput, NoResult) as error:
        return None, f"the simulator cannot replay this study: {error}"
    return predict, (
        f"The study trusted this simulator: it was {found.error_pct:.1f} % off in the mean over {found.num_trials} trials."
    )


def _predictor(evaluator: object, traces: Sequence[Trace], spec: StudySpec, setting: Setting) -> Predict:
    if not isinstance(evaluator, SimulatedEvaluator):
        raise AssertionError("only a simulator predicts")
    metrics = choose.preferred_metrics(spec.prefer, spec.objectives)

    def means(params: PolicyParams) -> aggregate.RegimeMeans:
        return aggregate.regime_means(
            [evaluator.replay(params, trace) for trace in traces], metrics, spec.metric_limits()
        )

    base = means(setting.to_params())

    def predict(params: PolicyParams) -> float | None:
        try:
            found = means(params)
            return aggregate.geometric_mean(aggregate.objective(name, found, base) for name in metrics)
        except (InvalidInput, NoResult):
            return None

    return predict
