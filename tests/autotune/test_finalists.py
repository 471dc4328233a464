"""Finalists on held-out traces: what is read back by a later process, and the export on a cold server."""

from pathlib import Path

import pytest
from hand_made import records
from told_server import told_plan

from autotune.finalists import FinalistFailed, cold_against_hot, cold_places, replay_held_out
from autotune.measure import Measurement
from autotune.progress import Silent
from autotune.records import Origin, Replay
from autotune.runfolder import open_run
from ppas_core.errors import NoResult
from ppas_core.policy import PolicyParams
from traces.generate import rag_bursts

TUNED = PolicyParams(b_max=4096, b_cap=512)
STATIC = PolicyParams.static(512)


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


def test_the_cold_server_gets_traces_of_every_regime() -> None:
    traces = [rag_bursts(rate, seed) for rate in (1.0, 2.0, 3.0) for seed in range(4)]
    assert cold_places(traces) == [0, 1, 4, 8]
    assert cold_places(traces[:8]) == [0, 1, 4, 5]
    assert cold_places(traces[:2]) == [0, 1]


def test_a_held_out_trace_that_a_kill_cut_short_is_replayed_anew_by_all_and_a_whole_one_is_read_back(
    tmp_path: Path,
) -> None:
    plan, server = told_plan(static_budgets=[512])
    finalists = {"tuned": TUNED, "reference": plan.reference, "best static": STATIC}
    traces = [trace.name for trace in plan.held_out]

    def day(roles: list[str], replays: int) -> list[tuple[str, str]]:
        """A process that is killed after so many replays on held-out traces; these."""
        with open_run(tmp_path / "run", plan) as run:
            study = Measurement(plan, run, Silent())
            server.asked.clear()

            def tell(replay: Replay) -> Replay:
                if len(server.asked) == replays:
                    raise KeyboardInterrupt
                return replay

            server.tell = tell
            try:
                replay_held_out(study, {role: finalists[role] for role in roles})
            except KeyboardInterrupt:
                assert len(server.asked) == replays
            server.tell = lambda replay: replay
            return list(server.asked)

    forwards = list(finalists)
    labels = [params.label() for params in finalists.values()]
    assert len(day(forwards, 4)) == 4  # one trace, and the last finalist on the next one
    second = day(forwards[::-1], 2)
    assert second == [(label, traces[1]) for label in labels[:2]], "the first trace is read back, the second begun anew"
    third = day(forwards, 99)
    assert third[:3] == [(label, traces[1]) for label in labels[::-1]], (
        "also where each day kept another finalist of it"
    )
    assert len(third) == 3 * (len(traces) - 1)
    assert day(forwards, 99) == [], "a finished study is read back whole"


def test_a_finalist_that_failed_on_a_held_out_trace_is_out_for_a_later_process_without_another_replay(
    tmp_path: Path,
) -> None:
    plan, server = told_plan(static_budgets=[512])
    finalists = {"tuned": TUNED, "reference": plan.reference, "best static": STATIC}

    def fails(replay: Replay) -> Replay:
        if replay.params == TUNED and replay.trace_name == plan.held_out[1].name:
            raise NoResult("the server died: killed for memory")
        return replay

    said = []
    for tell in (fails, lambda replay: replay):
        with open_run(tmp_path / "run", plan) as run:
            study = Measurement(plan, run, Silent())
            server.asked.clear()
            server.tell = tell
            with pytest.raises(FinalistFailed) as failed:
                replay_held_out(study, finalists)
            assert failed.value.params == TUNED
            said.append((str(failed.value), bool(server.asked)))
    assert said == [("on held-out traces: the server died: killed for memory", found) for found in (True, False)]
    with open_run(tmp_path / "run", plan) as run:
        server.asked.clear()
        replay_held_out(Measurement(plan, run, Silent()), {**finalists, "tuned": plan.reference})
        assert len(server.asked) == 2 * len(plan.held_out), (
            "the others are replayed anew: they pair with nothing of before"
        )
