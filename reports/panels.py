"""Which figures the report has, with their words: title, caption, text alternative, and the choices of the reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune import choose
from autotune.results import StudyResults
from reports import figures, figures_held_out, pairs, panels_more, plane, quality, roles, views
from reports.numbers import (
    better_or_worse,
    capitalised,
    cleaned,
    counted,
    interval,
    metric_head,
    metric_label,
    metric_name,
    percent,
    tokens,
)
from reports.odds import DRAWS, Odds, front_odds
from reports.pairs import REQUEST_METRICS
from reports.panel import Control, Panel, drawn, origin_sentence, variants_of
from reports.roles import BEST_STATIC, TUNED
from reports.views import Missing


def all_panels(results: StudyResults, known: Odds | None = None) -> dict[str, Panel]:
    """Every panel of the report by id; some only where the study has what they show.

    known: the odds, when already computed.
    """
    odds = front_odds(results) if known is None else known
    built = [
        _front(results, odds),
        _over_load(results),
        _effects(results),
        _requests(results),
        _differences(results),
        _branches(results),
        panels_more.timeline_panel(results),
        _convergence(results),
        _importance(results),
        _slices(results, odds),
        _landscape(results),
    ]
    if quality.applies(results):
        built.append(_drift(results))
    built += panels_more.extras(results)
    return {panel.id: panel for panel in built}


def _front(results: StudyResults, odds: Odds) -> Panel:
    metrics = [o.metric for o in results.objectives]
    axes: list[tuple[str | None, str]] = [(x, y) for i, x in enumerate(metrics) for y in metrics[i + 1 :]]
    axes = axes or [(None, metrics[0])]
    built = [views.front(results, x, y) for x, y in axes]
    first = built[0]
    caption = "Each mark is one setting on all tuning traces. Up and to the right is better; "
    caption += f"0 % is the {roles.reference_role(results)}. "
    alt = "No trial finished."
    if not isinstance(first, Missing):
        if first.outside:
            caption += f"{counted(first.outside, 'trial lies', 'trials lie')} far below the close-up. "
        if first.failed:
            caption += (
                f"{counted(first.failed, 'trial has', 'trials have')} no value and no mark; see the table of trials. "
            )
        if first.stopped:
            caption += (
                f"{counted(first.stopped, 'trial was', 'trials were')} stopped before the last trace: open marks. "
            )
        caption += _odds_words(odds, first)
        pick = first.pick
        alt = f"{counted(len(first.points), 'trial')}, {len(first.front):,} on the Pareto front."
        if pick is not None:
            alt += f" The pick is {cleaned(pick.trial.setting.label)}: " + _gains_in_words(pick.gain_pct) + "."
    names = tuple(metric_head(y) if x is None else f"{metric_head(x)} and {metric_head(y)}" for x, y in axes)
    title = "The Pareto front, and every setting that was tried" if len(metrics) > 1 else "Every setting that was tried"
    scales = ("Close-up", "All trials") if any(getattr(view, "outside", 0) for view in built) else ("All trials",)

    def draw(which: int, scale: int) -> Any:
        return drawn(built[which], lambda view: figures.front(view, odds, close_up=scales[scale] == "Close-up"))

    controls = (Control("Objectives", names), Control("View", scales))
    variants = variants_of(draw, len(axes), len(scales))
    return Panel("front", title, caption + origin_sentence(results), alt, controls, variants)


def _odds_words(odds: Odds, view: views.FrontView) -> str:
    """What is drawn about the marks; nothing where nothing is."""
    axes = [m for m in (view.x_metric, view.y_metric) if m is not None]
    known = [m for m in axes if any(odds.interval(point.trial, m) for point in view.points)]
    if not known:
        return ""
    if odds.source == "traces":
        return (
            f"Ellipses are as wide and as high as the 95% intervals, from the {odds.num_traces:,} tuning traces drawn "
            f"again {DRAWS} times; the more often a trial of the search is on the front in these draws, the more solid "
            "its mark. "
        )
    marks = "Ellipses" if len(known) == 2 else "Bars"
    words = f"{marks} show how far noise moves a gain, 95%, from the reference measured against itself"
    if len(known) < len(axes):
        missing = next(m for m in axes if m not in known)
        words += f": in {metric_name(known[0])} alone, that of {metric_name(missing)} was not measured"
    return words + ". "


def _over_load(results: StudyResults) -> Panel:
    metrics = _main_metrics(views.metrics_over_load(results))
    built = [views.over_load(results, metric) for metric in metrics]
    relative = any(not isinstance(v, Missing) and v.has_reference for v in built)
    options = ("Absolute", f"Gain over {roles.reference_role(results)}") if relative else ("Absolute",)
    first = built[0] if built else Missing("No setting was replayed on the held-out traces.")
    alt = "Nothing was replayed on held-out traces."
    caption = "Mean over the held-out traces of each load regime. "
    if not isinstance(first, Missing):
        caption += "Hover for the spread over the traces. The intervals of the gain stand in “How sure is the gain”. "
        tuned = next((line for line in first.lines if line.role == TUNED), None)
        label = capitalised(metric_label(first.metric))
        alt = f"{label} of {counted(len(first.lines), 'setting')} over {counted(len(first.regimes), 'regime')}."
        if tuned is not None and first.has_reference:
            gains = ", ".join(f"{r} {percent(g)}" for r, g in zip(first.regimes, tuned.gain_pct, strict=True))
            alt += f" Gain of the tuned setting over the {first.reference}: {gains}."

    def draw(metric: int, scale: int) -> Any:
        return drawn(built[metric], lambda v: figures_held_out.over_load(v, relative=scale == 1))

    controls = (Control("Metric", tuple(metric_head(m) for m in metrics)), Control("Show", options))
    variants = variants_of(draw, len(metrics), len(options)) if metrics else {"0-0": first}
    return Panel("load", "Latency over load", caption + origin_sentence(results), alt, controls, variants)


def _effects(results: StudyResults) -> Panel:
    made = [c for c in results.comparisons if c.overall]
    if not made:
        reason = Missing("The study compared no settings on held-out traces.")
        return Panel("effects", "How sure is the gain", "", reason.reason, (), {"": reason})
    metrics = _main_metrics(
        list(dict.fromkeys([made[0].preferred_metric, *(m for c in made for m in c.overall)])), first=1
    )
    comparison = made[0]
    overall = comparison.overall.get(comparison.preferred_metric)
    alt = f"{cleaned(comparison.candidate)} against {cleaned(comparison.reference)}"
    if overall is not None:
        alt += (
            f": {percent(overall.improvement_pct)} in {metric_label(comparison.preferred_metric)}, "
            f"{comparison.confidence:.0%} interval {interval(overall.low_pct, overall.high_pct)}."
            if overall.is_measurable
            else f": {metric_label(comparison.preferred_metric)} is {choose.NOT_MEASURABLE}."
        )
    built = {(a, m): views.effects(c, metric) for a, c in enumerate(made) for m, metric in enumerate(metrics)}
    rows = [len(v.rows) for v in built.values() if not isinstance(v, Missing)]
    against = tuple(f"{capitalised(cleaned(c.candidate, 40))} vs {cleaned(c.reference, 40)}" for c in made)
    caption = (
        f"Improvement with its {comparison.confidence:.0%} bootstrap interval on held-out traces, paired per request. "
        "Right of 0 % is better; an interval that crosses 0 % shows no sure difference. "
    )
    return Panel(
        "effects",
        "How sure is the gain",
        caption + origin_sentence(results),
        alt,
        (Control("Reference", against), Control("Metric", tuple(metric_head(m) for m in metrics))),
        variants_of(lambda a, m: drawn(built[a, m], figures_held_out.effects), len(made), len(metrics)),
        max(rows, default=1),
    )


def _paired(
    results: StudyResults, panel_id: str, title: str, caption: str, draw: Callable[[pairs.PairedView], Any]
) -> Panel:
    reference = roles.reference_role(results)
    references = [r for r in (reference, BEST_STATIC) if roles.role(results, r) is not None] or [reference]
    columns = list(REQUEST_METRICS)
    built = {
        (r, c): pairs.paired(results, role, col) for r, role in enumerate(references) for c, col in enumerate(columns)
    }
    first = built[0, 0]
    alt = (
        first.reason
        if isinstance(first, Missing)
        else (
            f"End-to-end latency of {counted(first.num_pairs, 'held-out request')}: {first.share_faster:.1%} faster "
            f"and {first.share_slower:.1%} slower with the tuned setting than with {cleaned(first.reference)}."
        )
    )
    if not isinstance(first, Missing):
        if panel_id == "requests" and len(first.sample) < first.num_pairs:
            caption += f"An even sample of {len(first.sample):,} of the {first.num_pairs:,} requests. "
        elif panel_id == "requests":
            caption += f"{counted(first.num_pairs, 'request')}, none left out. "
        if first.tie_s > 0 and panel_id == "differences":
            caption += f"Differences within {first.tie_s * 1000:.3g} ms count as ties. "
    controls = (
        Control("Reference", tuple(f"vs {r}" for r in references)),
        Control("Metric", tuple(REQUEST_METRICS.values())),
    )
    return Panel(
        panel_id,
        title,
        caption + origin_sentence(results),
        alt,
        controls,
        variants_of(lambda r, c: drawn(built[r, c], draw), len(references), len(columns)),
    )


def _requests(results: StudyResults) -> Panel:
    caption = (
        "Each dot is one held-out request under both settings; below the dotted line the tuned setting is faster. "
    )
    return _paired(results, "requests", "The same request under both settings", caption, figures_held_out.pairs)


def _differences(results: StudyResults) -> Panel:
    caption = "How the requests' differences are distributed: left of 0 the tuned setting is faster. "
    return _paired(results, "differences", "Who gains, who loses, by how much", caption, figures_held_out.differences)


def _branches(results: StudyResults) -> Panel:
    view = views.branches(results)
    alt = (
        view.reason
        if isinstance(view, Missing)
        else "; ".join(
            f"{cleaned(role)} {cleaned(label)}: "
            + ", ".join(f"{cleaned(b)} {view.share[b][i]:.1%}" for b in view.branches)
            for i, (role, label) in enumerate(view.settings)
        )
    )
    caption = "Which condition set the token budget of each scheduler step, on the held-out traces. "
    return Panel(
        "branches",
        "How often the policy stepped in",
        caption + origin_sentence(results),
        alt,
        (),
        {"": drawn(view, figures_held_out.branches)},
        1 if isinstance(view, Missing) else len(view.settings) + 1,
    )


def _convergence(results: StudyResults) -> Panel:
    metrics = [o.metric for o in results.objectives]
    built: list[Any] = [views.best_so_far(results, m) for m in metrics] + [views.hypervolume(results)]
    names = [*(metric_head(m) for m in metrics), "Hypervolume"]
    caption = "The best that each kind of trial had found after so many of its own, on the tuning traces. "
    if any(trial.arm == "predicted" for trial in results.trials):
        caption += "The hypervolume of the search begins with what the simulator had proposed. "
    first = built[0]
    if isinstance(first, Missing):
        alt = first.reason
    else:
        alt = " ".join(
            f"{figures.ARMS.get(arm, (arm,))[0]}: best gain {percent(course[-1])} after {counted(len(course), 'trial')}."
            for arm, course in first.arms.items()
        )
        if "random" not in first.arms:
            caption += "No random arm was run in this study, which would show what chance finds. "
    return Panel(
        "convergence",
        "Did the search pay",
        caption + origin_sentence(results),
        alt,
        (Control("Show", tuple(names)),),
        variants_of(lambda i: drawn(built[i], figures.convergence), len(built)),
    )


def _importance(results: StudyResults) -> Panel:
    view = views.importance(results)
    missing = isinstance(view, Missing)
    alt = (
        view.reason
        if isinstance(view, Missing)
        else "; ".join(
            f"{metric_label(m)}: " + ", ".join(f"{cleaned(k)} {s:.0%}" for k, s in zip(view.knobs, shares, strict=True))
            for m, shares in view.shares.items()
        )
    )
    caption = ""
    if not isinstance(view, Missing):
        caption = f"Share of each knob in the variation, by {cleaned(view.method)}. {_same_shares(view)}"
    return Panel(
        "importance",
        "Which knob matters",
        caption + origin_sentence(results),
        alt,
        (),
        {"": drawn(view, figures.importance)},
        1 if missing else max(3, round(1.3 * len(view.knobs) + 0.5)),  # type: ignore[union-attr]
    )


def _same_shares(view: views.ImportanceView) -> str:
    """That objectives have the same shares, digit by digit, and why; nothing where none do."""
    by_shares: dict[tuple[float, ...], list[str]] = {}
    for metric, shares in view.shares.items():
        by_shares.setdefault(tuple(round(100 * share, 1) for share in shares), []).append(metric_name(metric))
    alike = next((names for names in by_shares.values() if len(names) > 1), None)
    if alike is None or len(view.knobs) < 2:
        return ""
    return f"The shares for {' and '.join(map(cleaned, alike))} are the same, as the same trials are the better ones in each. "


def _slices(results: StudyResults, odds: Odds) -> Panel:
    knobs, metrics = views.knobs_tried(results), [o.metric for o in results.objectives]
    if not knobs:
        reason = Missing("All finished trials share the same values, so there is no knob to slice along.")
        return Panel("slices", "Along one knob", "", reason.reason, (), {"": reason})
    built = {
        (k, m): views.slice_of(results, knob, metric)
        for k, knob in enumerate(knobs)
        for m, metric in enumerate(metrics)
    }
    caption = "Every finished trial over one knob; all other knobs vary freely. "
    if any(roles.is_static(trial.setting) for trial in results.trials) and any(
        k in views.ADAPTIVE_KNOBS for k in knobs
    ):
        caption += "Static budgets are left out where the knob does nothing in them. "
    controls = (
        Control("Knob", tuple(map(cleaned, knobs))),
        Control("Objective", tuple(metric_head(m) for m in metrics)),
    )
    return Panel(
        "slices",
        "Along one knob",
        caption + origin_sentence(results),
        f"Slices along {', '.join(map(cleaned, knobs))}.",
        controls,
        variants_of(
            lambda k, m: drawn(built[k, m], lambda view: figures.slice_of(view, odds)), len(knobs), len(metrics)
        ),
    )


def _landscape(results: StudyResults) -> Panel:
    view = plane.landscape(results)
    caption, alt = "", "No plane of the space was evaluated."
    if not isinstance(view, Missing):
        fixed = ", ".join(f"{cleaned(k)} {tokens(v)}" for k, v in view.fixed.items())
        caption = f"Gain over the {roles.reference_role(results)} in {metric_label(view.metric)}; "
        caption += "blank where the space allows no setting. "
        caption += f"Held fixed: {cleaned(fixed, 300)}. " if fixed else ""
        known = [g for row in view.gain_pct for g in row if g is not None]
        alt = f"Gains from {percent(min(known))} to {percent(max(known))} over {view.x_name} and {view.y_name}."
    return Panel(
        "landscape",
        "The landscape around the pick",
        caption + origin_sentence(results),
        alt,
        (),
        {"": drawn(view, figures.landscape)},
    )


def _drift(results: StudyResults) -> Panel:
    view = quality.drift(results)
    label = " and ".join(map(metric_label, choose.preferred_of(results))) or "the preferred objective"
    caption = ""
    if isinstance(view, Missing):
        alt = view.reason
    else:
        count, first = len(view.change_pct), results.reference_measurements
        before = "its first measurement" if first == 1 else f"the mean of its {first} measurements before the search"
        caption = (
            f"The reference was measured again {'once' if count == 1 else f'{count:,} times'} during the search, in {label}; "
            f"0 % is {before}, above it is worse. The last one was {better_or_worse(-view.change_pct[-1])}. "
        )
        times = counted(len(view.change_pct), "further measurement")
        alt = f"{times} of the reference: at most {percent(view.largest_pct, signed=False)} from {before}."
        if view.band_pct:
            within = sum(abs(change) <= view.band_pct for change in view.change_pct)
            reach = f"{percent(view.band_pct, signed=False)} either way"
            if all(noise.alike_pct is not None for noise in results.noise):
                caption += f"The band is what noise alone explains, {reach}. "
                alt += f" {within} within what noise explains."
            else:  # results of an earlier version
                caption += f"The band is the least change that is found, {reach}; noise alone explains less. "
                alt += f" {within} too small to be found."
        if view.failed:
            after, reason = view.failed[0]
            caption += f"{counted(len(view.failed), 'measurement')} failed; the first, after {after} trials: {reason}. "
    return Panel(
        "drift",
        "Did the machine drift",
        caption + origin_sentence(results),
        alt,
        (),
        {"": drawn(view, figures.drift)},
    )


def _main_metrics(names: Sequence[str], *, first: int = 2) -> list[str]:
    """The metrics worth a choice of their own: the first few (the objectives), then the usual ones."""
    usual = ("mean_latency_s", "p95_latency_s", "mean_ttft_s", "mean_tpot_s", "makespan_s", "goodput_per_s")
    return list(dict.fromkeys([*names[:first], *(n for n in usual if n in names)]))


def _gains_in_words(gain_pct: Mapping[str, float]) -> str:
    return ", ".join(f"{metric_label(m)} {percent(g)}" for m, g in gain_pct.items())
