"""What the report says first: the verdict, what it costs, and static budgets across load, in words."""

from __future__ import annotations

import json
import math

import odd_studies
import pytest
import sample_study
import yaml

from autotune.export import environment, server_flags
from autotune.results import ColdCheck, DriftPoint, Effect, Setting, StudyResults
from autotune.settings import parse_setting
from ppas_core.policy import PolicyParams
from reports import legend, panels, quality, roles, statics, summary, tables, verdict, views
from reports.html import render
from reports.odds import Odds

MEAN, TPOT = "mean_latency_s", "mean_tpot_s"


@pytest.fixture(scope="module")
def study() -> StudyResults:
    return sample_study.build(num_search=12, num_random=8, requests=6)


def effect(value: float, low: float, high: float) -> Effect:
    return Effect(improvement_pct=value, low_pct=low, high_pct=high)


def with_effects(study: StudyResults, number: int, overall: dict, regimes: dict | None = None) -> StudyResults:
    """The study with these effects in its comparison of that number (0: paper default, 1: best static)."""
    made = list(study.comparisons)
    made[number] = made[number].model_copy(update={"overall": overall, "regimes": regimes or {}})
    return study.model_copy(update={"comparisons": made})


def gain(number: float) -> dict[str, Effect]:
    return {MEAN: effect(number, number - 1, number + 1)}


def test_the_headline_of_an_exported_tuned_setting_is_its_verdict(study):
    head = verdict.headline(study)
    assert (head.word, head.tone) == ("Better", "good")
    assert head.title == "The tuned setting is better than the paper default in mean latency"
    assert head.exported_role == "tuned"


def test_settings_that_did_the_same_cost_each_other_nothing(study):
    slower = with_effects(study, 0, gain(5.0) | {TPOT: effect(-20.0, -25.0, -15.0)})
    assert any("paper default" in line for line in verdict.costs(slower))
    alike = [slower.comparisons[0].model_copy(update={"did_the_same": True}), *slower.comparisons[1:]]
    assert not any("paper default" in line for line in verdict.costs(slower.model_copy(update={"comparisons": alike})))


def test_where_a_static_budget_is_exported_the_headline_says_that_p_pas_is_not_needed():
    head = verdict.headline(odd_studies.static_exported())
    assert (head.word, head.tone) == ("Better without P-PAS", "good")
    assert head.title == "A static budget is better: 4,096 tokens a step; P-PAS is not needed here"
    assert (head.exported, head.exported_role) == ("static budget 4,096 (P-PAS off)", "best static")
    # The comparison was made the other way round: 25 % worse of a ratio of 1.25 is 1 - 1/1.25 = 20 % better.
    assert (
        "against the paper default: mean end-to-end latency is 20.0 % lower (95% interval 16.7 to 23.1 %" in head.detail
    )
    assert "The best static budget against the tuned setting: mean end-to-end latency is 0.8 % lower" in head.detail


def test_each_form_of_the_exported_setting_is_that_setting(study):
    params = study.exported.to_params()
    forms = {form.name: form.text for form in summary.snippets(study)}
    config = yaml.safe_load(forms["vllm.yaml"])
    assert PolicyParams.from_dict(config["additional-config"]["ppas"]) == params
    *exports, command = forms["Environment"].splitlines()
    assert dict(line.removeprefix("export ").split("=") for line in exports) == environment(params)
    assert command == f"vllm serve MODEL {' '.join(server_flags(params))}"
    assert parse_setting(forms["Name"]) == PolicyParams.from_dict(json.loads(forms["JSON"])) == params


def test_the_config_to_copy_from_a_live_report_has_the_flags_of_the_measured_server_but_no_secret(study):
    server = {"model": "m/m", "flags": ["--dtype", "float32", "--api-key", "s3cret", "-O3"]}
    live = study.model_copy(update={"provenance": {"study": {"server": server}}})
    form, by_environment, *_ = summary.snippets(live)
    assert by_environment.text.endswith(" --dtype float32 -O3\n")
    assert yaml.safe_load(form.text)["dtype"] == "float32"
    assert "vllm serve MODEL --config vllm.yaml -O3." in form.use
    assert "s3cret" not in form.text + form.use + by_environment.text


def test_an_exported_setting_that_no_scheduler_takes_is_still_shown_as_json():
    hostile = odd_studies.hostile()
    assert [form.name for form in summary.snippets(hostile)] == ["JSON"]


