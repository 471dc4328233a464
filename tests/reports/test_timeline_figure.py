"""The time line of a trace: what is drawn of the steps."""

from __future__ import annotations

import odd_studies
import pytest
import sample_study

from autotune.results import StudyResults
from reports import figures_timeline, panels, timeline
from reports.views import Missing


@pytest.fixture(scope="module")
def study() -> StudyResults:
    return sample_study.build(num_search=12, num_random=8, loads=(0.4, 1.2), requests=6)


def area(figure, name: str, y: str) -> float:
    """Token-seconds under the filled bars of a series."""
    trace = next(t for t in figure.data if t.name == name and (t.yaxis or "y") == y and t.line.width != 0.6)
    total = 0.0
    for i in range(0, len(trace.x), 5):
        if trace.x[i] is not None:
            total += (trace.x[i + 2] - trace.x[i + 1]) * trace.y[i + 1]
    return total


def test_the_tuned_setting_stands_above_the_one_it_is_held_against(study):
    assert timeline.others(study) == ["paper default", "best static"]
    view = timeline.timeline(study, "best static")
    assert [lane.role for lane in view.lanes] == ["tuned", "best static"]
    assert view.lanes[1].is_static
    assert view.lanes[1].capped_share == 0.0
    assert 0 < view.lanes[0].capped_share < 1


def test_a_study_without_steps_says_so(study):
    view = timeline.timeline(study.model_copy(update={"timeline": None}), None)
    assert isinstance(view, Missing)
    assert "were not recorded" in view.reason


def test_full_bars_hold_what_the_steps_scheduled_and_each_is_in_the_colour_of_its_rule(study):
    view = timeline.timeline(study, "paper default")
    figure = figures_timeline.timeline(view)
    for lane, y in zip(view.lanes, ("y3", "y5"), strict=True):
        for branch, (words, _) in figures_timeline.BRANCHES.items():
            mine = [s for s in lane.stretches if s.branch == branch]
            expected = sum((s.end_s - s.start_s) * s.tokens for s in mine)
            used = [t for t in figure.data if t.name == words and t.yaxis == y]
            if mine:
                assert area(type("F", (), {"data": used[1:]}), words, y) == pytest.approx(expected, rel=1e-3)


def test_the_queue_falls_to_nothing_while_the_engine_is_idle(study):
    view = timeline.timeline(study, "paper default")
    figure = figures_timeline.timeline(view)
    idle = [
        (a.end_s, b.start_s)
        for a, b in zip(view.lanes[0].stretches, view.lanes[0].stretches[1:], strict=False)
        if b.start_s > a.end_s + 1
    ]
    assert idle
    running = next(t for t in figure.data if t.name == "Running" and t.yaxis == "y2")
    at = [i for i, x in enumerate(running.x) if x == pytest.approx(idle[0][0], rel=1e-4)]
    assert running.y[at[-1]] == 0


def test_the_close_up_shows_every_step_of_the_window_with_most_changes(study):
    view = timeline.timeline(study, "paper default")
    low, high = view.close_up
    lane = view.lanes[0]
    changes = [b.start_s for a, b in zip(lane.stretches, lane.stretches[1:], strict=False) if a.branch != b.branch]
    width = high - low
    most = max(sum(at <= c <= at + width for c in changes) for at in changes)
    assert sum(low <= c <= high for c in changes) >= 0.8 * most
    figure = figures_timeline.timeline(view, close_up=True)
    assert list(figure.layout.xaxis.range) == [low, high]
    inside = [s for s in lane.stretches if s.end_s >= low and s.start_s <= high and s.branch == "pressure"]
    cut = [t for t in figure.data if t.name == "Budget cut: prefill pressure" and t.yaxis == "y3"][1]
    assert sum(x is None for x in cut.x) == sum(s.steps for s in inside)


def test_the_caption_says_which_trace_and_why_and_the_alternative_tells_both_settings(study):
    panel = panels.all_panels(study)["timeline"]
    assert "Of 18 held-out traces this is where the tuned setting's rules mix most" in panel.caption
    assert panel.alt.count("budget cut in") == 2
    assert "Neighbouring steps are merged" not in panel.caption
    thin = panels.all_panels(odd_studies.ODD["a lane alone, thinned"]())["timeline"]
    assert "where they differ the smallest budget is drawn" in thin.caption
    assert thin.rows == 7
