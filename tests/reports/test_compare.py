"""Several studies on one page: each under its own name, and never ranked where that would be wrong."""

from __future__ import annotations

import re

import odd_studies
import pytest
import sample_study
from test_html import Page
from typer.testing import CliRunner

from autotune.cli import app
from autotune.results import Setting, StudyResults
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from reports import compare, several
from reports.views import Missing


@pytest.fixture(scope="module")
def study() -> StudyResults:
    return sample_study.build(num_search=12, num_random=8, loads=(0.4, 1.2), requests=6)


def renamed(study: StudyResults, name: str, **update: object) -> StudyResults:
    return study.model_copy(update={"name": name, **update})


def test_two_studies_of_one_workload_rank_without_a_caution(study):
    studies = several.named([renamed(study, "A"), renamed(study, "B")])
    assert several.cautions(studies) == ()
    page = Page(compare.render([renamed(study, "A"), renamed(study, "B")]))
    assert page.open == []
    assert "do not rank" not in page.text
    assert "A better setting was found in both studies" in page.text


def test_a_simulated_and_a_measured_study_are_told_apart_and_not_ranked(study):
    live = odd_studies.live(name="server")
    page = Page(compare.render([renamed(study, "forecast"), live]))
    assert "Some studies are simulated and some are measured (forecast: simulated; server: measured)" in page.text
    assert "Simulated: forecast." in page.text
    figure = compare.all_panels(several.named([renamed(study, "forecast"), live]))["effects"].variants["0-0"]
    assert {t.name: (list(t.y), t.marker.symbol) for t in figure.data} == {
        "Measured": (["server<br><i>measured</i>"], "circle"),
        "Simulated": (["forecast<br><i>simulated</i>"], "diamond-open"),
    }
    badges = [a["class"] for t, a in page.tags if t == "span" and "badge" in (a.get("class") or "").split()]
    assert {b.split()[1] for b in badges} == {"badge-sim", "badge-live"}


def test_other_traces_another_reference_and_other_aims_are_each_named(study):
    other = study.model_copy(
        update={
            "name": "B",
            "prefer": "p95",
            "traces": [t.model_copy(update={"digest": f"other {t.digest}"}) for t in study.traces],
            "held_out": [
                h.model_copy(update={"setting": Setting.of(PolicyParams(b_max=8192, b_cap=1024))})
                if h.role == "paper default"
                else h
                for h in study.held_out
            ],
        }
    )
    found = several.cautions(several.named([renamed(study, "A"), other, renamed(study, "C")]))
    assert [c.split(" (")[0] for c in found] == [
        "The held-out traces are not the same",
        "The setting to beat is not the same",
        "The studies searched for different things",
    ]
    assert "A and C: 6 traces of λ=0.4, λ=1.2; B: 6 traces" in found[0]
    assert "B: 2/8192/1024" in found[1]


def test_studies_with_one_name_are_counted(study):
    assert [s.name for s in several.named([study, study, renamed(study, "")])] == [
        study.name,
        f"{study.name} (2)",
        "unnamed study",
    ]


def test_cards_and_table_quote_each_study_s_own_intervals(study):
    kept = odd_studies.kept()
    studies = several.named([renamed(study, "A"), renamed(kept, "B")])
    first, second = several.cards(studies)
    assert (first.lines[0].value, first.lines[0].note, first.lines[0].tone) == (
        "7.9 % lower",
        "6.0 to 9.6 % lower",
        "good",
    )
    assert second.headline.word == "No clear winner"
    assert second.lines[0].value == "no difference"
    assert first.lines[0].strip.zero == second.lines[0].strip.zero == second.lines[1].strip.zero
    rows = several.verdict_table(studies).rows
    assert [row[1].text for row in rows] == ["Better", "No clear winner"]
    assert (rows[0][2].text, rows[0][2].note) == ("+7.9 %", "+6.0 to +9.6 %")
    assert several.title(studies) == "A better setting was found in 1 of 2 studies"


def test_knobs_that_differ_between_the_exported_settings_are_marked(study):
    other = renamed(study, "B", exported=Setting.of(PolicyParams.static(4096)), exported_role="best static")
    table = several.settings_table(several.named([renamed(study, "A"), other]))
    cells = {row[0].text: (row[0].note, [c.text for c in row[1:]]) for row in table.rows}
    assert cells["b_cap"][0] == "differs"
    assert cells["n_th"][1][1] == "no effect"
    assert cells["max_num_seqs"] == (None, ["256", "256"])


def test_landscapes_of_one_metric_share_their_colours(study):
    steep = study.landscape.model_copy(
        update={"ratio": [[None if r is None else 1 - 4 * (1 - r) for r in row] for row in study.landscape.ratio]}
    )
    shown = compare.all_panels(several.named([study, renamed(study, "B", landscape=steep)]))
    limits = [shown[f"landscape-{i}"].variants[""].data[0].zmax for i in (0, 1)]
    assert limits[0] == limits[1]


def test_odd_studies_and_markup_make_a_whole_page():
    found = [make() for name, make in odd_studies.ODD.items() if name in ("no landscape", "no comparison", "no words")]
    found += [odd_studies.hostile(), odd_studies.ODD["nothing is finite"](), odd_studies.ODD["no trial"]()]
    page = Page(compare.render(found))
    assert page.open == []
    assert not any(t == "img" or "onerror" in a for t, a in page.tags)
    assert sum(t == "script" for t, _ in page.tags) == 5
    assert odd_studies.HOSTILE[:40] in page.text
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for word in ("nan", "inf", "none"):
        assert not re.search(rf"\b{word}\b %", page.text.lower()), word


def test_no_study_with_a_comparison_leaves_words_instead_of_an_empty_chart(study):
    bare = renamed(study, "A", comparisons=[])
    panel = compare.all_panels(several.named([bare, bare]))["effects"]
    assert isinstance(panel.variants[""], Missing)
    assert "None of these studies compared settings" in panel.missing


@pytest.mark.parametrize("number", [1, 13])
def test_one_study_or_too_many_are_refused(study, number):
    with pytest.raises(InvalidInput, match=f"2 to 12 studies; {number} given"):
        compare.render([study] * number)


def test_the_command_writes_one_page_from_run_folders(study, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "identity.json").write_text("{}")
        renamed(study, name).save(tmp_path / name / "results.json")
    runs = [str(tmp_path / name) for name in ("a", "b")]
    target = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["report", "--compare", *runs, "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "found in both studies" in target.read_text()
    assert not (tmp_path / "a" / "report.html").exists()
    refused = CliRunner().invoke(app, ["report", *runs])
    assert refused.exit_code == 2