def test_the_exported_setting_stands_first_and_once_in_the_table_of_settings(study):
    assert tables.settings_table(study).columns == ("Knob", "Tuned, exported", "Paper default", "Best static")
    assert tables.settings_table(odd_studies.kept()).columns[1] == "Paper default, exported"


def test_a_pick_that_is_a_static_budget_is_named_as_one_and_its_idle_knobs_are_not_shown():
    study = odd_studies.static_pick()
    head = verdict.headline(study)
    assert head.title == "A static budget is better: 4,096 tokens a step; P-PAS is not needed here"
    assert (head.exported, head.exported_role) == ("static budget 4,096 (P-PAS off)", "tuned")
    forms = {form.name: form.text for form in summary.snippets(study)}
    assert forms["Environment"] == "vllm serve MODEL --max-num-batched-tokens 4096 --max-num-seqs 256\n"
    copied = json.loads(forms["JSON"])
    assert copied == {"b_max": 4096, "b_cap": 4096, "max_num_seqs": 256}
    assert PolicyParams.from_dict(copied).is_static
    rows = {row[0].text: row[1].text for row in tables.settings_table(study).rows}
    assert (rows["b_max"], rows["n_th"], rows["t_large"], rows["b_cap"]) == ("4,096", *["no effect"] * 3)
    assert "Knobs that do nothing then are left out" in render(study)


def test_a_static_budget_has_no_place_on_a_slice_along_a_knob_that_does_nothing_in_it(study):
    static = {t.number for t in study.trials if roles.is_static(t.setting)}
    shown = {p.trial.number for p in views.slice_of(study, "n_th", MEAN).points}
    assert len(static) >= 6
    assert not shown & static
    assert static <= {p.trial.number for p in views.slice_of(study, "b_max", MEAN).points}


@pytest.mark.parametrize(
    ("found", "title"),
    [
        ("no clear winner", "No clear winner: the paper default stays"),
        ("worse", "The tuned setting is worse: the paper default stays"),
        ("inconclusive", "Inconclusive: the paper default stays"),
    ],
)
def test_where_the_reference_is_exported_the_headline_says_that_it_stays(found, title):
    study = odd_studies.kept()
    first = study.comparisons[0].model_copy(update={"verdict": found})
    study = study.model_copy(update={"comparisons": [first, study.comparisons[1]]})
    assert verdict.headline(study).title == title


def test_where_the_pick_is_the_reference_nothing_is_compared_with_itself():
    head = verdict.headline(odd_studies.unchanged())
    assert (head.word, head.title) == ("Unchanged", "Unchanged: the paper default stays")
    assert all("against the paper default" not in tile.label for tile in head.tiles)
    assert any("against the best static budget" in tile.label for tile in head.tiles)


def test_where_noise_hides_every_gain_the_reference_stays_and_the_word_is_the_comparisons_own():
    study = odd_studies.unchanged()
    first = study.comparisons[0].model_copy(update={"verdict": "inconclusive"})
    head = verdict.headline(study.model_copy(update={"comparisons": [first, *study.comparisons[1:]]}))
    assert (head.word, head.title) == ("Inconclusive", "Inconclusive: the paper default stays")


def test_what_cannot_be_measured_is_said_so_and_stands_nowhere_with_its_digits(study):
    wild = {MEAN: effect(-165.8, -7012.9, 96.4)}
    changed = with_effects(study, 0, wild, {"λ=0.4": wild, "λ=1.4": gain(8.0)})
    head = verdict.headline(changed)
    assert "mean end-to-end latency is not measurable here" in head.detail
    assert (head.tiles[0].value, head.tiles[0].word, head.tiles[0].strip) == ("Not measurable", "here", None)
    cell = tables.comparisons_table(changed).rows[0][1]
    assert (cell.text, cell.note) == ("not measurable here", None)
    rows = views.effects(changed.comparisons[0], MEAN).rows
    assert [math.isnan(row.value_pct) for row in rows] == [True, True, False]
    assert "7012.9" not in render(changed)
    assert "every interval" in views.effects(with_effects(study, 0, wild).comparisons[0], MEAN).reason


def test_a_cold_start_that_noise_does_not_explain_stands_beside_the_verdict():
    far = ColdCheck(metric=MEAN, num_traces=4, change_pct=118.8, reason="118.8 % above hot", noise_pct=74.3)
    assert "mean end-to-end latency was 118.8 % higher than here: more than noise" in detail_of(cold=far)
    near = far.model_copy(update={"change_pct": -60.0})
    assert "cold" not in detail_of(cold=near)


def detail_of(**update):
    return verdict.headline(odd_studies.live(**update)).detail


