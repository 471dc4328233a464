"""What the simulator foretold, and the pick at other rates."""

from __future__ import annotations

import odd_studies
import pytest
from test_html import Page

from autotune.records import Origin
from autotune.results import StudyResults
from reports import figures_forecast, forecast, panels, plane, quality
from reports.html import render
from reports.views import Missing

MEAN = "mean_latency_s"


@pytest.fixture(scope="module")
def study() -> StudyResults:
    return odd_studies.foretold()


def test_the_scatter_holds_each_finished_trial_as_foretold_and_as_measured(study):
    view = forecast.predicted(study, MEAN)
    ok = [t for t in study.trials if t.state == "ok"]
    assert [p.predicted_pct for p in view.points] == pytest.approx([100 * (1 - t.predicted[MEAN]) for t in ok])
    assert [p.measured_pct for p in view.points] == pytest.approx([100 * (1 - t.objectives[MEAN]) for t in ok])
    figure = figures_forecast.predicted(view)
    assert list(figure.layout.xaxis.range) == list(figure.layout.yaxis.range)
    assert "simulated" in figure.layout.xaxis.title.text


def test_a_study_without_a_simulator_has_none_of_its_figures():
    shown = panels.all_panels(odd_studies.live())
    assert not {"prediction", "maps", "robustness"} & shown.keys()
    assert isinstance(forecast.predicted(odd_studies.live(), MEAN), Missing)
    assert forecast.judged(odd_studies.live()) is None


def test_the_verdict_on_the_simulator_stands_with_its_numbers_and_its_origin(study):
    page = Page(render(study))
    assert "Trusted The simulator ranks 94 % of the pairs of trials rightly" in page.text
    assert "Mean absolute error 1.4 % Mean error +1.3 %, gains foretold too small" in page.text
    assert "Pairs ranked rightly 94 %" in page.text
    assert "Low confidence: the queue still grew when the trace ended at λ=1.2" in page.text
    badges = [(a.get("class") or "") for t, a in page.tags if t == "span" and "badge" in (a.get("class") or "").split()]
    assert sum("badge-sim" in b for b in badges) == 3  # foretold against measured, the maps, and other rates


def test_each_map_marks_only_the_settings_that_lie_in_it(study):
    tuned = next(h for h in study.held_out if h.role == "tuned")
    views = plane.maps(study)
    assert len(views) == 4
    assert len({view.limit_pct for view in views}) == 1
    for view, made in zip(views, study.maps, strict=True):
        same = all(tuned.setting.params.get(k) == v for k, v in made.fixed.items())
        assert ("tuned" in {m.name for m in view.marks}) <= same
        assert plane.turned(view, views) == [("n_th", made.fixed["n_th"]), ("t_large", made.fixed["t_large"])]
    names = panels.all_panels(study)["maps"].controls[0].options
    assert names[:2] == ("n_th 2, t_large off", "n_th 2, t_large 49,152")


def test_the_gain_over_the_rate_is_drawn_open_where_the_queue_still_grew(study):
    view = forecast.robustness(study, MEAN)
    whole = view.lines[0]
    assert (whole.rate_factor, whole.gain_pct) == ((0.7, 1.0, 1.3), (3.1, 7.9, 5.5))
    assert whole.origin is Origin.SIMULATED
    figure = figures_forecast.robustness(view)
    by_name = {t.name: t for t in figure.data}
    assert list(by_name["λ=1.2, simulated"].marker.symbol) == ["circle", "circle", "circle-open"]
    assert set(by_name["λ=0.4, simulated"].marker.symbol) == {"circle"}
    assert "Open marks: the queue still grew" in panels.all_panels(study)["robustness"].caption


def test_the_client_s_lateness_is_told_with_the_replays_made_again():
    words = quality.lag_words(odd_studies.live())
    assert words.endswith(
        "99 % of the requests were sent within 4.20 ms of their time; 1 replay was made again because it was too late."
    )
    bare = odd_studies.live(trials=[t.model_copy(update={"client": None}) for t in odd_studies.live().trials])
    assert quality.lag_words(bare) == "The trials did not record how late the client sent."


def test_a_server_that_leaked_is_told_in_the_report_with_its_pace():
    assert quality.memory_words(odd_studies.live()) == (
        "Over 140 replays: the server grew by 12 MiB a trial, 1.9 GiB left: about 160 trials. "
        "It was started anew between trials 1 time."
    )
    assert quality.memory_words(odd_studies.live(server_memory=None)) is None
