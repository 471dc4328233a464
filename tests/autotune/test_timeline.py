"""The time line of a held-out trace tells what the engine did, no more and no less."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hand_made import records

from autotune.evaluate import SimulatedEvaluator
from autotune.records import Origin, Replay
from autotune.timeline import make_timeline, steps_of, stretches
from ppas_core.defaults import published
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile
from traces.format import Trace
from traces.generate import rag_bursts

ADAPTIVE = published("ppas")
STATIC = PolicyParams.static(4096)
ROLES = ("tuned", "paper default", "best static")


@pytest.fixture(scope="module")
def evaluator() -> SimulatedEvaluator:
    return SimulatedEvaluator(load_profile("rtx5090-qwen2.5-3b"))


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return [rag_bursts(rate, seed) for rate, seed in ((0.2, 1), (1.4, 2), (0.6, 3))]


def replayed(
    evaluator: SimulatedEvaluator, traces: Sequence[Trace], **by_role: PolicyParams
) -> dict[str, list[Replay]]:
    named = {role.replace("_", " "): params for role, params in by_role.items()}
    return {role: [evaluator.replay(params, trace) for trace in traces] for role, params in named.items()}


def test_every_step_and_every_token_of_the_replay_is_in_its_lane(evaluator, traces):
    replays = replayed(evaluator, traces, tuned=ADAPTIVE, best_static=STATIC)
    line = make_timeline(evaluator, traces, replays, ROLES)
    trace = next(t for t in traces if t.name == line.trace)
    place = traces.index(trace)
    for lane in line.lanes:
        assert not lane.thinned
        assert sum(lane.steps) == sum(replays[lane.role][place].branch_steps.values())
        tokens = sum(round(n * mean, 3) for n, mean in zip(lane.steps, lane.tokens, strict=True))
        asked = sum(r.prompt_tokens + r.output_tokens - 1 for r in trace.requests)
        assert tokens == pytest.approx(asked, rel=1e-3)
        assert all(a <= b for a, b in zip(lane.start_s, lane.end_s, strict=True))
        assert all(b >= a - 1e-6 for a, b in zip(lane.end_s, lane.start_s[1:], strict=False))
        assert lane.end_s[-1] == pytest.approx(replays[lane.role][place].requests.last_token_s.max(), abs=1e-3)
    assert line.arrival_s == pytest.approx([r.arrival_s for r in trace.requests], abs=1e-4)


def test_the_trace_is_the_one_where_the_tuned_setting_s_rules_mix_most(evaluator, traces):
    replays = replayed(evaluator, traces, best_static=STATIC, tuned=ADAPTIVE)
    line = make_timeline(evaluator, traces, replays, ROLES)
    shares = [min(c := r.branch_steps["pressure"] / sum(r.branch_steps.values()), 1 - c) for r in replays["tuned"]]
    assert line.trace == traces[int(np.argmax(shares))].name
    assert line.why.startswith("Of 3 held-out traces this is where the tuned setting's rules mix most: the budget is")
    lane = line.lanes[0]
    cut = sum(n for n, code in zip(lane.steps, lane.branch, strict=True) if line.branches[code] == "pressure")
    steps = replays["tuned"][traces.index(next(t for t in traces if t.name == line.trace))].branch_steps
    assert cut == steps["pressure"]
    assert set(lane.budget) == {ADAPTIVE.b_max, ADAPTIVE.b_cap}


def test_roles_with_one_setting_share_a_lane_and_without_an_adaptive_one_the_busiest_trace_is_shown(evaluator, traces):
    replays = replayed(evaluator, traces, tuned=STATIC, best_static=STATIC)
    line = make_timeline(evaluator, traces, replays, ROLES)
    assert [lane.role for lane in line.lanes] == ["tuned"]
    assert line.trace == max(traces, key=lambda trace: len(trace.requests)).name
    assert "no setting here adapts its budget" in line.why


def table(rows: list[tuple[float, float, int, int]]) -> pd.DataFrame:
    start, end, budget, waiting = zip(*rows, strict=True)
    return pd.DataFrame(
        {
            "start_s": start,
            "end_s": end,
            "budget": budget,
            "branch": ["max" if b == 8192 else "pressure" for b in budget],
            "running": 1,
            "waiting": waiting,
            "tokens": [float(b) for b in budget],
            "prefills": True,
        }
    )


def test_like_steps_become_one_stretch_and_a_pause_ends_it():
    found, thinned = stretches(table([(0, 1, 8192, 0), (1, 2, 8192, 0), (2, 3, 2048, 0), (9, 10, 2048, 0)]))
    assert not thinned
    assert found[["start_s", "end_s", "steps", "budget"]].to_numpy().tolist() == [
        [0, 2, 2, 8192],
        [2, 3, 1, 2048],
        [9, 10, 1, 2048],
    ]


def test_above_the_limit_a_short_cut_of_the_budget_stays_visible_and_no_step_is_lost():
    rows = [(i / 10, (i + 1) / 10, 2048 if i == 777 else 8192, i % 7) for i in range(3000)]
    found, thinned = stretches(table(rows), limit=50)
    assert thinned
    assert len(found) <= 50
    assert found["steps"].sum() == 3000
    cut = found[found["budget"] == 2048]
    assert len(cut) == 1
    assert cut["start_s"].item() <= 77.7 < cut["end_s"].item()
    assert cut["branch"].item() == "pressure"


def live_steps(start_s: list[float], took_s: float) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "start_s": start_s,
            "done_s": [s + took_s for s in start_s],
            "branch": "max",
            "budget": 8192,
            "running_prefills": 1,
            "running_decodes": 2,
            "waiting_prefills": 0,
            "prefill_tokens": 100,
            "decode_tokens": 2,
        }
    )


def test_a_live_step_log_is_put_on_the_trace_s_clock_without_an_earlier_attempt(evaluator):
    # The engine's clock is 5000 s ahead; the first two rows belong to an attempt that was made again.
    log = live_steps([4000.0, 4001.0, 5001.0, 5001.5, 5002.0], 0.6)
    replay = Replay(
        params=STATIC,
        trace_name="t",
        trace_digest="d",
        regime="r",
        origin=Origin.LIVE,
        requests=records([1.0, 1.5], [[1.6], [2.1, 2.6]]),
        steps=log,
    )

    class Live:
        """Not a simulator: what was recorded is all there is."""

    steps = steps_of(Live(), replay, rag_bursts(0.2, 1))
    assert steps["start_s"].tolist() == pytest.approx([1.0, 1.6, 2.1])  # decided while the one before still ran
    assert steps["end_s"].tolist() == pytest.approx([1.6, 2.1, 2.6])
    assert steps["running"].tolist() == [3, 3, 3]


def test_without_a_step_log_there_is_no_time_line(evaluator, traces):
    class Live:
        """A server that was only joined: no step log."""

    replays = replayed(evaluator, traces[:1], tuned=ADAPTIVE)
    assert make_timeline(Live(), traces[:1], replays, ROLES) is None
