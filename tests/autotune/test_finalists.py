"""Finalists on held-out traces: what is read back by a later process, and the export on a cold server."""

from pathlib import Path

import pytest
from hand_made import records
from told_server import told_plan

from autotune.finalists import cold_against_hot
from autotune.measure import Measurement
from autotune.progress import Silent
from autotune.records import Origin, Replay
from autotune.runfolder import open_run


def replay_of(measured: Measurement, last_s: float) -> Replay:
    """Two requests that both end at `last_s`."""
    times = records([0.0, 0.0], [[1.0, last_s], [1.0, last_s]])
    return Replay(measured.plan.reference, "a", "sha256:a", "only", Origin.LIVE, times)


def test_a_cold_server_is_said_to_be_above_or_below_in_the_metrics_own_terms_and_worse_is_positive(
    tmp_path: Path,
) -> None:
    plan, _ = told_plan(objectives=["goodput_per_s", "mean_latency_s"], limits={"latency_s": 3600.0})
    with open_run(tmp_path / "run", plan) as run:
        study = Measurement(plan, run, Silent())
        hot, slow, fast = ([replay_of(study, last_s)] for last_s in (2.0, 2.5, 1.6))
        found = {
            (metric, word): cold_against_hot(metric, cold, hot, study)
            for metric in ("goodput_per_s", "mean_latency_s")
            for word, cold in (("slow", slow), ("fast", fast))
        }
    assert found["goodput_per_s", "slow"].reason.startswith("goodput on the cold server is 20.0 % below hot, more than")
    assert found["goodput_per_s", "fast"].reason.startswith("goodput on the cold server is 25.0 % above hot")
    assert found["mean_latency_s", "slow"].reason.startswith(
        "mean end-to-end latency on the cold server is 25.0 % above hot"
    )
    assert found["mean_latency_s", "fast"].reason.startswith(
        "mean end-to-end latency on the cold server is 20.0 % below hot"
    )
    assert [check.change_pct for check in found.values()] == pytest.approx([20.0, -25.0, 25.0, -20.0])
