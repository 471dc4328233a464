"""Aggregation, the paired bootstrap, the front and the choice: laws and worked examples."""

import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hand_made import records
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import aggregate, choose, metrics, pareto, stats
from autotune.choose import Candidate
from autotune.compare import compare_settings
from autotune.evaluate import SimulatedEvaluator
from autotune.metrics import Limits
from autotune.records import Origin, Replay
from autotune.results import Verdict
from autotune.spec import LimitsSpec, StudySpec
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import Branch, PolicyParams, Scope
from ppas_core.sim.profile import load_profile
from traces.format import Trace
from traces.generate import rag_bursts

REFERENCE = published("ppas")


def replay(
    latencies: Sequence[float], *, regime: str = "r", name: str = "t", status: list[str] | None = None
) -> Replay:
    """One trace whose requests all arrive at 0, get a first token at once and the last after `latencies`."""
    return Replay(
        params=REFERENCE,
        trace_name=name,
        trace_digest=name,
        regime=regime,
        origin=Origin.SIMULATED,
        requests=records([0.0] * len(latencies), [[0.01, latency] for latency in latencies], status=status),
    )


def study(seed: int, factor: float, *, noise: float = 0.0, run: int = 0, traces: int = 6) -> list[Replay]:
    """Traces of two regimes with log-normal latencies; `factor` scales them, `noise` is drawn anew in each `run`."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, run, 7])
    return [
        replay(factor * np.exp(shared.normal(size=20)) * np.exp(noise * own.normal(size=20)) + 0.1,
               regime=f"r{i % 2}", name=f"t{i}")
        for i in range(traces)
    ]  # fmt: skip


def test_regimes_weigh_the_same_and_seeds_are_averaged_before_the_ratio() -> None:
    reference = [replay([1.0], name="a"), replay([3.0], name="b"), replay([10.0], regime="s", name="c")]
    setting = [replay([2.0], name="a"), replay([2.0], name="b"), replay([5.0], regime="s", name="c")]
    means = [aggregate.regime_means(side, ["mean_latency_s"]) for side in (setting, reference)]
    assert means[1] == {"r": {"mean_latency_s": 2.0}, "s": {"mean_latency_s": 10.0}}
    assert aggregate.objective("mean_latency_s", *means) == pytest.approx((1.0 * 0.5) ** 0.5)
    assert aggregate.improvement_pct(0.915) == pytest.approx(8.5)


def test_where_higher_is_better_the_ratio_is_turned_round() -> None:
    assert aggregate.ratio("goodput_per_s", 4.0, 2.0) == 0.5


def test_a_run_with_a_failed_request_has_no_score() -> None:
    with pytest.raises(NoResult, match="trace 't': 1 timeout of 2 requests"):
        aggregate.regime_means([replay([1.0, 2.0], status=["ok", "timeout"])], ["mean_latency_s"])


def test_an_undefined_metric_is_an_error_and_never_a_number() -> None:
    nan = {"r": {"mean_tpot_s": float("nan")}}
    with pytest.raises(NoResult, match="mean_tpot_s is undefined in regime 'r'"):
        aggregate.objective("mean_tpot_s", nan, nan)


def test_a_setting_against_itself_has_no_difference_at_all() -> None:
    found = stats.compare(study(1, 1.0), study(1, 1.0), ["mean_latency_s", "p95_latency_s"])
    assert {(i.value, i.low, i.high) for i in found.overall.values()} == {(0.0, 0.0, 0.0)}
    assert (found.share_faster.value, found.share_slower) == (0.0, 0.0)


def test_a_clear_gain_has_an_interval_around_it_and_is_called_better() -> None:
    found = stats.compare(study(1, 0.9), study(1, 1.0), ["mean_latency_s"])
    effect = found.overall["mean_latency_s"]
    assert 0 < effect.low < effect.value < effect.high < 10
    assert choose.verdict(found, ["mean_latency_s"], min_gain_pct=1) == "better"
    assert choose.verdict(found, ["mean_latency_s"], min_gain_pct=20) == "no clear winner"
    backwards = stats.compare(study(1, 1.0), study(1, 0.9), ["mean_latency_s"])
    assert choose.verdict(backwards, ["mean_latency_s"], min_gain_pct=1) == "worse"
    assert found.share_faster.value == 1.0
    sentence = choose.sentence("tuned", "paper default", found, ["mean_latency_s"], "better", Origin.SIMULATED)
    assert sentence.startswith("tuned is better than paper default: mean end-to-end latency ")
    assert (
        "over 6 simulated held-out traces with 120 requests. End to end, 100% of the requests are faster and 0% slower."
        in sentence
    )


def test_intervals_cover_a_true_null_effect_about_as_often_as_they_say() -> None:
    """Two noisy measurements of the same setting: a 95 % interval must hold 0 in most of 60 repetitions."""
    covered = 0
    for seed in range(60):
        a, b = (study(seed, 1.0, noise=0.3, run=run, traces=12) for run in (0, 1))
        effect = stats.compare(a, b, ["mean_latency_s"], resamples=400).overall["mean_latency_s"]
        covered += effect.low <= 0 <= effect.high
    assert covered >= 52


def test_the_interval_of_one_regime_rests_on_its_own_traces_and_not_on_those_of_all() -> None:
    """Six regimes of two traces, each of which is a few per cent off by itself: no regime differs in truth."""
    missed, rng = 0, np.random.default_rng(4)
    for _ in range(40):
        sides = [
            [
                replay(factor * np.linspace(1, 2, 10), regime=f"r{i // 2}", name=f"t{i}")
                for i, factor in enumerate(factors)
            ]
            for factors in (np.exp(0.05 * rng.normal(size=12)), np.ones(12))
        ]
        found = stats.compare(sides[0], sides[1], ["mean_latency_s"], resamples=200)
        intervals = [by_metric["mean_latency_s"] for by_metric in found.regimes.values()]
        missed += sum(not interval.low <= 0 <= interval.high for interval in intervals)
    assert missed <= 24, "5 % of 240, and twice that for chance"


def test_settings_on_different_traces_are_not_compared() -> None:
    with pytest.raises(InvalidInput, match="not replayed on the same traces"):
        stats.compare(study(1, 1.0), study(1, 1.0)[::-1], ["mean_latency_s"])


def test_the_same_seed_gives_the_same_interval() -> None:
    pair = study(3, 0.97, noise=0.1), study(3, 1.0, noise=0.1, run=1)
    assert stats.compare(*pair, ["p95_latency_s"], seed=5) == stats.compare(*pair, ["p95_latency_s"], seed=5)


@pytest.mark.parametrize("at_a_time", [1, 50, 2**30])
def test_how_much_is_drawn_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    pair = study(3, 0.97, noise=0.1), study(3, 1.0, noise=0.1, run=1)
    names = ["mean_latency_s", "p95_latency_s", "mean_tpot_s", "makespan_s"]
    usual = stats.compare(*pair, names, resamples=200)
    monkeypatch.setattr(stats, "MAX_DRAWN", at_a_time)
    assert stats.compare(*pair, names, resamples=200) == usual


@given(st.integers(1, 60), st.sampled_from([0.0, 50.0, 95.0, 99.0, 100.0]), st.integers(0, 10**6))
def test_a_percentile_looked_for_nearby_is_the_percentile_to_the_last_bit(size: int, q: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.choice([rng.exponential(size=(5, size)), rng.integers(0, 4, (5, size)).astype(float)])
    rows[rng.random(rows.shape) < rng.choice([0.0, 0.3])] = np.nan
    low, high = sorted(rng.exponential(size=2))
    assert np.array_equal(metrics.percentile_near(rows, q, low, high), metrics.percentile(rows, q), equal_nan=True)


def test_long_traces_get_the_same_intervals_to_the_last_bit_in_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    latencies = np.random.default_rng(0).exponential(size=20_000) + 0.02
    pair = [replay(latencies)], [replay(latencies * 1.1)]
    names = ["mean_latency_s", "p50_latency_s", "p95_latency_s", "p99_tpot_s"]
    spent_s = []
    found = []
    for long_trace in (10**9, stats.LONG_TRACE):
        monkeypatch.setattr(stats, "LONG_TRACE", long_trace)
        started = time.process_time()
        found.append(stats.compare(*pair, names, resamples=60))
        spent_s.append(time.process_time() - started)
    assert found[0] == found[1]
    assert spent_s[1] < 0.7 * spent_s[0]  # a fifth of it on an idle machine


def test_long_traces_are_compared_in_little_memory() -> None:
    latencies = np.random.default_rng(0).exponential(size=20_000)
    pair = [replay(latencies)], [replay(latencies * 1.1)]
    tracemalloc.start()
    try:
        stats.compare(*pair, ["mean_latency_s", "p95_latency_s"], resamples=500)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20  # all rows at once would be 76 MiB, twice
    finally:
        tracemalloc.stop()


POINTS = st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=8)


@settings(max_examples=60)
@given(POINTS)
def test_hypervolume_counts_the_unit_cells_that_some_point_dominates(points: list[tuple[int, int, int]]) -> None:
    cells = {
        (x, y, z)
        for a, b, c in points
        for x in range(a, 7)
        for y in range(b, 7)
        for z in range(c, 7)
    }  # fmt: skip
    assert pareto.hypervolume(points, (7, 7, 7)) == pytest.approx(len(cells))


FOUR = st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=12)


@given(POINTS | FOUR)
def test_a_growing_front_has_the_volume_of_all_its_points_at_any_time(points: list[tuple[int, ...]]) -> None:
    front = pareto.GrowingFront([6] * len(points[0]))
    for count, point in enumerate(points, start=1):
        found = front.add(point)
        assert found == front.volume == pytest.approx(pareto.hypervolume(points[:count], [6] * len(point)))


def test_the_volume_after_each_of_4000_trials_is_there_at_once() -> None:
    points = np.random.default_rng(0).random((4000, 3))
    front = pareto.GrowingFront([1.0] * 3)
    started = time.process_time()
    volumes = [front.add(point) for point in points]
    assert time.process_time() - started < 5  # 0.1 s on an idle machine; anew for each trial it took minutes
    assert volumes == sorted(volumes)
    assert volumes[-1] == pytest.approx(pareto.hypervolume(points, [1.0] * 3))


@given(POINTS)
def test_nothing_on_the_front_is_dominated_and_everything_else_is(points: list[tuple[int, int, int]]) -> None:
    front = pareto.on_front(points)

    def dominates(a: Sequence[int], b: Sequence[int]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    for point, keep in zip(points, front, strict=True):
        assert keep == (not any(dominates(other, point) for other in points))


def test_the_front_of_ten_thousand_trials_takes_no_table_of_all_pairs() -> None:
    points = np.random.default_rng(0).random((10_000, 3))
    tracemalloc.start()
    front = pareto.on_front(points)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < front.sum() < 1000
    assert most < 10e6  # a table of all pairs: 300 MB and more


def _candidate(
    mean: float, p95: float = 1.0, *, regimes: dict[str, float] | None = None, b_cap: int = 2048
) -> Candidate:
    means = {
        name: {"mean_latency_s": value, "p95_latency_s": value} for name, value in (regimes or {"r": mean}).items()
    }
    return Candidate(PolicyParams(b_max=16384, b_cap=b_cap), {"mean_latency_s": mean, "p95_latency_s": p95}, means)


BASE = _candidate(1.0)
MEAN = ["mean_latency_s"]


@pytest.mark.parametrize(
    ("others", "preferred", "pick"),
    [
        ([_candidate(0.9), _candidate(0.8)], MEAN, 2),
        ([_candidate(1.2)], MEAN, 0),
        ([_candidate(0.996)], MEAN, 0),  # within 0.5 % of the best: the reference is kept
        ([_candidate(0.9, b_cap=512), _candidate(0.899, b_cap=256)], MEAN, 1),  # a tie goes to the nearest
        ([_candidate(0.9, 1.5), _candidate(0.95, 0.9)], ["p95_latency_s"], 2),
        ([_candidate(0.9, 1.5), _candidate(0.95, 0.9)], ["mean_latency_s", "p95_latency_s"], 2),
    ],
)
def test_the_rule_picks_the_best_and_ties_go_towards_the_reference(
    others: list[Candidate], preferred: list[str], pick: int
) -> None:
    assert choose.choose([BASE, *others], 0, preferred).index == pick


def test_a_setting_that_harms_a_protected_regime_is_not_picked() -> None:
    base = _candidate(1.0, regimes={"idle": 1.0, "busy": 1.0})
    risky = _candidate(0.7, regimes={"idle": 1.1, "busy": 0.5})
    safe = _candidate(0.9, regimes={"idle": 1.0, "busy": 0.8})
    assert choose.choose([base, risky, safe], 0, MEAN).index == 1
    found = choose.choose([base, risky, safe], 0, MEAN, protect={"idle": 0.5})
    assert found.index == 2
    assert "1 settings were left out for harming a protected regime" in found.sentence


def test_the_pick_is_of_those_measured_again_and_not_the_luckiest_of_those_measured_once() -> None:
    lucky, fell_back = _candidate(0.9, b_cap=512), replace(_candidate(0.92), measurements=3)
    found = choose.choose([BASE, lucky, fell_back], 0, MEAN)
    assert found.index == 2
    assert "Of 3 settings, of which the best was measured again, 2/16384/2048 prefill is the best on" in found.sentence
    two = [replace(lucky, measurements=3), fell_back]
    assert "of which the 2 best were measured again" in choose.choose([BASE, *two], 0, MEAN).sentence
    worse = replace(fell_back, objectives={"mean_latency_s": 1.1, "p95_latency_s": 1.1})
    assert choose.choose([BASE, lucky, worse], 0, MEAN).index == 0


def test_where_all_that_were_measured_again_do_harm_the_others_are_chosen_from() -> None:
    base = _candidate(1.0, regimes={"idle": 1.0, "busy": 1.0})
    risky = replace(_candidate(0.7, regimes={"idle": 1.1, "busy": 0.5}), measurements=3)
    safe = _candidate(0.9, regimes={"idle": 1.0, "busy": 0.8})
    assert choose.choose([base, risky, safe], 0, MEAN, protect={"idle": 0.5}).index == 2


def test_the_choice_says_how_many_settings_noise_may_have_put_behind_the_pick() -> None:
    others = [_candidate(mean, b_cap=2048 - 64 * i) for i, mean in enumerate([0.8, 0.82, 0.84, 0.9])]
    exact = choose.choose([BASE, *others], 0, MEAN)
    assert exact.sentence.endswith("and no other lies within 0.5 % of it.")
    said = {pct: choose.choose([BASE, *others], 0, MEAN, noise_pct=pct) for pct in (2.0, 3.0, 5.7, 90.0)}
    assert {found.index for found in said.values()} == {exact.index}
    ends = {pct: found.sentence.partition("latency. ")[2] for pct, found in said.items()}
    assert ends[2.0] == "No other lies within the 2.0 % that noise alone may put between two trials."
    assert ends[3.0].startswith("1 other cannot be told from it: it lies within the 3.0 % that noise alone")
    assert ends[5.7].startswith("2 others cannot be told from it: they lie within the 5.7 % that noise alone")
    assert ends[90.0].startswith("4 others"), "the reference among them"
    kept = choose.choose([BASE, _candidate(0.998)], 0, MEAN, noise_pct=5.7)
    assert "so it is kept. 1 other cannot be told from it" in kept.sentence


def test_without_candidates_there_is_no_result() -> None:
    with pytest.raises(NoResult):
        choose.choose([], 0, MEAN)


def test_knobs_that_never_acted_get_their_default_back() -> None:
    pick = PolicyParams(b_max=8192, b_cap=512, n_th=5, t_large=9000, scope=Scope.GLOBAL)
    never: dict[str, int] = {Branch.MAX: 100}
    settled, reasons = choose.settle(pick, never, REFERENCE)
    assert (settled.b_max, settled.b_cap, settled.n_th, settled.t_large) == (8192, 2048, 2, None)
    assert set(reasons) == {"t_large", "n_th", "b_cap"}
    acted = {Branch.MAX: 1, Branch.PRESSURE: 1, Branch.LARGE_PREFILL: 1}
    assert choose.settle(pick, acted, REFERENCE) == (pick, {})


def test_a_default_that_does_not_go_with_the_pick_is_not_taken() -> None:
    pick = PolicyParams(b_max=16384, b_cap=2048, n_th=3, scope=Scope.GLOBAL)
    reference = PolicyParams(b_max=16384, b_cap=128, n_th=2, scope=Scope.PREFILL)  # too little for the global scope
    settled, reasons = choose.settle(pick, {Branch.MAX: 100}, reference)
    assert (settled.b_cap, settled.n_th, settled.scope) == (2048, 2, Scope.GLOBAL)
    assert set(reasons) == {"n_th"}


def test_prefer_must_name_an_objective() -> None:
    objectives = ["mean_latency_s", "p95_ttft_s"]
    assert choose.preferred_metrics("mean", objectives) == ("mean_latency_s",)
    assert choose.preferred_metrics("balanced", objectives) == tuple(objectives)
    assert choose.preferred_metrics("p95_ttft_s", objectives) == ("p95_ttft_s",)
    with pytest.raises(InvalidInput, match="allowed: mean, balanced, p95_ttft_s"):
        choose.preferred_metrics("p95", objectives)


@pytest.mark.parametrize(
    ("against_reference", "against_static", "reference_against_static", "exported"),
    [
        ("better", "better", "no clear winner", "tuned"),
        ("better", "no clear winner", "worse", "tuned"),
        ("better", "worse", "worse", "best static"),
        ("better", "worse", "no clear winner", "best static"),
        ("no clear winner", "better", "better", "reference"),
        ("no clear winner", "no clear winner", "no clear winner", "reference"),
        ("no clear winner", "no clear winner", "worse", "best static"),
        ("worse", "worse", "better", "reference"),
    ],
)
def test_a_clear_winner_is_exported_and_without_one_the_reference(
    against_reference: Verdict, against_static: Verdict, reference_against_static: Verdict, exported: str
) -> None:
    assert choose.exported_role(against_reference, against_static, reference_against_static) == exported


def test_costs_name_what_is_clearly_worse_and_words_carry_no_double_negative() -> None:
    gain, loss, none = (
        stats.Interval(2.0, 1.0, 3.0),
        stats.Interval(-20.0, -22.0, -18.0),
        stats.Interval(-1.0, -2.0, 1.0),
    )
    found = stats.PairedComparison(
        overall={"mean_latency_s": gain, "mean_tpot_s": loss, "makespan_s": none},
        regimes={"λ=1": {"mean_latency_s": gain}, "λ=2": {"mean_latency_s": loss}},
        share_faster=stats.Interval(0.5, 0.4, 0.6), share_slower=0.2, num_requests=9, num_traces=1, confidence=0.95,
    )  # fmt: skip
    assert choose.costs(found, ["mean_latency_s"]) == [
        "mean TPOT 20.0 % worse (95% interval 18.0 to 22.0 %)",
        "regime λ=2: mean end-to-end latency 20.0 % worse (95% interval 18.0 to 22.0 %)",
    ]
    assert choose.costs(found, ["mean_latency_s"], min_gain_pct=20.5) == [], "less than a gain that is worth having"
    assert choose.change(none, 0.95) == "1.0 % worse (95% interval 2.0 % worse to 1.0 % better)"


def _simulated(params: PolicyParams, traces: list[Trace]) -> list[Replay]:
    server = SimulatedEvaluator(load_profile("rtx5090-qwen2.5-3b"))
    return [server.replay(params, trace) for trace in traces]


@pytest.mark.parametrize("metric", ["makespan_s", "goodput_per_s", "mean_itl_s"])
def test_a_metric_of_whole_replays_has_no_interval_with_one_trace_a_regime(metric: str) -> None:
    traces = [rag_bursts(rate, 0) for rate in (0.6, 1.2)]
    limits = Limits(latency_s=60.0)
    sides = [_simulated(params, traces) for params in (PolicyParams.static(16384), published("ppas"))]
    assert not stats.can_tell(metric, *sides, limits)
    with pytest.raises(InvalidInput, match="needs two traces of each regime"):
        stats.compare(*sides, [metric], limits=limits)
    spec = StudySpec(name="x", objectives=(metric,), limits=LimitsSpec(latency_s=60.0))
    found = compare_settings(("a", sides[0]), ("b", sides[1]), spec, (metric,))
    assert found.verdict == "inconclusive"
    assert "a single trace" in found.sentence


def test_settings_that_differ_by_luck_are_not_told_apart_by_a_metric_of_whole_replays() -> None:
    """Equal in the long run, on 40 disjoint pairs of traces: at most the 5 % that the confidence allows, and a few."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        logs = [rng.normal(0, 0.02, size=3) for _ in range(2)]
        interval = stats._student(float(np.exp(np.mean(logs))), logs, 0.95)
        wrong += not interval.low < 0 < interval.high
    assert wrong <= 20


def test_students_interval_holds_the_effect_that_is_there() -> None:
    traces = [rag_bursts(rate, seed) for rate in (0.6, 1.2) for seed in range(4)]
    sides = [_simulated(params, traces) for params in (PolicyParams.static(512), published("ppas"))]
    found = stats.compare(*sides, ["makespan_s", "mean_latency_s"]).overall["makespan_s"]
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(
        aggregate.improvement_pct(
            aggregate.objective(
                "makespan_s", *(aggregate.regime_means(side, ["makespan_s"]) for side in sides)
            )
        )
    )  # fmt: skip


def test_an_interval_never_claims_more_than_all_of_the_time() -> None:
    few = [study(seed, 1.0, noise=0.9, traces=2) for seed in (1, 2)]
    found = stats.compare(few[0], [_renamed(r, o) for r, o in zip(few[1], few[0], strict=True)], ["p95_latency_s"])
    for interval in (found.overall["p95_latency_s"], *(effects["p95_latency_s"] for effects in found.regimes.values())):
        assert interval.low <= interval.value <= interval.high < 100


def _renamed(replay_: Replay, other: Replay) -> Replay:
    return replace(replay_, trace_digest=other.trace_digest, trace_name=other.trace_name)
