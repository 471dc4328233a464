"""What becomes of the simulator beside a study: one verdict, by which everything after the search goes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_study import small

from autotune.evaluate import SimulatedEvaluator
from autotune.foresight.stage import Foresight
from autotune.measure import Measurement
from autotune.plan import Plan, make_plan
from autotune.progress import Silent
from autotune.runfolder import open_run
from autotune.study import SearchTrial
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import Profile

WORKLOAD = {"family": "rag-bursts", "rates_per_s": [4.0, 8.0], "prompt_tokens": 4000, "output_tokens": 64}


def plan(*, steps: bool) -> Plan:
    """A study on a simulator that stands for a server, with its step log or without."""
    made = make_plan(small(workload=WORKLOAD, noise_sigma=0.02))
    server = made.evaluator
    assert isinstance(server, SimulatedEvaluator)
    return replace(made, evaluator=replace(server, record_steps=steps))


@pytest.fixture
def studies(tmp_path: Path) -> Iterator[Any]:
    """Makes (study, its measured known settings as trials)."""
    stack = []

    def make(*, steps: bool) -> tuple[Measurement, list[SearchTrial]]:
        made = plan(steps=steps)
        context = open_run(tmp_path / "run", made)
        run = context.__enter__()
        stack.append(context)
        study = Measurement(made, run, Silent())
        settings = [*made.known, *(("search", params) for params in made.space.grid(6))]
        trials = [
            SearchTrial(number, arm, params, study.outcome(f"trials/{number}", params))
            for number, (arm, params) in enumerate(settings)
        ]
        return study, trials

    yield make
    for context in stack:
        context.__exit__(None, None, None)


def profile_of(study: Measurement) -> Profile:
    server = study.plan.evaluator
    assert isinstance(server, SimulatedEvaluator)
    return server.profile


def wrong(profile: Profile) -> Profile:
    """A machine whose steps cost nothing but their number."""
    return replace(profile, name="wrong", cost=StepCost(0.5, 1e-8, 0.0, 0.0, 0.0), frontend_delay_s=0.0)


def test_a_right_profile_is_trusted_to_the_end(studies: Any) -> None:
    study, trials = studies(steps=False)
    foresight = Foresight(study, profile_of(study), "given")
    foresight.conclude(trials)
    found = foresight.prediction(trials)
    assert (found.verdict, foresight.dropped, found.num_trials) == ("trusted", None, len(trials) - 1)
    assert found.error_pct < 5
    assert foresight.suggestion(trials) is not None


def test_a_contradicted_profile_without_step_logs_is_dropped_and_proposes_nothing(studies: Any) -> None:
    study, trials = studies(steps=False)
    foresight = Foresight(study, wrong(profile_of(study)), "given")
    foresight.conclude(trials)
    found = foresight.prediction(trials)
    assert found.verdict == "dropped"
    assert foresight.dropped is not None
    assert "no step logs to refit it to" in foresight.dropped
    assert f"predicted ratios are {found.error_pct:.1f} % off" in found.sentence, "one figure, wherever it stands"
    assert (foresight.suggestion(trials), foresight.expected_gain_pct(trials)) == (None, None)


def test_a_contradicted_profile_is_refitted_to_the_trials_own_steps_and_trusted_then(studies: Any) -> None:
    study, trials = studies(steps=True)
    right = profile_of(study)
    start = replace(wrong(right), frontend_delay_s=right.frontend_delay_s)
    foresight = Foresight(study, start, "given")
    foresight.conclude(trials)
    found = foresight.prediction(trials)
    assert (found.verdict, found.profile) == ("refitted", "wrong-refitted")
    assert found.error_pct < 5
    assert foresight.forecast.profile.cost.prefill_token_s == pytest.approx(right.cost.prefill_token_s, rel=0.3)
