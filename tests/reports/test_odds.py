"""How sure a place on the front is."""

from __future__ import annotations

import math
import random

import odd_studies
import pytest
import sample_study

from autotune.results import NoiseInfo, StudyResults
from reports import figures, views
from reports.odds import Odds, front_odds

MEAN, TAIL = "mean_latency_s", "p95_latency_s"


@pytest.fixture(scope="module")
def study() -> StudyResults:
    return sample_study.build(num_search=24, num_random=6)


def with_values(study: StudyResults, values: dict[int, dict[str, dict[str, float]]]) -> StudyResults:
    """Only these trials, with these values by trace; the objectives follow from them."""
    base = values[study.reference_trial]
    trials = []
    for number, by_trace in values.items():
        regimes: dict[str, list[str]] = {}
        for trace in study.traces:
            if trace.name in by_trace:
                regimes.setdefault(trace.regime, []).append(trace.name)
        ratios = {
            metric: math.prod(
                sum(by_trace[n][metric] for n in names) / sum(base[n][metric] for n in names)
                for names in regimes.values()
            )
            ** (1 / len(regimes))
            for metric in (MEAN, TAIL)
        }
        trials.append(study.trials[number].model_copy(update={"by_trace": by_trace, "objectives": ratios}))
    return study.model_copy(update={"trials": trials})


def tuning(study: StudyResults) -> list[str]:
    return [trace.name for trace in study.traces if trace.purpose == "tuning"]


def flat(study: StudyResults, mean: float, tail: float) -> dict[str, dict[str, float]]:
    return {name: {MEAN: mean, TAIL: tail} for name in tuning(study)}


def test_what_no_draw_can_change_is_certain(study):
    """On every trace alike: 8 beats all others, so it alone is on the front, and no interval has any width."""
    changed = with_values(study, {0: flat(study, 3, 5), 8: flat(study, 2, 4), 9: flat(study, 2.5, 4.5)})
    odds = front_odds(changed)
    assert odds.chance == {0: 0.0, 8: 1.0, 9: 0.0}
    assert odds.gain_pct[8][MEAN] == pytest.approx((100 / 3, 100 / 3))
    assert odds.gain_pct[9][TAIL] == pytest.approx((10.0, 10.0))


def test_two_trials_that_trade_one_objective_for_the_other_are_both_on_the_front(study):
    changed = with_values(study, {0: flat(study, 3, 5), 8: flat(study, 2, 4.9), 9: flat(study, 2.5, 4)})
    assert front_odds(changed).chance == {0: 0.0, 8: 1.0, 9: 1.0}


def test_a_tie_puts_both_on_the_front(study):
    changed = with_values(study, {0: flat(study, 3, 5), 8: flat(study, 2, 4), 9: flat(study, 2, 4)})
    assert front_odds(changed).chance == {0: 0.0, 8: 1.0, 9: 1.0}


def test_trials_that_only_the_traces_drawn_tell_apart_share_the_front(study):
    """Each is better on every other trace by as much: a fair coin."""
    one, other = flat(study, 2, 4), flat(study, 2, 4)
    rng = random.Random(0)
    for name in tuning(study):
        factor = math.exp(rng.gauss(0, 0.1))
        one[name] = {MEAN: 2 * factor, TAIL: 4 * factor}
        other[name] = {MEAN: 2 / factor, TAIL: 4 / factor}
    odds = front_odds(with_values(study, {0: flat(study, 3, 5), 8: one, 9: other}))
    assert odds.chance[8] + odds.chance[9] == pytest.approx(1.0, abs=0.02)
    assert 0.02 < odds.chance[8] < 0.98
    low, high = odds.gain_pct[8][MEAN]
    assert low < high
    assert odds.correlation[8][MEAN, TAIL] == pytest.approx(1.0, abs=1e-6)


def test_the_interval_holds_the_gain_that_the_trial_was_given(study):
    odds = front_odds(study)
    assert odds.num_traces == len(tuning(study))
    inside = 0
    known = [t for t in study.trials if t.state == "ok"]
    for trial in known:
        low, high = odds.gain_pct[trial.number][MEAN]
        assert low <= high
        inside += low - 0.5 <= 100 * (1 - trial.objectives[MEAN]) <= high + 0.5
    assert inside > 0.8 * len(known)