def test_a_trial_that_did_the_same_as_the_reference_is_not_called_better_or_worse():
    study = odd_studies.live()
    reference = study.trials[study.reference_trial]
    steps = {"max": 100}
    twin = Setting.of(PolicyParams.static(reference.setting.params["b_max"]))
    trials = [
        t.model_copy(update={"branch_steps": steps, **({"setting": twin} if t.number == 7 else {})})
        for t in study.trials
    ]
    rows = tables.trials_table(study.model_copy(update={"trials": trials}), Odds()).rows
    assert "did the same as the reference" in (rows[7][0].note or "")
    assert "did the same" not in (rows[study.reference_trial][0].note or "")


def test_the_picked_trial_is_shown_with_the_setting_that_was_compared(study):
    static = Setting.of(PolicyParams.static(512))
    held = [h.model_copy(update={"setting": static}) if h.role == "tuned" else h for h in study.held_out]
    row = tables.trials_table(study.model_copy(update={"held_out": held}), Odds()).rows[study.pick_trial]
    assert row[0].note == "the pick, as mbt-512"
    assert tables.trials_table(study, Odds()).rows[study.pick_trial][0].note == "pick"


def test_repeats_that_nobody_will_make_are_not_counted():
    study = odd_studies.live()
    many = study.noise[0].model_copy(update={"repeats": 82_606, "further": 3})
    changed = study.model_copy(update={"noise": [many]})
    assert tables.noise_table(changed).rows[0][-1].text == "not measurable here"
    assert tables.noise_table(study).rows[0][-1].text == "4"
    assert "3 further measurements" in quality.lead(changed)
    assert "further" not in quality.lead(study)


def test_a_difference_that_rounds_to_nothing_is_no_difference_and_one_trace_is_one_trace():
    head = verdict.headline(odd_studies.kept())
    assert "mean end-to-end latency shows no difference (95% interval less than 0.1 % either way)" in head.detail
    assert "over 1 simulated held-out trace with" in head.detail
    assert (head.tiles[0].value, head.tiles[0].word, head.tiles[0].tone) == ("No difference", "", "even")


def test_what_is_clearly_worse_is_a_cost_with_a_load_at_which_it_is_far_worse(study):
    changed = with_effects(
        study,
        0,
        {**gain(8.0), TPOT: effect(-20.2, -22.1, -18.1), "makespan_s": effect(-0.3, -0.9, 0.3)},
        {"λ=0.4": {TPOT: effect(-5.0, -6.0, -4.0)}, "λ=1.4": {TPOT: effect(-38.7, -40.0, -37.0)}},
    )
    assert verdict.costs(with_effects(changed, 1, gain(13.0))) == (
        "Against the paper default: mean TPOT 20.2 % higher (38.7 % at λ=1.4).",
    )


def test_a_load_at_which_the_setting_is_clearly_worse_is_a_cost_though_the_whole_is_better(study):
    regimes = {"λ=0.4": {MEAN: effect(-1.9, -4.0, -0.1)}, "λ=1.4": gain(9.0)}
    changed = with_effects(with_effects(study, 0, gain(8.0), regimes), 1, gain(13.0))
    assert verdict.costs(changed) == ("Against the paper default: mean latency 1.9 % higher at λ=0.4.",)


def test_a_static_budget_that_may_do_as_well_is_named_even_when_that_is_not_sure(study):
    changed = with_effects(with_effects(study, 0, gain(8.0)), 1, {MEAN: effect(-1.2, -3.0, 0.5)})
    assert verdict.costs(changed) == (
        "Against the best static budget: mean latency 1.2 % higher, which is not sure (3.0 % higher to 0.5 % lower).",
    )


def test_a_setting_that_costs_nothing_has_no_costs(study):
    changed = with_effects(with_effects(study, 0, gain(8.0)), 1, gain(13.0))
    assert verdict.costs(changed) == ()
    assert "Clearly worse" not in render(changed)
    assert "Clearly worse" in render(with_effects(changed, 0, {**gain(8.0), TPOT: effect(-20.0, -22.0, -18.0)}))


def test_many_costs_are_cut_to_the_objectives_and_the_greatest_and_the_rest_is_counted(study):
    names = ("p95_latency_s", "mean_ttft_s", "p95_ttft_s", TPOT, "makespan_s")
    worse = {metric: effect(-n, -n - 1, -n + 0.5) for n, metric in enumerate(names, start=1)}
    changed = with_effects(with_effects(study, 0, {**gain(8.0), **worse}), 1, gain(13.0))
    (line,) = verdict.costs(changed)
    assert line == (
        "Against the paper default: P95 latency 1.0 % higher, makespan 5.0 % higher, mean TPOT 4.0 % higher, "
        "and 2 smaller ones."
    )


