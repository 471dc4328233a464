"""The data behind each figure."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
import sample_study

from autotune.results import Effect, StudyResults
from reports import pairs, panels, plane, roles, tables, views
from reports.odds import Odds
from reports.roles import BEST_STATIC, PAPER_DEFAULT
from reports.views import Missing


@pytest.fixture(scope="module")
def study() -> StudyResults:
    return sample_study.build()


def with_trials(study: StudyResults, **changes: object) -> StudyResults:
    return study.model_copy(update={"trials": [t.model_copy(update=changes) for t in study.trials]})


def test_the_reference_trial_stands_at_no_gain_in_either_objective(study):
    view = views.front(study, "mean_latency_s", "p95_latency_s")
    assert (view.reference.x, view.reference.y) == (0.0, 0.0)


def test_a_ratio_of_nine_tenths_is_a_gain_of_ten_per_cent():
    assert views.gain_pct(0.9) == pytest.approx(10.0)


def test_every_finished_trial_is_a_point_and_failed_ones_are_counted(study):
    view = views.front(study, "mean_latency_s", "p95_latency_s")
    failed = sum(t.state == "failed" for t in study.trials)
    assert failed > 0
    assert (len(view.points), view.failed) == (len(study.trials) - failed, failed)


def test_the_front_line_falls_in_one_objective_as_it_rises_in_the_other(study):
    line = views.front(study, "mean_latency_s", "p95_latency_s").front
    assert len(line) > 1
    assert all(a.x > b.x and a.y < b.y for a, b in pairwise(line))
    assert {p.trial.number for p in line} == {t.number for t in study.trials if t.on_front}


def test_the_close_up_holds_the_front_the_pick_and_the_reference(study):
    view = views.front(study, "mean_latency_s", "p95_latency_s")
    for point in (*view.front, view.pick, view.reference):
        assert view.focus_x[0] < point.x < view.focus_x[1]
        assert view.focus_y[0] < point.y < view.focus_y[1]
    beyond = [p for p in view.points if p.x < view.focus_x[0] or p.y < view.focus_y[0]]
    assert view.outside == len(beyond) > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_trial_whose_objective_is_not_finite_has_no_place_on_the_front(study, value):
    broken = study.trials[20].model_copy(update={"objectives": {"mean_latency_s": value, "p95_latency_s": 1.0}})
    changed = study.model_copy(update={"trials": [*study.trials[:20], broken, *study.trials[21:]]})
    view = views.front(changed, "mean_latency_s", "p95_latency_s")
    assert 20 not in {p.trial.number for p in view.points}


def test_without_a_finished_trial_the_front_says_so_in_words(study):
    view = views.front(with_trials(study, state="failed", objectives={}), "mean_latency_s", "p95_latency_s")
    assert isinstance(view, Missing)
    assert "None of the 168 trials finished" in view.reason


def test_regimes_are_ordered_by_their_load_and_not_by_their_spelling():
    assert views.ordered_regimes(["λ=1.4", "λ=10", "λ=0.4", "λ=2", "λ=0.4"]) == ["λ=0.4", "λ=1.4", "λ=2", "λ=10"]


def test_loads_are_numbers_where_the_names_differ_in_one_number_only(study):
    view = views.over_load(study, "mean_latency_s")
    assert view.load == sample_study.LOADS
    assert view.load_label.startswith("λ")


def test_loads_are_names_where_the_names_differ_in_more_than_a_number(study):
    renamed = {f"λ={load:g}": f"λ={load:g} p{i}" for i, load in enumerate(sample_study.LOADS)}
    held = [
        h.model_copy(update={"regimes": {renamed[r]: v for r, v in h.regimes.items()}, "regime_spread": {}})
        for h in study.held_out
    ]
    view = views.over_load(study.model_copy(update={"held_out": held}), "mean_latency_s")
    assert view.load is None
    assert list(view.regimes) == list(renamed.values())


def test_the_gain_over_load_is_against_the_paper_default_of_the_same_regime(study):
    view = views.over_load(study, "mean_latency_s")
    tuned, default = view.lines[0], view.lines[1]
    assert (tuned.role, default.role) == ("tuned", PAPER_DEFAULT)
    assert tuned.gain_pct == pytest.approx([8.0] * 6)
    assert default.gain_pct == pytest.approx([0.0] * 6)


def test_more_goodput_is_a_gain(study):
    assert views.gain_over("goodput_per_s", 1.25, 1.0) == pytest.approx(20.0)
    assert views.gain_over("mean_latency_s", 1.25, 1.0) == pytest.approx(-25.0)


def test_requests_are_paired_by_their_place_and_undefined_ones_left_out(study):
    view = pairs.paired(study, PAPER_DEFAULT, "tpot_s")
    ours, theirs = study.held_out[0].requests, study.held_out[1].requests
    defined = [i for i, v in enumerate(ours.tpot_s) if v is not None and theirs.tpot_s[i] is not None]
    assert view.num_undefined == len(ours.tpot_s) - len(defined) > 0
    assert [p.candidate_s for p in view.sample] == [ours.tpot_s[i] for i in defined]
    assert [p.reference_s for p in view.sample] == [theirs.tpot_s[i] for i in defined]


def test_the_distribution_of_differences_rises_from_the_least_to_the_greatest(study):
    view = pairs.paired(study, BEST_STATIC, "latency_s")
    exact = sorted(
        a - b for a, b in zip(study.held_out[0].requests.latency_s, study.held_out[2].requests.latency_s, strict=True)
    )
    assert (view.difference_s[0], view.difference_s[-1]) == (exact[0], exact[-1])
    assert list(view.share) == sorted(view.share)
    assert view.share[-1] == 1.0
    assert view.share_faster == sum(d < -view.tie_s for d in exact) / len(exact)


def test_a_long_replay_is_thinned_for_the_scatter_and_counted_in_full(study):
    long = sample_study.build(num_search=2, num_random=0, requests=400)
    view = pairs.paired(long, PAPER_DEFAULT, "latency_s")
    assert view.num_pairs == len(long.held_out[0].requests.regime) > 3000
    assert len(view.sample) == pairs.MAX_SCATTER_POINTS
    assert {p.regime for p in view.sample} == set(view.regimes)
    assert len(view.difference_s) == pairs.MAX_ECDF_POINTS


def test_settings_replayed_on_different_requests_are_not_paired(study):
    short = study.held_out[1].requests.model_copy(update={"latency_s": [1.0]})
    held = [study.held_out[0], study.held_out[1].model_copy(update={"requests": short})]
    assert isinstance(pairs.paired(study.model_copy(update={"held_out": held}), PAPER_DEFAULT, "latency_s"), Missing)


def test_effects_begin_with_all_regimes_and_go_on_by_load(study):
    view = views.effects(study.comparisons[0], "mean_latency_s")
    assert [r.label for r in view.rows] == ["All regimes", *(f"λ={load:g}" for load in sample_study.LOADS)]
    assert view.rows[0].value_pct == pytest.approx(7.9)


def test_an_effect_without_a_finite_interval_shrinks_to_its_value(study):
    effect = Effect(improvement_pct=3.0, low_pct=math.nan, high_pct=math.inf)
    comparison = study.comparisons[0].model_copy(update={"overall": {"mean_latency_s": effect}, "regimes": {}})
    row = views.effects(comparison, "mean_latency_s").rows[0]
    assert (row.low_pct, row.value_pct, row.high_pct) == (3.0, 3.0, 3.0)


def test_the_best_so_far_never_gets_worse_and_failures_keep_it(study):
    view = views.best_so_far(study, "mean_latency_s")
    for arm, course in view.arms.items():
        known = [v for v in course if v is not None]
        assert known == sorted(known)
        assert len(course) == sum(t.arm == arm for t in study.trials)
    assert set(view.levels) == {PAPER_DEFAULT, BEST_STATIC}


def test_what_the_simulator_proposed_has_a_course_of_its_own_beside_the_search(study):
    proposed = [t.number for t in study.trials if t.arm == "search" and t.state == "ok"][:3]
    trials = [t.model_copy(update={"arm": "predicted"}) if t.number in proposed else t for t in study.trials]
    view = views.best_so_far(study.model_copy(update={"trials": trials}), "mean_latency_s")
    assert tuple(view.arms) == ("predicted", "search", "random")
    assert view.arms["predicted"][-1] == max(views.gains(study.trials[n])["mean_latency_s"] for n in proposed)


def test_knobs_with_one_value_are_no_slice(study):
    assert {t.setting.params["max_num_seqs"] for t in study.trials} == {256}
    assert views.knobs_tried(study) == ["b_max", "b_cap", "n_th", "t_large"]


def test_trials_with_the_knob_switched_off_stand_apart_in_its_slice(study):
    view = views.slice_of(study, "t_large", "mean_latency_s")
    assert view.off
    assert all(p.trial.setting.params["t_large"] is None for p in view.off)
    assert all(p.trial.setting.params["t_large"] == p.x for p in view.points)


def test_the_landscape_turns_ratios_into_gains_and_keeps_the_holes(study):
    view = plane.landscape(study)
    for row, ratios in zip(view.gain_pct, study.landscape.ratio, strict=True):
        assert [g is None for g in row] == [r is None for r in ratios]
    assert {m.name for m in view.marks} == {"tuned", PAPER_DEFAULT, BEST_STATIC}
    default = next(m for m in view.marks if m.name == PAPER_DEFAULT)
    assert (view.x[round(default.column)], view.y[round(default.row)]) == (16384, 2048)


def test_a_static_budget_has_no_branches_worth_showing(study):
    assert roles.is_static(study.held_out[2].setting)
    assert [role for role, _ in views.branches(study).settings] == ["tuned", PAPER_DEFAULT]


def test_a_study_with_a_reference_of_its_own_is_measured_against_that(study):
    held = [h.model_copy(update={"role": "reference"}) if h.role == PAPER_DEFAULT else h for h in study.held_out]
    comparisons = [study.comparisons[0].model_copy(update={"reference": "reference"}), study.comparisons[1]]
    changed = study.model_copy(update={"held_out": held, "comparisons": comparisons})
    assert roles.reference_role(changed) == "reference"
    assert roles.compared(changed, "reference") is comparisons[0]
    assert views.over_load(changed, "mean_latency_s").lines[0].gain_pct == pytest.approx([8.0] * 6)
    assert not isinstance(pairs.paired(changed, "reference", "latency_s"), Missing)


def test_a_comparison_of_two_references_is_not_taken_for_one_of_the_tuned_setting(study):
    other = study.comparisons[1].model_copy(update={"candidate": PAPER_DEFAULT})
    changed = study.model_copy(update={"comparisons": [other, *study.comparisons]})
    assert roles.compared(changed, BEST_STATIC) is study.comparisons[1]


def test_shares_of_branches_add_up_to_one_for_each_setting(study):
    view = views.branches(study)
    for i in range(len(view.settings)):
        assert sum(view.share[b][i] for b in view.branches) == pytest.approx(1.0)


def test_bars_stand_for_the_noise_that_is_known_in_one_objective_alone_and_nothing_is_said_of_none(study):
    pick = study.trials[study.pick_trial]
    odds = Odds("noise", gain_pct={pick.number: {"mean_latency_s": (3.0, 9.0)}})
    front = panels.all_panels(study, odds)["front"]
    bar = next(t for t in front.variants["0-0"].data if t.name == "Pick, 95% interval")
    assert tuple(bar.x) == (3.0, 9.0)
    assert bar.y[0] == bar.y[1]
    assert "Bars show how far noise moves a gain" in front.caption
    assert "in mean latency alone, that of P95 latency was not measured" in front.caption
    bare = panels.all_panels(study, Odds())["front"]
    assert not any("95%" in trace.name for trace in bare.variants["0-0"].data)
    assert not re.search("Ellipses|Bars", bare.caption)


def test_objectives_for_which_the_knobs_have_the_same_shares_are_said_to_rest_on_the_same_trials(study):
    def caption(**importance: dict[str, float]) -> str:
        return panels.all_panels(study.model_copy(update={"importance": importance}), Odds())["importance"].caption

    one, other = {"b_cap": 0.98429, "n_th": 0.01571}, {"b_cap": 0.98433, "n_th": 0.01567}
    said = "The shares for mean latency and P95 latency are the same, as the same trials are the better ones in each."
    assert said in caption(mean_latency_s=one, p95_latency_s=other)
    assert "are the same" not in caption(mean_latency_s=one, p95_latency_s={"b_cap": 0.982, "n_th": 0.018})
    assert "are the same" not in caption(mean_latency_s={"b_cap": 1.0}, p95_latency_s={"b_cap": 1.0})


@pytest.mark.parametrize(
    ("limits", "head"),
    [
        ({"latency_s": None, "ttft_s": None, "tpot_s": None}, "Goodput (throughput: no limits set)"),
        ({"latency_s": None, "ttft_s": 2.0, "tpot_s": None}, "Goodput"),
        ("not recorded", "Goodput"),
    ],
)
def test_goodput_without_limits_is_named_as_the_throughput_that_it_is(study, limits, head):
    known = study.model_copy(update={"provenance": {"study": {"limits": limits}}})
    assert [name for name in tables.regimes_table(known).columns if name.startswith("Goodput")] == [head]


def test_a_reason_that_says_that_the_trial_was_stopped_is_not_headed_by_the_same_word(study):
    reason = "stopped after 3 of 8 traces: certainly behind the best setting"
    first = next(trial for trial in study.trials if trial.state == "ok" and trial.arm == "search")

    def shown(said: str) -> str:
        stopped = first.model_copy(update={"state": "stopped", "reason": said})
        trials = [stopped if trial is first else trial for trial in study.trials]
        rows = tables.trials_table(study.model_copy(update={"trials": trials}), Odds()).rows
        return next(row for row in rows if row[0].text == str(first.number))[3].note

    assert shown(reason) == reason
    assert shown("behind by 9 %") == "stopped: behind by 9 %"
