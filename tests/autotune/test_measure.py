"""What a study measures of its reference before it searches."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from small_study import small
from told_server import told_plan

from autotune.measure import Measurement
from autotune.plan import NOISE_RUNS, make_plan
from autotune.progress import Silent
from autotune.records import Replay
from autotune.runfolder import open_run
from ppas_core.errors import NoResult


def refused(replay: Replay) -> Replay:
    """`replay` with a first request that the server refused."""
    requests = replace(replay.requests, status=("http_status", *replay.requests.status[1:]))
    return replace(replay, requests=requests, failure_details={"http_status": "HTTP 503: too busy today"})


def test_a_failed_request_in_the_measurement_of_the_noise_ends_the_study_as_one_in_any_other_of_the_reference(
    tmp_path: Path,
) -> None:
    plan, server = told_plan()
    traces = len(plan.tuning)
    with open_run(tmp_path / "run", plan) as run:
        server.tell = lambda replay: refused(replay) if len(server.asked) == traces + 1 else replay
        with pytest.raises(NoResult, match=r"the reference .* cannot be measured: .*1 of \d+ requests: HTTP 503") as e:
            Measurement(plan, run, Silent())
        assert len(server.asked) == traces + 2, "nothing is measured after it"
        first = str(e.value)

        server.tell = lambda replay: replay
        study = Measurement(plan, run, Silent())
        assert study.noise
        assert len(server.asked) == traces + 2 + NOISE_RUNS * traces, (
            "the noise is measured anew, the reference is kept"
        )

    with open_run(tmp_path / "other", plan) as run:
        server.tell = refused
        with pytest.raises(NoResult) as e:
            Measurement(plan, run, Silent())
    start = f"the reference {plan.reference.label()} cannot be measured: trace "
    assert first.startswith(start)
    assert str(e.value).startswith(start)


def test_every_ratio_rests_on_the_mean_of_all_measurements_of_the_reference_and_a_later_process_knows_it(
    tmp_path: Path,
) -> None:
    plan = make_plan(small(noise_sigma=0.2))
    folder = tmp_path / "run"
    with open_run(folder, plan) as run:
        study = Measurement(plan, run, Silent())
    assert study.study_noise is not None
    assert study.base.measurements == NOISE_RUNS + 1
    assert set(study.base.objectives.values()) == {1.0}
    rows = json.loads((folder / "references/noise-runs.json").read_text())["mean_latency_s"]
    assert len(rows) == NOISE_RUNS + 1
    for number, trace in enumerate(plan.tuning):
        assert study.base.by_trace[trace.name]["mean_latency_s"] == pytest.approx(mean(row[number] for row in rows))
    for regime, values in study.base.regimes.items():
        own = [study.base.by_trace[trace.name]["mean_latency_s"] for trace in plan.tuning if trace.regime == regime]
        assert values["mean_latency_s"] == pytest.approx(mean(own))
    with open_run(folder, plan) as run:
        assert Measurement(plan, run, Silent()).base == study.base


def test_a_reference_on_which_trials_rest_already_stays_as_it_is(tmp_path: Path) -> None:
    plan, folder = make_plan(small(noise_sigma=0.2)), tmp_path / "run"
    with open_run(folder, plan) as run:
        study = Measurement(plan, run, Silent())
        study.outcome("trials/0", plan.reference)
    (folder / "references/noise.json").unlink()
    with open_run(folder, plan) as run:
        assert Measurement(plan, run, Silent()).base == study.base
