"""The report's figures one by one, as a notebook shows them."""

import plotly.graph_objects as go
import pytest
import sample_study
from odd_studies import HOSTILE, hostile, live

from autotune.results import StudyResults
from ppas_core.errors import InvalidInput
from reports.notebook import choices, every_variant, figure, names
from reports.panels import Panel, all_panels


@pytest.fixture(scope="module")
def results() -> StudyResults:
    return sample_study.build()


def test_there_is_a_figure_for_every_panel_of_the_report(results: StudyResults) -> None:
    assert names(results) == tuple(all_panels(results))
    assert {"front", "load", "effects", "landscape"} <= set(names(results))
    assert "drift" in names(live())


def variant_of(panel: Panel, choice: dict[str, str]) -> str:
    options = zip(panel.controls, choice.values(), strict=True)
    return "-".join(str(control.options.index(value)) for control, value in options)


def test_every_figure_draws_with_every_choice_or_says_why_not(results: StudyResults) -> None:
    drawn, panels = 0, all_panels(results)
    for name, choice in every_variant(results):
        if not isinstance(panels[name].variants.get(variant_of(panels[name], choice)), go.Figure):
            with pytest.raises(InvalidInput, match=f"figure '{name}': "):
                figure(results, name, **choice)
            continue
        found = figure(results, name, **choice)
        assert isinstance(found, go.Figure)
        assert found.data
        drawn += 1
    assert drawn > 20


def test_a_figure_says_what_it_shows_and_that_it_is_simulated(results: StudyResults) -> None:
    found = figure(results, "front")
    assert found.layout.title.text
    assert "Simulated, not measured on a server" in found.layout.title.subtitle.text
    assert found.layout.paper_bgcolor == "#ffffff", "it can be read on a dark notebook as well"
    assert "Measured on a live server" in figure(live(), "front").layout.title.subtitle.text


def test_a_figure_is_the_callers_own(results: StudyResults) -> None:
    figure(results, "front").update_layout(title="mine").data = []
    assert figure(results, "front").data


def test_the_choices_are_keywords_and_the_first_is_the_default(results: StudyResults) -> None:
    offered = choices(results, "load")
    assert set(offered) == {"metric", "show"}
    other = figure(results, "load", metric=offered["metric"][1], show=offered["show"][-1])
    default = figure(results, "load")
    assert default == figure(results, "load", metric=offered["metric"][0], show=offered["show"][0])
    assert default != other


@pytest.mark.parametrize(
    ("name", "choice", "words"),
    [
        ("frontt", {}, "no figure 'frontt'; did you mean 'front'"),
        ("load", {"metrik": "x"}, "no choice 'metrik'; did you mean 'metric'"),
        ("load", {"metric": "Mean lateness"}, "metric is 'Mean lateness'"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    results: StudyResults, name: str, choice: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        figure(results, name, **choice)


def test_a_hostile_name_is_shown_as_text() -> None:
    subtitle = figure(hostile(), "front").layout.title.subtitle.text
    assert HOSTILE not in subtitle
    assert "<img" not in subtitle
    assert "&lt;img" in subtitle
