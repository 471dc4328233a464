"""The A/A measurement: what noise is seen, and that nobody wins against himself."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hand_made import records
from small_study import small

from autotune import choose, stats
from autotune.evaluate import SimulatedEvaluator
from autotune.metrics import Limits
from autotune.noise import noise_floor
from autotune.plan import make_plan
from autotune.records import Origin, Replay
from autotune.tune import tune
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.sim.profile import load_profile
from traces.generate import rag_bursts


def one(name: str, latency_s: float) -> Replay:
    """A replay of one request."""
    return Replay(published("ppas"), name, name, "r", Origin.SIMULATED, records([0.0], [[latency_s]]))


def test_the_noise_of_a_replay_is_found_from_two_measurements() -> None:
    rng = np.random.default_rng(0)
    names = [f"t{i}" for i in range(400)]
    first, second = ([one(name, math.exp(0.05 * rng.normal())) for name in names] for _ in range(2))
    found = noise_floor([first, second], "mean_latency_s", wanted_pct=1)
    assert found.replay_pct == pytest.approx(5, rel=0.1)
    assert found.objective_pct == pytest.approx(found.replay_pct / 20)
    assert found.visible_pct == pytest.approx(2.8 * math.sqrt(2) * found.objective_pct, rel=0.01)
    assert found.repeats == math.ceil(found.visible_pct**2)


def test_a_regime_of_one_trace_makes_an_objective_noisier_than_as_many_traces_shared_evenly() -> None:
    rng = np.random.default_rng(3)
    values = np.exp(0.04 * rng.normal(size=(4000, 10)))
    for regimes in ([5, 5], [9, 1]):
        of_trace = [regime for regime, count in enumerate(regimes) for _ in range(count)]
        runs = [
            [replace(one(f"t{i}", value), regime=str(of_trace[i])) for i, value in enumerate(row)] for row in values[:3]
        ]
        logs = np.log(values)
        objectives = np.mean([logs[:, np.equal(of_trace, regime)].mean(axis=1) for regime in (0, 1)], axis=0)
        found = noise_floor(runs, "mean_latency_s", wanted_pct=1)
        assert found.objective_pct / found.replay_pct == pytest.approx(objectives.std() / logs.std(), rel=0.05)


def test_without_noise_every_difference_is_visible() -> None:
    same = [one("a", 1.0), one("b", 2.0)]
    found = noise_floor([same, same], "mean_latency_s", wanted_pct=1)
    assert (found.replay_pct, found.visible_pct, found.repeats) == (0.0, 0.0, 1)


def test_a_metric_that_is_zero_on_a_trace_has_no_noise_and_the_trace_is_named() -> None:
    runs = [[one("a", 1.0), one("b", 2.0)]] * 2
    with pytest.raises(NoResult, match="goodput_per_s of the reference is zero or undefined on trace 'b'"):
        noise_floor(runs, "goodput_per_s", wanted_pct=1, limits=Limits(latency_s=1.5))


def test_measurements_of_other_traces_are_refused() -> None:
    with pytest.raises(InvalidInput, match="of the same traces"):
        noise_floor([[one("a", 1.0)], [one("b", 1.0)]], "mean_latency_s", wanted_pct=1)


@pytest.mark.parametrize("seed", range(20))
def test_the_reference_measured_again_is_never_named_a_winner(seed: int) -> None:
    """A/A honesty: the same setting twice on a noisy simulator, in 20 of 20 seeds."""
    traces = [rag_bursts(rate, trace_seed) for rate in (0.6, 1.2) for trace_seed in (0, 1, 2)]
    noisy = SimulatedEvaluator(load_profile("rtx5090-qwen2.5-3b"), noise_sigma=0.3, seed=seed)
    first, second, *again = ([noisy.replay(published("ppas"), trace, run) for trace in traces] for run in range(5))
    for preferred in ("mean_latency_s", "p95_latency_s"):
        floor = noise_floor(again, preferred, wanted_pct=1.0)
        assert 0.1 < floor.replay_pct < 80
        verdict = choose.verdict(
            stats.compare(first, second, [preferred]), [preferred], min_gain_pct=1.0, floor_pct=floor.visible_pct
        )
        assert verdict in ("no clear winner", "inconclusive")


def test_a_noisy_study_measures_its_noise_first_and_asks_more_of_a_winner(tmp_path: Path) -> None:
    quiet = tune(make_plan(small(trials=1)), tmp_path / "quiet")
    noisy = tune(make_plan(small(trials=1, noise_sigma=0.3)), tmp_path / "noisy")
    assert quiet.noise == []
    (floor,) = noisy.noise
    assert floor.metric == "mean_latency_s"
    assert floor.visible_pct > floor.alike_pct > floor.objective_pct > 0
    (beside,) = noisy.noise_beside
    assert (beside.metric, beside.num_traces) == ("p95_latency_s", 4)
    assert beside.objective_pct > 0
    assert f"the {floor.alike_pct:.1f} % that noise alone may put between two trials" in noisy.choice
    assert "noise" not in quiet.choice