def test_the_front_of_three_objectives_is_found_among_all_of_them(study):
    three = [*study.objectives, study.objectives[0].model_copy(update={"metric": "makespan_s"})]
    values = {0: (3.0, 5.0, 50.0), 8: (2.0, 4.0, 60.0), 9: (2.5, 4.5, 49.0), 10: (2.6, 4.6, 55.0)}
    trials = [
        study.trials[n].model_copy(
            update={
                "state": "ok",
                "by_trace": {name: dict(zip((MEAN, TAIL, "makespan_s"), v, strict=True)) for name in tuning(study)},
            }
        )
        for n, v in values.items()
    ]
    odds = front_odds(study.model_copy(update={"objectives": three, "trials": trials}))
    assert odds.chance == {0: 0.0, 8: 1.0, 9: 1.0, 10: 0.0}


def test_random_trials_have_an_interval_but_no_place_on_the_front(study):
    odds = front_odds(study)
    random_trials = [t.number for t in study.trials if t.arm == "random" and t.state == "ok"]
    assert random_trials
    assert not set(random_trials) & odds.chance.keys()
    assert set(random_trials) <= odds.gain_pct.keys()


def test_with_one_trace_in_each_regime_the_measured_noise_speaks_or_nothing_does(study):
    lone = study.model_copy(
        update={"traces": [t for t in study.traces if t.purpose == "held-out" or t.seed == 0], "noise": []}
    )
    assert front_odds(lone) == Odds()
    noise = NoiseInfo(
        metric=MEAN, replay_pct=4, objective_pct=2.0, visible_pct=6, visible_held_out_pct=5, repeats=1, num_traces=6
    )
    odds = front_odds(lone.model_copy(update={"noise": [noise]}))
    trial = next(t for t in lone.trials if t.state == "ok" and t.arm == "search")
    ratio = trial.objectives[MEAN]
    assert odds.source == "noise"
    assert odds.chance == {}
    by = math.exp(1.96 * math.sqrt(2) * 0.02)  # the reference was measured once as well
    assert odds.interval(trial, MEAN) == pytest.approx((100 * (1 - ratio * by), 100 * (1 - ratio / by)), rel=1e-4)
    assert odds.interval(trial, TAIL) is None
    assert odds.interval(lone.trials[lone.reference_trial], MEAN) is None, "0 by definition"
    tail, few = noise.model_copy(update={"metric": TAIL}), noise.model_copy(update={"freedom": 6})
    beside = front_odds(lone.model_copy(update={"noise": [few], "noise_beside": [tail]}))
    assert beside.interval(trial, TAIL) is not None
    (least, most), (low, high) = (beside.interval(trial, MEAN), odds.interval(trial, MEAN))
    assert (most - least) / (high - low) == pytest.approx(2.447 / 1.96, rel=0.01), (
        "a noise that is known from little is less sure"
    )


def test_intervals_are_as_wide_as_the_noise_though_the_traces_drawn_again_show_less(study):
    noise = NoiseInfo(
        metric=MEAN, replay_pct=80, objective_pct=30.0, visible_pct=90, visible_held_out_pct=90, repeats=1, num_traces=6
    )
    quiet, noisy = front_odds(study), front_odds(study.model_copy(update={"noise": [noise]}))
    trial = next(t for t in study.trials if t.state == "ok" and t.arm == "search")
    widths = [high - low for low, high in (odds.interval(trial, MEAN) for odds in (quiet, noisy))]
    assert widths[0] < 40 < 120 < widths[1]
    assert noisy.interval(trial, TAIL) == quiet.interval(trial, TAIL)
    reference = study.trials[study.reference_trial]
    assert noisy.interval(reference, MEAN) == (0.0, 0.0)


