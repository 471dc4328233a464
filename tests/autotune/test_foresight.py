"""The simulator beside a study: the sweep is exact, proposals are few and different, and a poor forecast is overruled."""

import math
from dataclasses import replace

import numpy as np
import pytest

from autotune import aggregate
from autotune.evaluate import SimulatedEvaluator
from autotune.foresight.corrected import corrected, encoded_points
from autotune.foresight.forecast import Forecast, forecast
from autotune.foresight.guide import Guide, Measured
from ppas_core.defaults import published
from ppas_core.policy import PolicyParams
from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import Profile, load_profile
from search_spaces.space import Space, load_space
from traces.generate import rag_bursts

REFERENCE = published("ppas")
NAMES = ("mean_latency_s", "p95_latency_s")
TRACES = [rag_bursts(rate, seed) for rate in (0.6, 1.2) for seed in (0, 1)]
KNOWN = [REFERENCE, PolicyParams.static(2048), PolicyParams.static(8192), PolicyParams.static(512)]


@pytest.fixture(scope="module")
def space() -> Space:
    return load_space(
        {
            "b_max": {"low": 2048, "high": 16384, "step": 2048},
            "b_cap": {"low": 512, "high": 16384, "step": 512},
            "n_th": {"low": 1, "high": 3},
        }
    )


@pytest.fixture(scope="module")
def truth() -> Profile:
    return load_profile("rtx5090-qwen2.5-3b")


@pytest.fixture(scope="module")
def found(space: Space, truth: Profile) -> Forecast:
    return forecast(truth, space, TRACES, REFERENCE, NAMES, also=KNOWN)


def _guide(found: Forecast, space: Space, noise: float = 0.002) -> Guide:
    return Guide(found, space, ("mean_latency_s",), known=KNOWN, noise=noise, visible=3 * noise)


def _measured(found: Forecast, settings: list[PolicyParams]) -> list[Measured]:
    return [Measured(params, found.ratio(params)) for params in settings]


def test_a_sweep_says_of_every_setting_what_its_replays_say(found: Forecast, space: Space, truth: Profile) -> None:
    assert set(space.grid()) <= set(found.settings)
    server = SimulatedEvaluator(truth)
    base = aggregate.regime_means([server.replay(REFERENCE, trace) for trace in TRACES], NAMES)
    for params in [*list(space.grid(7)), *KNOWN]:
        means = aggregate.regime_means([server.replay(params, trace) for trace in TRACES], NAMES)
        for name in NAMES:
            assert found.ratio(params)[name] == pytest.approx(aggregate.objective(name, means, base), rel=1e-12)


def test_a_setting_beside_the_grid_is_simulated_when_asked_for(found: Forecast, truth: Profile) -> None:
    beside = PolicyParams(b_max=5000, b_cap=777, n_th=2)
    assert beside not in found.places
    server = SimulatedEvaluator(truth)
    base, means = (
        aggregate.regime_means([server.replay(params, trace) for trace in TRACES], NAMES)
        for params in (REFERENCE, beside)
    )
    assert found.ratio(beside)["p95_latency_s"] == pytest.approx(aggregate.objective("p95_latency_s", means, base))


def test_a_space_too_large_for_its_bound_is_thinned_alike_every_time(space: Space, truth: Profile) -> None:
    thinned = [forecast(truth, space, TRACES, REFERENCE, NAMES[:1], most_chunks=100_000) for _ in range(2)]
    assert 12 <= len(thinned[0].settings) < space.size() / 2
    assert thinned[0].settings == thinned[1].settings


def test_a_metric_that_is_not_per_request_is_swept_too(space: Space, truth: Profile) -> None:
    found = forecast(truth, space, TRACES[:1], REFERENCE, ("makespan_s",), most_chunks=60_000)
    server = SimulatedEvaluator(truth)
    for params in found.settings[:5]:
        means, base = (
            aggregate.regime_means([server.replay(setting, TRACES[0])], ("makespan_s",))
            for setting in (params, REFERENCE)
        )
        assert found.ratio(params)["makespan_s"] == pytest.approx(aggregate.objective("makespan_s", means, base))


def test_maps_hold_the_sweep_and_static_budgets_on_their_diagonal(found: Forecast) -> None:
    maps = found.maps("mean_latency_s")
    assert sorted(plane.fixed["n_th"] for plane in maps) == [1, 2, 3]
    for plane in maps:
        for row, b_cap in enumerate(plane.y):
            for column, b_max in enumerate(plane.x):
                value = plane.ratio[row][column]
                if b_cap > b_max:
                    assert value is None
                elif value is not None:
                    params = PolicyParams(b_max=b_max, b_cap=b_cap, n_th=int(plane.fixed["n_th"]))
                    static = PolicyParams.static(b_max)
                    assert value == found.ratio(static if b_cap == b_max else params)["mean_latency_s"]


def test_traces_come_one_of_each_regime_in_turn_the_telling_ones_first(found: Forecast) -> None:
    order = found.trace_order(["mean_latency_s"])
    assert sorted(order) == list(range(len(TRACES)))
    assert {TRACES[order[0]].regime, TRACES[order[1]].regime} == {trace.regime for trace in TRACES}


def test_proposals_begin_with_the_predicted_best_and_differ_from_all_that_is_known(
    found: Forecast, space: Space
) -> None:
    guide = _guide(found, space)
    score = found.score(["mean_latency_s"])
    free = [place for params, place in found.places.items() if params not in KNOWN]
    assert score[found.places[guide.first[0]]] == score[free].min()
    assert len(set(guide.first)) == 5
    rows = {tuple(found.by_trace["mean_latency_s"][found.places[params]]) for params in [*guide.first, *KNOWN]}
    assert len(rows) == len(guide.first) + len(KNOWN), "two settings that the simulator cannot tell apart"


