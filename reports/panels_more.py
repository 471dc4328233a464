"""The figures beyond the usual ones, with their words: the time line, the forecast, maps, and other rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.records import Origin
from autotune.results import StudyResults
from reports import figures, figures_forecast, figures_timeline, forecast, plane, roles, timeline
from reports.numbers import capitalised, cleaned, counted, metric_head, metric_label, percent, tokens
from reports.panel import Control, Panel, drawn, origin_sentence, variants_of
from reports.views import Missing


def extras(results: StudyResults) -> list[Panel]:
    """The panels that only some studies have: `prediction`, `maps`, `robustness`."""
    made = [_prediction(results), _maps(results), _robustness(results)]
    return [panel for panel in made if panel is not None]


def timeline_panel(results: StudyResults) -> Panel:
    """One held-out trace step by step, under the tuned setting and another."""
    others = timeline.others(results)
    built = [timeline.timeline(results, other) for other in others] or [timeline.timeline(results, None)]
    first = built[0]
    names = tuple(f"vs {cleaned(other, 30)}" for other in others) or ("alone",)
    title = "Watch the policy act"
    if isinstance(first, Missing):
        return Panel("timeline", title, "", first.reason, (), {"": first})
    windows = (
        ("Whole trace", "Close-up") if any(getattr(view, "close_up", None) for view in built) else ("Whole trace",)
    )
    caption = (
        f"Held-out trace {cleaned(first.trace, 80)}, one clock for both settings. {cleaned(first.why, 400)} "
        "Pale is the token budget of a step, full colour what it scheduled; the close-up shows every step. "
    )
    if any(lane.thinned for lane in first.lanes):
        caption += "Neighbouring steps are merged; where they differ the smallest budget is drawn. "
    alt = " ".join(
        f"{capitalised(cleaned(lane.role))} {cleaned(lane.label)}: done after {lane.end_s:.1f} s, at most "
        f"{counted(lane.most_waiting, 'request')} waiting, budget cut in {lane.capped_share:.0%} of the steps."
        for lane in first.lanes
    )

    def draw(which: int, window: int) -> Any:
        return drawn(built[which], lambda view: figures_timeline.timeline(view, close_up=window == 1))

    return Panel(
        "timeline",
        title,
        caption + origin_sentence(results),
        alt,
        (Control("Reference", names), Control("Window", windows)),
        variants_of(draw, len(built), len(windows)),
        13 if len(first.lanes) > 1 else 7,
    )


def _prediction(results: StudyResults) -> Panel | None:
    views = [forecast.predicted(results, objective.metric) for objective in results.objectives]
    if all(isinstance(view, Missing) for view in views):
        return None
    first = next(view for view in views if not isinstance(view, Missing))
    caption = (
        "Each mark is a trial: across, what the simulator had foretold without its measurement; up, what was measured on "
        "the live server. On the dotted line the two agree."
    )
    if first.outside:
        caption += f" {counted(first.outside, 'trial lies', 'trials lie')} far below; a double click shows all."
    alt = (
        f"{capitalised(metric_label(first.metric))} of {counted(len(first.points), 'trial')}: the gain as foretold beside "
        "the gain as measured. How far the simulator is believed stands beside it."
    )
    names = tuple(metric_head(objective.metric) for objective in results.objectives)
    return Panel(
        "prediction",
        "Foretold against measured",
        caption,
        alt,
        (Control("Objective", names),),
        variants_of(lambda i: drawn(views[i], figures_forecast.predicted), len(views)),
    )


def _maps(results: StudyResults) -> Panel | None:
    views = plane.maps(results)
    if not views:
        return None
    best = max((g for view in views for row in view.gain_pct for g in row if g is not None), default=0.0)
    names = tuple(", ".join(f"{cleaned(k, 30)} {tokens(v)}" for k, v in plane.turned(view, views)) for view in views)
    caption = (
        f"Simulated gain over the {roles.reference_role(results)} in {metric_label(views[0].metric)}, one map for each "
        "value of the other knobs; all maps share their colours. Simulated, not measured on a server."
    )
    return Panel(
        "maps",
        "The whole space, as the simulator sees it",
        caption,
        f"{counted(len(views), 'simulated map')} over {views[0].x_name} and {views[0].y_name}; the best gain on them is "
        f"{percent(best)}.",
        (Control("Map", names),),
        variants_of(lambda i: figures.landscape(views[i], terse=True), len(views)),
    )


def _robustness(results: StudyResults) -> Panel | None:
    metrics: Sequence[str] = forecast.robust_metrics(results)
    if not metrics:
        return None
    views = [forecast.robustness(results, metric) for metric in metrics]
    first = views[0]
    origins = {point.origin for point in results.robustness}
    where = " and ".join(sorted("simulated" if o is Origin.SIMULATED else "measured on a live server" for o in origins))
    firm = (
        ""
        if not any(line.saturated for view in views for line in view.lines)
        else ("Open marks: the queue still grew when the trace ended, so figures there are not firm. ")
    )
    alt = f"{capitalised(metric_label(first.metric))}: " + ", ".join(
        f"{percent(gain)} at {factor:g} times the rate"
        for factor, gain in zip(first.lines[0].rate_factor, first.lines[0].gain_pct, strict=True)
    )

    def draw(i: int) -> Any:
        return figures_forecast.robustness(views[i])

    return Panel(
        "robustness",
        "When traffic changes",
        f"The pick against the reference on the held-out traces, played slower and faster; 1 is the traffic as given. "
        f"{firm}{capitalised(where)}.",
        alt + ".",
        (Control("Metric", tuple(metric_head(m) for m in metrics)),),
        variants_of(draw, len(views)),
    )
