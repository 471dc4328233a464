"""A race stops what has certainly lost, and nothing that may still win."""

import numpy as np

from autotune.race import Race, in_turn

TRACES = [f"t{number}" for number in range(12)]
REGIMES = ["idle", "busy"] * 6
OBJECTIVES = ("mean_latency_s", "p95_latency_s")


def values(
    rng: np.random.Generator, gain: float, noise: float, p95_gain: float | None = None
) -> dict[str, dict[str, float]]:
    """A setting's metrics on all traces: `gain` of the log against a common trace level."""
    gains = {"mean_latency_s": gain, "p95_latency_s": gain if p95_gain is None else p95_gain}
    return {
        trace: {
            name: float(np.exp(2 + 0.3 * place - gains[name] + noise * rng.normal())) for name in OBJECTIVES
        }
        for place, trace in enumerate(TRACES)
    }  # fmt: skip


def started(rng: np.random.Generator, noise: float) -> Race:
    """A race with an incumbent (gain 0) and four complete settings behind it."""
    race = Race(OBJECTIVES, TRACES, REGIMES, noise=noise)
    for gain in (-0.05, 0.0, -0.02, -0.1, -0.03):
        race.finished(values(rng, gain, noise), score=1 - gain)
    return race


def stops_after(race: Race, by_trace: dict[str, dict[str, float]]) -> int | None:
    for count in range(1, len(TRACES) + 1):
        if race.deficit({name: by_trace[name] for name in TRACES[:count]}) is not None:
            return count
    return None


def test_a_setting_far_behind_stops_after_two_traces_with_the_deficit_in_words() -> None:
    rng = np.random.default_rng(0)
    race = started(rng, 0.01)
    far = values(rng, -0.3, 0.01)
    assert stops_after(race, far) == 2
    reason = race.deficit({name: far[name] for name in TRACES[:2]})
    assert reason is not None
    assert reason.startswith("stopped after 2 of 12 traces: certainly behind the best setting in every objective, by 3")


def test_one_trace_is_never_enough_and_a_setting_at_the_last_trace_is_not_stopped() -> None:
    rng = np.random.default_rng(1)
    race = started(rng, 0.01)
    far = values(rng, -2.0, 0.01)
    assert race.deficit({TRACES[0]: far[TRACES[0]]}) is None
    assert race.deficit(far) is None


def test_the_luckiest_of_many_equal_settings_stops_hardly_any_other_that_is_as_good() -> None:
    rng, lost, far = np.random.default_rng(5), 0, []
    for _ in range(100):
        race = Race(OBJECTIVES[:1], TRACES, REGIMES, noise=0.03)
        for _ in range(20):
            measured = values(rng, 0.0, 0.03)
            race.finished(
                measured, score=float(np.exp(np.mean([np.log(own["mean_latency_s"]) for own in measured.values()])))
            )
        lost += stops_after(race, values(rng, 0.0, 0.03)) is not None
        far.append(stops_after(race, values(rng, -0.2, 0.03)))
    assert lost <= 3
    assert None not in far
    assert np.median(far) <= 3, "what is far behind stops as early as before"


def test_a_setting_as_good_as_the_incumbent_is_hardly_ever_stopped() -> None:
    rng = np.random.default_rng(2)
    lost = sum(stops_after(started(rng, 0.03), values(rng, 0.0, 0.03)) is not None for _ in range(400))
    assert lost <= 8  # 2 %, over ten looks each


def test_a_setting_that_wins_one_objective_runs_to_the_end() -> None:
    rng = np.random.default_rng(3)
    assert stops_after(started(rng, 0.01), values(rng, -0.4, 0.01, p95_gain=0.1)) is None


def test_nothing_stops_before_it_is_known_how_much_settings_vary() -> None:
    rng = np.random.default_rng(4)
    race = Race(OBJECTIVES, TRACES, REGIMES, noise=0.01)
    for gain in (0.0, -0.1, -0.1):
        race.finished(values(rng, gain, 0.01), score=1 - gain)
    assert stops_after(race, values(rng, -1.0, 0.01)) is None


def test_more_noise_asks_for_more_traces() -> None:
    def mean_traces(noise: float) -> float:
        rng = np.random.default_rng(5)
        counts = [stops_after(started(rng, noise), values(rng, -0.15, noise)) or len(TRACES) for _ in range(40)]
        return float(np.mean(counts))

    assert mean_traces(0.01) < mean_traces(0.05) < mean_traces(0.2)


def test_a_metric_where_higher_is_better_is_raced_the_right_way_round() -> None:
    race = Race(("goodput_per_s",), TRACES, REGIMES, noise=0.01)
    rng = np.random.default_rng(6)

    def goodput(level: float) -> dict[str, dict[str, float]]:
        return {trace: {"goodput_per_s": level * float(np.exp(0.01 * rng.normal()))} for trace in TRACES}

    for level in (2.0, 1.9, 1.8, 1.7):
        race.finished(goodput(level), score=1 / level)
    assert stops_after(race, goodput(1.0)) == 2
    assert stops_after(race, goodput(2.1)) is None


def test_a_setting_that_loses_one_regime_alone_is_not_stopped_before_the_other_was_seen() -> None:
    rng = np.random.default_rng(7)
    race = started(rng, 0.01)
    far = values(rng, -0.5, 0.01)
    idle = [name for name, regime in zip(TRACES, REGIMES, strict=True) if regime == "idle"]
    assert race.deficit({name: far[name] for name in idle}) is None
    assert race.deficit({name: far[name] for name in [*idle, "t1"]}) is not None


def test_a_regime_weighs_alike_however_many_traces_it_has() -> None:
    """Behind by 30 % on one busy trace and ahead by 30 % on five idle ones is no deficit, and neither is the reverse."""
    rng = np.random.default_rng(8)
    regimes = ["busy", *["idle"] * 5, *["busy"] * 5, "idle"]
    race = Race(OBJECTIVES, TRACES, regimes, noise=0.01)
    for gain in (-0.05, 0.0, -0.02, -0.1, -0.03):
        race.finished(values(rng, gain, 0.01), score=1 - gain)
    mixed = {
        name: {metric: value * (1.3 if regime == "busy" else 1 / 1.32) for metric, value in found.items()}
        for (name, found), regime in zip(values(rng, 0.0, 0.01).items(), regimes, strict=True)
    }
    assert stops_after(race, mixed) is None


def test_a_metric_that_is_zero_somewhere_leaves_the_race_open() -> None:
    rng = np.random.default_rng(9)
    race = started(rng, 0.01)
    far = values(rng, -0.5, 0.01)
    far["t1"]["p95_latency_s"] = 0.0
    assert race.deficit({name: far[name] for name in TRACES[:4]}) is None


def test_traces_come_in_turn() -> None:
    assert in_turn([0, 1, 2, 3, 4], ["a", "a", "a", "b", "b"]) == [0, 3, 1, 4, 2]
    assert in_turn([], []) == []