def test_the_gain_without_saturated_regimes_stands_in_the_detail_and_says_where_it_is_not_clear(study):
    changed = with_effects(study, 0, gain(17.9))
    assert "saturated" not in verdict.headline(changed).detail

    def detail(value: float, low: float, high: float) -> str:
        update = {"steady": {MEAN: effect(value, low, high)}, "saturated": ["λ=1.4"]}
        first = changed.comparisons[0].model_copy(update=update)
        return verdict.headline(changed.model_copy(update={"comparisons": [first, *changed.comparisons[1:]]})).detail

    said = "Without the saturated λ=1.4, mean end-to-end latency is 20.1 % lower (2.5 to 33.0 % lower)."
    assert said in detail(20.1, 2.5, 33.0)
    said = "is 5.1 % lower (2.5 % higher to 13.0 % lower), which is not clearly better."
    assert said in detail(5.1, -2.5, 13.0)


def traded(study: StudyResults) -> StudyResults:
    """Better in the mean latency by cutting the time per token, at the price of the first token's; P95 is not clear."""
    found = {
        MEAN: effect(17.9, 7.3, 26.9),
        "p95_latency_s": effect(4.2, -9.2, 20.9),
        TPOT: effect(66.3, 60.1, 71.2),
        "p95_tpot_s": effect(73.7, 65.4, 78.2),
        "mean_ttft_s": effect(-48.2, -60.0, -36.6),
        "p95_ttft_s": effect(-51.1, -59.9, -36.3),
        "makespan_s": effect(-10.4, -15.1, -5.8),
    }
    there = {"λ=0.4": {"mean_ttft_s": effect(-47.5, -68.0, -26.4), "makespan_s": effect(-3.0, -17.2, 9.5)}}
    there["λ=1.4"] = {"mean_ttft_s": effect(-48.8, -61.3, -40.0), "makespan_s": effect(-18.2, -19.6, -16.8)}
    return with_effects(with_effects(study, 0, found, there), 1, gain(13.0))


def test_the_headline_says_the_gain_the_price_and_what_is_not_clear_in_a_line_each(study):
    head = verdict.headline(traded(study))
    assert head.title == "The tuned setting is better than the paper default in mean latency, and worse in mean TTFT"
    small = with_effects(study, 0, gain(8.0) | {TPOT: effect(-2.0, -3.0, -1.0)})
    assert verdict.headline(small).title.endswith("in mean latency"), "a cost below the gain stands below the title"
    assert head.gains == (
        "Against the paper default: mean latency 17.9 % lower, P95 TPOT 73.7 % lower, mean TPOT 66.3 % lower.",
    )
    assert head.costs == (  # the regime where the makespan alone is worse is named; TTFT is worse in both alike
        "Against the paper default: P95 TTFT 51.1 % higher, mean TTFT 48.2 % higher, "
        "makespan 10.4 % higher (18.2 % at λ=1.4).",
    )
    assert head.unclear == (
        "P95 latency against the paper default: no clear difference (4.2 % lower; 95% interval 9.2 % higher to 20.9 % "
        "lower).",
    )


@pytest.mark.parametrize(
    ("doubtful", "clear", "where"),
    [
        (1, 1, " (21.7 % at λ=2; not clear at λ=1)"),
        (1, 2, " (21.7 % at λ=2, 21.7 % at λ=3; not clear at λ=1)"),
        (2, 3, " (not clear in 2 of 5 load regimes)"),
        (2, 0, " (not clear in any of 2 load regimes alone)"),
        (0, 2, ""),
    ],
)
def test_the_gain_says_under_which_loads_it_is_not_clear(study, doubtful, clear, where):
    found = [effect(11.2, -14.4, 31.5)] * doubtful + [effect(21.7, 4.8, 36.2)] * clear
    regimes = {f"λ={load}": {MEAN: gained, TPOT: gained} for load, gained in enumerate(found, start=1)}
    overall = {MEAN: effect(16.6, 5.4, 26.5), TPOT: effect(59.1, 50.0, 66.0)}
    assert verdict.gains(with_effects(study, 0, overall, regimes)) == (
        f"Against the paper default: mean latency 16.6 % lower{where}, mean TPOT 59.1 % lower.",
    )


