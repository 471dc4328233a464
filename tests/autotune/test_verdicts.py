"""Which word a comparison gets: what is known, what is not, and that noise never makes a verdict firmer."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hand_made import records
from small_study import small

from autotune import aggregate, choose, stats
from autotune.alike import acted_alike, behaviour
from autotune.cli import console
from autotune.compare import COMPARED, compare_settings
from autotune.machine_load import LoadWatch
from autotune.noise import half_width, pooled
from autotune.plan import Plan, make_plan
from autotune.records import Origin, Replay
from autotune.results import Comparison, Effect
from autotune.spec import StudySpec
from autotune.study import Outcome
from autotune.study_noise import StudyNoise
from autotune.tune import tune
from ppas_core.errors import NoResult
from ppas_core.policy import PolicyParams
from traces.format import Trace

MEAN = "mean_latency_s"
REFERENCE = PolicyParams(b_max=2048, b_cap=512)
TWIN = PolicyParams.static(2048)
OTHER = PolicyParams.static(1024)
NEVER, OFTEN = {"max": 90}, {"max": 80, "pressure": 10}


def paired(*effects: tuple[float, float, float]) -> tuple[stats.PairedComparison, list[str]]:
    """A comparison with an effect (low, value, high) of each of the first objectives."""
    names = [MEAN, "p95_latency_s"][: len(effects)]
    overall = {name: stats.Interval(value, low, high) for name, (low, value, high) in zip(names, effects, strict=True)}
    return stats.PairedComparison(overall, {}, stats.Interval(0.5, 0.4, 0.6), 0.5, 9, 2, 0.95), names


@pytest.mark.parametrize(
    ("effects", "word"),
    [
        ([(0.5, 2.0, 3.0)], "better"),
        ([(0.1, 0.6, 0.9)], "no clear winner"),  # surely better, by nothing worth having
        ([(-0.9, 0.0, 0.9)], "no clear winner"),
        ([(-90.2, -25.6, 13.3)], "inconclusive"),  # a gain of 13 % is still possible
        ([(-5.0, -2.0, 0.5)], "inconclusive"),  # a loss is
        ([(0.2, 0.7, 3.0)], "inconclusive"),
        ([(-3.0, -2.0, -1.5)], "worse"),
        ([(1.9, 3.0, 4.1), (-3.1, -1.4, 0.6)], "no clear winner"),  # one for the other: neither can win
        ([(1.9, 3.0, 4.1), (-3.1, -1.4, 2.0)], "inconclusive"),
    ],
)
def test_no_clear_winner_is_said_only_where_neither_a_gain_nor_a_loss_worth_having_is_possible(
    effects: list[tuple[float, float, float]], word: str
) -> None:
    found, names = paired(*effects)
    assert choose.verdict(found, names, min_gain_pct=1.0) == word


def test_a_higher_noise_floor_never_makes_the_verdict_firmer() -> None:
    found, names = paired((-90.2, -25.6, 13.3))
    words = {choose.verdict(found, names, min_gain_pct=1.0, floor_pct=floor) for floor in (0.0, 5.0, 20.0, 203.0)}
    assert words == {"inconclusive"}
    ahead, names = paired((2.0, 8.0, 14.0))
    assert [choose.verdict(ahead, names, min_gain_pct=1.0, floor_pct=f) for f in (5.0, 9.0)] == [
        "better",
        "inconclusive",
    ]


def test_an_interval_of_more_than_a_factor_of_two_either_way_is_called_not_measurable() -> None:
    assert choose.change(stats.Interval(-165.8, -7012.9, 96.4), 0.95) == "not measurable here"
    assert choose.change(stats.Interval(-25.6, -90.2, 13.3), 0.95).startswith("25.6 % worse (95% interval 90.2 % worse")
    assert aggregate.is_measurable(-99, 49.9)
    assert not aggregate.is_measurable(-101, 50)
    assert aggregate.is_measurable(-900, -120), "clear, though wide"
    assert not aggregate.is_measurable(-math.inf, 12)
    assert not Effect(improvement_pct=1, low_pct=-300, high_pct=90).is_measurable


def test_the_terminal_shows_the_word_that_the_verdict_has_and_no_digits_of_what_cannot_be_measured() -> None:
    assert console.effect(Effect(improvement_pct=-165.8, low_pct=-7012.9, high_pct=96.4)) == "not measurable here"
    assert console.effect(Effect(improvement_pct=1.7, low_pct=1.0, high_pct=2.4)) == "+1.7 [+1.0, +2.4]"
    found = compared((TWIN, OFTEN, [1.0, 1.01] * 2), (OTHER, OFTEN, [1.02, 1.03] * 2), origin=Origin.SIMULATED)
    assert found.verdict == "better"
    assert [found.word(error) for error in (None, 1.5, 2.5)] == ["better", "better", "better in the simulator"]


def test_a_gain_within_the_simulators_own_error_is_said_to_be_one_in_the_simulator() -> None:
    sides = [
        (name, replays(params, OFTEN, latencies, Origin.SIMULATED))
        for name, params, latencies in (("a", TWIN, [1.0, 1.01] * 2), ("b", OTHER, [1.02, 1.03] * 2))
    ]
    found = compare_settings(*sides, StudySpec(name="x"), [MEAN], simulator_error_pct=2.5)
    assert found.sentence.startswith("a is better than b in the simulator, within its own error of 2.5 %: ")
    sure = compare_settings(*sides, StudySpec(name="x"), [MEAN], simulator_error_pct=1.0)
    assert sure.sentence.startswith("a is better than b: ")


# --- settings that did the same ---


def replays(params: PolicyParams, steps: dict[str, int], latencies: Sequence[float], origin: Origin) -> list[Replay]:
    """One request on each trace, two traces of a regime."""
    return [
        Replay(params, f"t{i}", f"t{i}", f"r{i // 2}", origin, records([0.0, 1.0], [[s], [1.0 + s]]), branch_steps=steps)
        for i, s in enumerate(latencies)
    ]  # fmt: skip


def test_a_setting_that_never_capped_behaves_as_the_static_budget_of_its_b_max() -> None:
    assert behaviour(REFERENCE, NEVER) == behaviour(TWIN, OFTEN) == (2048, 256)
    assert behaviour(REFERENCE, OFTEN) is None
    assert behaviour(REFERENCE, {}) is None, "nothing is known of its steps"
    assert behaviour(replace(TWIN, max_num_seqs=16), NEVER) != behaviour(TWIN, NEVER)
    one, two = (replays(params, NEVER, [1.0, 1.0], Origin.LIVE) for params in (REFERENCE, TWIN))
    assert acted_alike(one, two)
    assert not acted_alike(one, [two[0], replace(two[1], params=OTHER)])


def compared(
    one: tuple[PolicyParams, dict[str, int], list[float]],
    two: tuple[PolicyParams, dict[str, int], list[float]],
    noise: StudyNoise | None = None,
    origin: Origin = Origin.LIVE,
) -> Comparison:
    sides = [(name, replays(*side, origin)) for name, side in (("a", one), ("b", two))]
    return compare_settings(sides[0], sides[1], StudySpec(name="x"), [MEAN], noise=noise)


def test_settings_that_did_the_same_are_never_called_better_or_worse_whatever_was_measured() -> None:
    slow = [2.0, 2.1, 2.0, 2.1]
    fast = [1.0, 1.05, 1.0, 1.05]
    assert compared((REFERENCE, OFTEN, fast), (TWIN, NEVER, slow)).verdict == "better"
    found = compared((REFERENCE, NEVER, fast), (TWIN, NEVER, slow))
    assert found.verdict == "no clear winner"
    assert "both have a budget of 2048, so they did the same" in found.sentence
    assert compared((REFERENCE, OFTEN, slow), (TWIN, NEVER, fast)).costs
    assert compared((REFERENCE, NEVER, slow), (TWIN, NEVER, fast)).costs == []


def test_a_setting_against_itself_is_unchanged() -> None:
    found = compared((REFERENCE, NEVER, [1.0] * 4), (REFERENCE, NEVER, [1.0] * 4))
    assert (found.verdict, found.sentence) == ("unchanged", "Unchanged: a is the same setting as b.")


# --- saturated regimes ---


def with_saturated(
    one: list[float], two: list[float], saturated: Sequence[str], noise: StudyNoise | None = None
) -> Comparison:
    sides = [(name, replays(p, OFTEN, s, Origin.LIVE)) for name, p, s in (("a", TWIN, one), ("b", OTHER, two))]
    return compare_settings(sides[0], sides[1], StudySpec(name="x"), [MEAN], noise=noise, saturated=saturated)


def test_the_gain_without_the_saturated_regimes_stands_beside_the_verdict_which_they_still_count_in(plan: Plan) -> None:
    fast, slow = [1.0, 1.01, 1.0, 1.01], [1.1, 1.12, 3.0, 3.02]
    before = with_saturated(fast, slow, [])
    found = with_saturated(fast, slow, ["r1"])
    assert (found.verdict, found.overall, found.regimes) == (before.verdict, before.overall, before.regimes)
    assert found.steady == before.regimes["r0"], "one regime is left"
    assert found.saturated == ["r1"]
    assert "Without the saturated regime r1: mean end-to-end latency 9." in found.sentence
    assert before.steady is None
    assert "saturated" not in before.sentence
    assert with_saturated(fast, slow, ["r0", "r1"]).steady is None, "nothing is left"
    assert with_saturated(fast, slow, ["another"]).saturated == []
    noisy = with_saturated(fast, slow, ["r1"], noise_of(plan, 0.5))
    assert noisy.steady == noisy.regimes["r0"], "no narrower than the noise"
    assert Comparison.model_validate(before.model_dump(exclude={"steady", "saturated"})) == before, (
        "an earlier version's"
    )


def test_a_gain_that_only_saturated_regimes_show_is_said_not_to_be_clear_without_them() -> None:
    found = with_saturated([1.0, 1.01, 1.0, 1.01], [0.999, 1.012, 3.0, 3.02], ["r1"])
    assert found.verdict == "better"
    assert "Without the saturated regime r1 it is not clearly better: mean end-to-end latency 0." in found.sentence


# --- noise ---


def noise_of(plan: Plan, spread: float, runs: int = 4) -> StudyNoise:
    """An A/A test whose replays vary by `spread`, a log."""
    rng = np.random.default_rng(0)
    values = {name: np.exp(spread * rng.normal(size=(runs, len(plan.tuning)))) for name in COMPARED}
    return StudyNoise(plan, [MEAN], NEVER, values)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(small(reference=REFERENCE.to_dict(), noise_sigma=0.1))


def outcome(plan: Plan, factor: float, steps: dict[str, int]) -> Outcome:
    by_trace = {trace.name: {MEAN: factor} for trace in plan.tuning}
    return Outcome({MEAN: factor}, {}, steps, 1.0, by_trace=by_trace)


def test_a_setting_that_did_the_same_as_the_reference_widens_the_noise_by_what_was_measured_between_them(
    plan: Plan,
) -> None:
    found = noise_of(plan, 0.02)
    (before,) = found.infos
    found.widen([(OTHER, outcome(plan, 2.0, NEVER)), (REFERENCE, outcome(plan, 1.01, NEVER))])
    assert found.infos[0] == before, "another budget says nothing of the noise, and a quiet repeat never narrows it"
    found.widen([(TWIN, outcome(plan, 2.0, NEVER))])
    (after,) = found.infos
    assert (after.further, found.before_pct) == (1, before.visible_pct)
    assert after.visible_held_out_pct > 3 * before.visible_held_out_pct
    beside = found.of("makespan_s")
    assert beside is not None
    assert beside.visible_pct > 3 * before.visible_pct, "other metrics are as bursty"
    found.widen([(TWIN, outcome(plan, 2.0, OFTEN)), (REFERENCE, outcome(plan, 2.0, OFTEN))])
    assert found.infos[0].further == 1, "one that capped is the reference measured again, or a setting of its own"


def test_no_interval_is_narrower_than_the_noise_alone_makes_it_and_no_cost_rests_on_noise(plan: Plan) -> None:
    fast, slow = [1.0, 1.001, 1.0, 1.001], [1.3, 1.301, 1.3, 1.301]
    sure = compared((TWIN, OFTEN, slow), (OTHER, OFTEN, fast))
    assert sure.verdict == "worse"
    assert any("makespan" in cost for cost in sure.costs)
    noisy = compared((TWIN, OFTEN, slow), (OTHER, OFTEN, fast), noise_of(plan, 0.5))
    assert noisy.verdict == "inconclusive"
    assert noisy.costs == []
    assert noisy.overall[MEAN].improvement_pct == sure.overall[MEAN].improvement_pct
    assert noisy.overall[MEAN].low_pct < sure.overall[MEAN].low_pct < 0 < noisy.overall[MEAN].high_pct


def test_the_width_that_noise_gives_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(400):
        runs = rng.normal(0, 0.1, size=(3, 2))
        floor = pooled([runs], MEAN, traces_per_regime=[2], wanted_pct=1)
        difference = np.mean([rng.normal(0, 0.1, size=2).mean() - rng.normal(0, 0.1, size=2).mean() for _ in range(2)])
        missed += abs(difference) > half_width(floor, [2, 2], 0.95)
    assert 8 <= missed <= 34, "5 % of 400"


def test_where_the_noise_hides_all_the_reference_against_itself_is_inconclusive(plan: Plan) -> None:
    found = compared((TWIN, NEVER, [1.0] * 4), (TWIN, NEVER, [1.0] * 4), noise_of(plan, 0.5))
    assert found.verdict == "inconclusive"
    assert "the same setting as b, and no gain below" in found.sentence


def test_the_time_asked_for_aims_at_a_gain_worth_having_and_not_at_the_noise_floor(plan: Plan) -> None:
    one, two = [1.0, 1.03, 1.01, 1.02], [1.02, 1.01, 1.03, 1.0]
    found = compared((TWIN, OFTEN, one), (OTHER, OFTEN, two))
    assert "To see a gain of 1 %, about" in found.sentence
    hopeless = compared((TWIN, OFTEN, one), (OTHER, OFTEN, two), noise_of(plan, 1.5))
    assert "more minutes" not in hopeless.sentence
    assert hopeless.sentence.count("not measurable here") == 2
    simulated = compared((TWIN, OFTEN, one), (OTHER, OFTEN, two), origin=Origin.SIMULATED)
    assert "held-out traces are needed" in simulated.sentence


def test_a_share_that_was_never_seen_is_not_surely_zero() -> None:
    found = compared((TWIN, OFTEN, [1.5] * 4), (OTHER, OFTEN, [1.0] * 4))
    low, high = found.share_faster_interval
    assert (found.share_faster, low) == (0.0, 0.0)
    assert high == pytest.approx(1 - 0.025 ** (1 / 4))


# --- hopeless noise ends a live study ---


class Shaky:
    """The simulator as a live server whose time runs `spread` unevenly, until it is calm."""

    origin = Origin.LIVE
    is_noisy = True

    def __init__(self, plan: Plan, spread: float) -> None:
        self._inner = plan.evaluator
        self._random = random.Random(0)
        self.spread = spread
        self.replays = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        self.replays += 1
        found, factor = self._inner.replay(params, trace), math.exp(self._random.gauss(0, self.spread))
        late = {
            name: found.requests.sent_s + factor * (getattr(found.requests, name) - found.requests.sent_s)
            for name in ("first_token_s", "last_token_s", "done_s")
        }
        return replace(found, requests=replace(found.requests, **late))


def shaky(spread: float, **changes: object) -> tuple[Plan, Shaky]:
    inner = make_plan(small(trials=2, **changes))
    evaluator = Shaky(inner, spread)
    return replace(inner, evaluator=evaluator), evaluator  # type: ignore[arg-type]


def test_hopeless_noise_is_measured_twice_and_then_ends_the_study_which_goes_on_once_it_is_calm(tmp_path: Path) -> None:
    plan, server = shaky(2.0)
    with pytest.raises(
        NoResult, match=r"no gain below \d+ % could be seen, above the bound of 100 %.* load is .* on"
    ) as e:
        tune(plan, tmp_path / "run")
    assert e.value.stops_study
    assert "stop_at_noise_pct: null" in str(e.value)
    assert server.replays == 2 * 4 * len(plan.tuning), "the reference and the noise, twice, and no other setting"
    assert not (tmp_path / "run/trials").exists()
    server.spread = 0.001
    results = tune(plan, tmp_path / "run")
    assert results.noise[0].visible_pct < 100, "neither the noise nor the reference of the bad hour is kept"
    assert tune(plan, tmp_path / "run").noise == results.noise, "and what was found then is kept"


def test_a_study_may_ask_to_go_on_in_spite_of_the_noise(tmp_path: Path) -> None:
    plan, _ = shaky(2.0, stop_at_noise_pct=None)
    results = tune(plan, tmp_path / "run")
    assert results.noise[0].visible_held_out_pct > 100
    assert {c.verdict for c in results.comparisons} <= {"inconclusive", "unchanged", "no clear winner"}
    assert any("before anything can be concluded" in note for note in results.warnings)


def test_the_load_is_told_beside_the_cores_and_with_what_the_host_took(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 10 0 0 90 0 0 0 0 7 0\n")
    watch = LoadWatch(stat)
    stat.write_text("cpu 50 0 0 90 0 0 0 60 7 0\n")
    assert "its host gave 60 % of their time to others" in watch.words()
    assert " core" in watch.words()
    assert "host" not in LoadWatch(tmp_path / "absent").words()