def test_a_perfect_forecast_is_trusted_and_a_reversed_one_is_not(found: Forecast, space: Space) -> None:
    guide = _guide(found, space)
    trials = _measured(found, [*KNOWN, *guide.first])
    judgement = guide.judge(trials)
    assert (judgement.trusted, judgement.concordance) == (True, 1.0)
    assert judgement.error_pct == pytest.approx(0, abs=1e-9)
    assert judgement.num_trials == len(trials) - 1  # the reference is 1 by definition
    worst_first = [Measured(t.params, {name: 1 / value for name, value in t.objectives.items()}) for t in trials]
    against = guide.judge(worst_first)
    assert (against.trusted, against.concordance) == (False, 0.0)
    assert "ranked rightly" in against.sentence


def test_an_error_that_all_trials_share_is_said_to_be_one_and_leaves_the_ranking_alone(
    found: Forecast, space: Space
) -> None:
    guide = _guide(found, space)
    trials = _measured(found, [*KNOWN, *guide.first])
    for factor, bias_pct, words in ((0.9, 11.1, "11.1 % too high, so gains are foretold too small"),
                                    (1.1, -9.1, "9.1 % too low, so gains are foretold too large")):  # fmt: skip
        shifted = [
            Measured(t.params, {name: factor * value for name, value in t.objectives.items()}) for t in trials[1:]
        ]
        judgement = guide.judge(shifted)
        assert judgement.bias_pct == pytest.approx(bias_pct, abs=0.05)
        assert judgement.error_pct == pytest.approx(abs(judgement.bias_pct))
        assert f"mostly to one side: {words}; proposals rest on the ranking: 100% of the pairs" in judgement.sentence
    both = [
        Measured(t.params, {name: value * (1.1 if i % 2 else 0.9) for name, value in t.objectives.items()})
        for i, t in enumerate(trials[1:])
    ]
    assert "one side" not in guide.judge(both).sentence


def test_a_forecast_that_is_far_off_is_not_trusted_though_its_ranking_is_right(found: Forecast, space: Space) -> None:
    guide = _guide(found, space)
    settings = [params for params in KNOWN if found.ratio(params)["mean_latency_s"] > 1]
    stretched = [
        Measured(params, {name: value**4 for name, value in found.ratio(params).items()}) for params in settings
    ]
    judgement = guide.judge(stretched)
    assert judgement.concordance == 1.0
    assert judgement.error_pct > judgement.allowed_pct
    assert not judgement.trusted


def test_noise_is_no_reason_to_distrust(found: Forecast, space: Space) -> None:
    rng = np.random.default_rng(0)
    guide = _guide(found, space, noise=0.2)
    noisy = [
        Measured(params, {name: value * math.exp(0.2 * rng.normal()) for name, value in found.ratio(params).items()})
        for params in [*KNOWN, *guide.first]
    ]
    judgement = guide.judge(noisy)
    assert judgement.trusted
    assert (
        "in this noise a perfect simulator may be 57 % off, so that little can be said of this one"
        in judgement.sentence
    )


def test_measurements_overrule_a_forecast_near_them_and_leave_it_elsewhere() -> None:
    points = np.linspace(0, 1, 101)[:, None]
    predicted = np.zeros(101)
    tried = np.array([[0.1], [0.2], [0.15]])
    belief = corrected(predicted, points, np.zeros(3), tried, np.array([0.05, 0.05, 0.05]), 0.001)
    # All trials agree: the forecast is off by a common factor everywhere.
    assert np.allclose(belief.mean, 0.05, atol=1e-3)
    mixed = corrected(predicted, points, np.zeros(3), np.array([[0.0], [0.5], [1.0]]), np.array([0.1, 0.0, 0.0]), 1e-3)
    assert mixed.mean[0] > 0.08
    assert abs(mixed.mean[100]) < 0.02
    assert mixed.sd[0] < mixed.sd[25]
    assert (mixed.expected_gain(0.0) >= 0).all()


def test_points_lie_within_the_unit_cube(space: Space) -> None:
    points = encoded_points([*list(space.grid(50)), PolicyParams.static(512)], space)
    assert points.shape[1] == len(space.dimensions)
    assert ((points >= 0) & (points <= 1)).all()


def test_a_guided_search_comes_near_the_optimum_of_a_machine_that_the_profile_gets_wrong_by_a_quarter(
    space: Space, truth: Profile
) -> None:
    traces = [rag_bursts(rate, seed, prompt_tokens=4000, output_tokens=64) for rate in (6.0, 12.0) for seed in (0, 1)]
    found = forecast(truth, space, traces, REFERENCE, NAMES, also=KNOWN)
    cost = truth.cost.to_dict()
    wrong = {name: value * (1.25 if place % 2 else 0.8) for place, (name, value) in enumerate(cost.items())}
    believed = forecast(replace(truth, cost=StepCost(**wrong)), space, traces, REFERENCE, NAMES, also=KNOWN)
    guide = _guide(believed, space)
    done = _measured(found, KNOWN)
    best = float(found.score(["mean_latency_s"]).min())
    assert min(trial.objectives["mean_latency_s"] for trial in done) > 1.02 * best, "there is nothing to be found"
    others = iter(list(space.grid(60)))
    for _ in range(12):
        params = guide.suggestion({trial.params for trial in done}, done)
        done += _measured(found, [next(others) if params is None else params])  # None: the sampler's turn
    assert min(trial.objectives["mean_latency_s"] for trial in done) <= 1.01 * best