def test_a_better_setting_with_a_price_has_tiles_for_its_greatest_further_gain_and_for_the_price(study):
    tiles = verdict.headline(traded(study)).tiles
    assert [(tile.label.split(" against")[0], tile.tone) for tile in tiles[2:5]] == [
        ("P95 end-to-end latency", "even"),
        ("Mean TPOT", "good"),
        ("Mean TTFT", "bad"),
    ]
    assert tiles[2].note.startswith("no clear difference; 95% interval: ")
    assert len(verdict.headline(with_effects(study, 0, gain(8.0))).tiles) == 3, "no price, no tile for it"


def test_what_stays_gains_nothing_over_itself():
    head = verdict.headline(odd_studies.kept())
    assert head.gains == head.unclear == ()


def test_costs_follow_what_is_exported(study):
    """The paper default is kept although the tuned setting is clearly better in one metric: that is its cost."""
    kept = with_effects(odd_studies.kept(), 0, {**gain(0.2), TPOT: effect(20.0, 18.0, 22.0)})
    line = next(line for line in verdict.costs(kept) if "against the tuned setting" in line)
    assert line.startswith("The paper default against the tuned setting: mean TPOT 25.0 % higher")


def test_what_is_said_of_a_tuned_setting_that_is_not_exported_names_it():
    head = verdict.headline(odd_studies.kept())
    assert head.detail.startswith("The tuned setting, not exported, against the paper default: mean ")
    labels = [tile.label for tile in head.tiles]
    assert labels[0] == "Mean end-to-end latency of the tuned setting against the paper default"
    assert labels[-1] == "Requests faster with the tuned setting than with the paper default"


def test_what_is_smaller_than_the_least_gain_that_counts_is_neither_a_gain_nor_a_cost(study):
    small = {
        "mean_ttft_s": effect(0.4, 0.2, 0.6),
        TPOT: effect(-0.5, -0.7, -0.3),
        "p95_latency_s": effect(0.5, 0.3, 0.7),
    }
    changed = with_effects(study, 0, gain(8.0) | small, {"λ=1": {TPOT: effect(-0.6, -0.8, -0.4)}, "λ=2": gain(8.0)})
    changed = with_effects(changed, 1, {MEAN: effect(-0.1, -0.2, -0.05), "makespan_s": effect(-0.1, -0.2, -0.05)})
    head = verdict.headline(changed)
    assert head.gains == ("Against the paper default: mean latency 8.0 % lower.",)
    assert head.costs == ()
    assert head.unclear == (
        "P95 latency against the paper default: less than the 1 % that counts (0.5 % lower; 95% interval 0.3 to 0.7 % lower).",
    )
    assert len(head.tiles) == 4, "nor is there a tile for it"
    finer = changed.model_copy(update={"provenance": {"study": {"min_gain_pct": 0.5}}})
    assert verdict.costs(finer) == ("Against the paper default: mean TPOT 0.5 % higher.",)


def test_no_sentence_of_the_headline_needs_two_signs_to_be_read(study):
    for made in (study, odd_studies.kept(), odd_studies.static_exported()):
        head = verdict.headline(made)
        for text in (head.title, head.detail, *head.costs, *(tile.note for tile in head.tiles)):
            assert "−" not in text
            assert "-0" not in text


def test_seen_from_the_other_side_a_comparison_turns_its_ratios_round(study):
    wide = {MEAN: effect(20.0, 10.0, 50.0)}
    first = study.comparisons[0].model_copy(update={"overall": wide, "steady": wide})
    turned = roles.mirrored(first)
    assert turned.steady == turned.overall
    assert (turned.candidate, turned.reference, turned.verdict) == ("paper default", "tuned", "worse")
    other = turned.overall[MEAN]
    assert (other.improvement_pct, other.low_pct, other.high_pct) == pytest.approx((-25.0, -100.0, -100 / 9))
    back = roles.mirrored(turned)
    assert back.overall[MEAN].low_pct == pytest.approx(10.0)
    assert (turned.share_faster, turned.share_slower) == (first.share_slower, first.share_faster)
    assert math.isnan(turned.share_faster_interval[0])


def held_out_means(study: StudyResults, means: dict[int, dict[str, float]]) -> StudyResults:
    """The study with only these static budgets on the held-out traces, budget to regime to mean latency."""
    static = next(h for h in study.held_out if h.role == "static")
    held = [
        static.model_copy(
            update={
                "role": f"mbt-{budget}",
                "setting": static.setting.model_copy(update={"params": {"b_max": budget, "b_cap": budget}}),
                "regimes": {regime: {MEAN: value} for regime, value in values.items()},
            }
        )
        for budget, values in means.items()
    ]
    return study.model_copy(update={"held_out": held})