@pytest.mark.parametrize("traces", ["several", "one"])
def test_a_setting_that_was_measured_again_has_less_noise(study, traces):
    noise = NoiseInfo(
        metric=MEAN, replay_pct=80, objective_pct=30.0, visible_pct=90, visible_held_out_pct=90, repeats=1, num_traces=6
    )
    kept = study.traces if traces == "several" else [t for t in study.traces if t.purpose == "held-out" or t.seed == 0]
    often = [t if t.number == study.reference_trial else t.model_copy(update={"measurements": 4}) for t in study.trials]
    once = front_odds(study.model_copy(update={"noise": [noise], "traces": kept}))
    averaged = front_odds(study.model_copy(update={"noise": [noise], "traces": kept, "trials": often}))
    trial = next(t for t in study.trials if t.state == "ok" and t.arm == "search")
    widths = []
    for odds in (once, averaged):
        low, high = odds.interval(trial, MEAN)
        widths.append(math.log((100 - low) / (100 - high)))
    assert widths[1] / widths[0] == pytest.approx(math.sqrt((1 + 1 / 4) / 2), rel=0.05)


def test_the_ellipse_is_as_wide_and_as_high_as_the_intervals(study):
    odds = front_odds(study)
    view = views.front(study, MEAN, TAIL)
    ring = next(t for t in figures.front(view, odds).data if t.name == "Pick, 95% interval")
    (low_x, high_x), (low_y, high_y) = (odds.gain_pct[study.pick_trial][m] for m in (MEAN, TAIL))
    assert (min(ring.x), max(ring.x)) == pytest.approx((low_x, high_x), abs=0.01 * (high_x - low_x))
    assert (min(ring.y), max(ring.y)) == pytest.approx((low_y, high_y), abs=0.01 * (high_y - low_y))


def test_a_proposal_of_the_simulator_is_drawn_solid_however_seldom_it_is_on_the_front():
    study = odd_studies.foretold()
    trial = next(t for t in study.trials if t.arm == "predicted")
    never = Odds(chance={t.number: 0.0 for t in study.trials})
    drawn = {t.name: t for t in figures.front(views.front(study, MEAN, TAIL), never).data}
    star, others = drawn["Proposed by the simulator"], drawn["Search"]
    assert [entry[1] for entry in star.customdata] == [trial.number]
    assert (list(star.marker.opacity), max(others.marker.opacity)) == ([1.0], 0.22)
    assert min(star.marker.size) > max(others.marker.size)
    assert star.marker.line.width == 0, "an outline in the page's colour eats up a small star"


def test_a_stopped_trial_is_drawn_open_and_is_neither_a_best_so_far_nor_in_a_slice():
    study = odd_studies.foretold()
    stopped = next(t for t in study.trials if t.state == "stopped")
    drawn = figures.front(views.front(study, MEAN, TAIL), front_odds(study))
    mark = next(t for t in drawn.data if t.name == "Stopped early")
    assert [entry[1] for entry in mark.customdata] == [stopped.number]
    assert "behind by 9 % after 2 of 6 traces" in mark.customdata[0][0]
    others = [number for t in drawn.data if t.customdata is not None and t is not mark for _, number in t.customdata]
    assert stopped.number not in others
    flattered = stopped.model_copy(update={"objectives": {MEAN: 0.01, TAIL: 0.01}})
    trials = [flattered if t is stopped else t for t in study.trials]
    course = views.best_so_far(study.model_copy(update={"trials": trials}), MEAN).arms["search"]
    assert max(v for v in course if v is not None) < 50
    assert stopped.number not in {p.trial.number for p in views.slice_of(study, "b_cap", MEAN).points}


def test_the_close_up_of_the_front_shows_the_intervals_whole(study):
    view = views.front(study, "mean_latency_s", "p95_latency_s")
    figure = figures.front(view, front_odds(study), close_up=True)
    drawn = [trace for trace in figure.data if trace.name in ("Pick, 95% interval", "Front, 95% intervals")]
    assert len(drawn) == 2
    for across, values in ((figure.layout.xaxis.range, "x"), (figure.layout.yaxis.range, "y")):
        focus = view.focus_x if values == "x" else view.focus_y
        spare = 0.35 * (focus[1] - focus[0])
        reached = [value for trace in drawn for value in trace[values] if value is not None]
        assert across[0] < max(min(reached), focus[0] - spare + 1e-9)
        assert across[1] > min(max(reached), focus[1] + spare - 1e-9)
