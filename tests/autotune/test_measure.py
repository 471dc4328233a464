"""What a study measures of its reference before it searches."""

from dataclasses import replace
from pathlib import Path

import pytest
from told_server import told_plan

from autotune.measure import Measurement
from autotune.plan import NOISE_RUNS
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