@pytest.mark.parametrize(
    ("means", "sentence"),
    [
        (
            {2048: {"λ=1": 3.0, "λ=2": 4.0}, 8192: {"λ=1": 2.0, "λ=2": 5.0}},
            "No static budget here has the lowest mean end-to-end latency at every load: it is 8,192 at λ=1; "
            "2,048 at λ=2.",
        ),
        (
            {2048: {"λ=1": 2.0, "λ=2": 4.0}, 8192: {"λ=1": 2.0, "λ=2": 5.0}},
            "Of 2 static budgets here, 2,048 has the lowest mean end-to-end latency at every load, or ties.",
        ),
        ({2048: {"λ=1": 2.0, "λ=2": 4.0}}, "Each setting under each load, on the held-out traces."),
        ({2048: {"λ=1": 2.0}, 8192: {"λ=1": 3.0}}, "Each setting under each load, on the held-out traces."),
    ],
)
def test_what_is_said_of_static_budgets_across_load_comes_from_the_numbers(study, means, sentence):
    changed = held_out_means(study, means)
    assert statics.sentence(changed) == sentence


def test_the_tuned_setting_is_counted_where_it_is_ahead_of_every_static_budget(study):
    assert statics.sentence(study).endswith("The tuned setting is ahead of all of them in 6 of 6 load regimes.")


def test_a_regime_s_cell_says_better_or_worse_in_words_and_is_coloured_where_that_is_clear(study):
    there = {"λ=0.4": {MEAN: effect(7.0, 5.0, 9.0), TPOT: effect(-9.0, -20.0, 3.0)}}
    table = tables.regimes_table(with_effects(study, 0, gain(8.0), there))
    row = next(r for r in table.rows if r[1].text == "Tuned")
    cells = dict(zip(table.columns, row, strict=True))
    assert cells["Mean latency"].note.endswith(" % better")
    assert (cells["Mean latency"].note_tone, cells["Mean TPOT"].note_tone) == ("good", "even")
    units = {c.text.split()[-1] for c in (r[table.columns.index("Mean latency")] for r in table.rows)}
    assert units == {"s"}, "a column has one unit"


def test_short_names_are_explained_where_they_first_stand_and_foreign_ones_are_left_alone(study):
    params = PolicyParams(b_max=1280, b_cap=128, n_th=2, max_num_seqs=16)
    trace = study.traces[0].model_copy(update={"regime": "λ=6 p1500 o32"})
    named = study.model_copy(update={"exported": Setting.of(params), "traces": [trace]})
    setting, static, regime = legend.names(named)
    assert setting == (
        "2/1280/128 prefill s16 is n_th 2, b_max 1,280, b_cap 128, scope prefill, at most 16 sequences at once (s16)."
    )
    assert " is a static budget of " in static
    assert regime == (
        "λ=6 p1500 o32 is traffic with 6 requests per second in its bursts, each with 1,500 prompt and 32 output tokens."
    )
    foreign = [trace.model_copy(update={"regime": "λ=six"})]
    assert legend.names(odd_studies.hostile().model_copy(update={"traces": foreign})) == ()


def test_the_drift_s_caption_counts_the_measurements_and_says_which_way_the_last_one_went():
    point = DriftPoint(after_trial=8, change_pct=-8.3, reason=None)
    once = panels.all_panels(odd_studies.live(drift=[point]))["drift"].caption
    assert "measured again once during the search, in mean end-to-end latency; " in once
    assert "The last one was 8.3 % better" in once
    twice = panels.all_panels(odd_studies.live(drift=[point, point.model_copy(update={"change_pct": 3.0})]))["drift"]
    assert "measured again 2 times" in twice.caption
    assert "The band is what noise alone explains, 5.2 % either way." in twice.caption
    assert "The last one was 3.0 % worse" in twice.caption


def test_where_it_is_not_recorded_what_noise_alone_explains_the_drift_s_band_is_not_called_that():
    earlier = [odd_studies.live().noise[0].model_copy(update={"alike_pct": None})]
    panel = panels.all_panels(odd_studies.live(noise=earlier))["drift"]
    assert "The band is the least change that is found, 6.9 % either way; noise alone explains less" in panel.caption
    assert "2 further measurements of the reference" in panel.alt
    assert panel.alt.endswith("1 too small to be found.")
