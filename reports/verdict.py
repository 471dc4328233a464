"""What a study concludes, in words: the headline, what the exported setting gains and costs, the tiles. Plain data.

It follows what is exported. Every sentence is made from the numbers, in words that say what a reader sees happen
(`1.7 % lower`), so that no sign has to be read twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune import aggregate, choose
from autotune.records import Origin
from autotune.results import Comparison, Effect, StudyResults
from autotune.spec import StudySpec
from reports import roles
from reports.numbers import (
    capitalised,
    change,
    change_between,
    cleaned,
    counted,
    finite,
    metric_label,
    metric_name,
    percent,
)
from reports.roles import BEST_STATIC, REFERENCES, TUNED, compared, role_words
from reports.views import ordered_regimes

Tone = Literal["good", "bad", "even"]
_MOST_NAMED = 3
"""Gains, and costs, named per comparison; the smaller ones are counted."""
_FAR = 1.5
"""How many times the whole effect that of one regime must be to be named beside it."""


@dataclass(frozen=True, slots=True)
class Strip:
    """An interval on a line, as places from 0 to 100; zero: where no difference lies."""

    zero: float
    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of a whole, in per cent: better, and worse; the rest is the same."""

    better: float
    worse: float


@dataclass(frozen=True, slots=True)
class Tile:
    """One number that matters, with a word for its direction, and its interval in words and as a strip."""

    label: str
    value: str
    word: str
    note: str
    tone: Tone
    strip: Strip | None = None
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict: a word, a sentence, the detail, and what is exported because of it.

    gains, costs: what the exported setting does clearly better and clearly worse; unclear: objectives in neither.
    """

    word: str
    tone: Tone
    title: str
    detail: str
    exported: str
    exported_role: str
    gains: tuple[str, ...]
    costs: tuple[str, ...]
    unclear: tuple[str, ...]
    tiles: tuple[Tile, ...]


def headline(results: StudyResults) -> Headline:
    """The verdict on what is exported, or on the tuned setting where the reference stays."""
    reference = roles.reference_role(results)
    subject = BEST_STATIC if results.exported_role == BEST_STATIC else TUNED
    main = compared(results, reference, subject) or next(iter(results.comparisons), None)
    exported, exported_role = roles.setting_words(results.exported), cleaned(results.exported_role)
    if main is None:
        return Headline(
            "Not compared",
            "even",
            "The study compared no settings on held-out traces",
            "Nothing below is a result yet: figures of the search are flattered by selection.",
            exported,
            exported_role,
            (),
            (),
            (),
            (),
        )
    others = [c for r in (BEST_STATIC, TUNED) if (c := _other(results, r, subject)) is not None and c is not main]
    same = roles.same_setting(results, subject, reference)
    word, title = _unchanged(results, main) if same else _title(results, main)
    shown = [*([] if same else [main]), *others[:1]]
    return Headline(
        word,
        "good" if main.verdict == "better" else "bad" if main.verdict == "worse" else "even",
        title,
        " ".join(
            [
                *(["The search named no other setting as better on the tuning traces."] if same else []),
                *(_sentence(results, c, names_basis=c is shown[0]) for c in shown),
                *_noise_floor(results),
                *_cold(results),
            ]
        ),
        exported,
        exported_role,
        gains(results),
        costs(results),
        unclear(results),
        tuple(_tiles(results, shown)),
    )


def gains(results: StudyResults) -> tuple[str, ...]:
    """What the exported setting does clearly better than the reference, objectives first; a line, or none.

    Clearly, here and below: the whole interval lies on that side, and the effect is no smaller than the least gain that
    counts for the study. A preferred metric has the regimes where it is not clear.
    """
    comparison = _of_export(results)
    if comparison is None:
        return ()
    least_pct = _least_pct(results)
    better = [m for m, e in comparison.overall.items() if tone_of(e) == "good" and e.improvement_pct >= least_pct]
    better.sort(key=lambda m: (_is_beside(results, m), -comparison.overall[m].improvement_pct))
    preferred = _preferred(results, comparison)
    named = [
        f"{metric_name(m)} {change(comparison.overall[m].improvement_pct, m)}"
        f"{_not_everywhere(comparison, m) if m in preferred else ''}"
        for m in better
    ]
    return _line(results, comparison, named)


def costs(results: StudyResults) -> tuple[str, ...]:
    """What the exported setting does clearly worse than the settings beside it, a line for each; the objectives first.

    A regime is named where the setting is clearly worse there alone, or far worse there. Against the best static budget a
    preferred metric is named even when it is not clearly worse, because then that budget might do as well without P-PAS.
    """
    subject = _exported(results)
    lines: list[str] = []
    for other in (roles.reference_role(results), BEST_STATIC, TUNED):
        comparison = _other(results, other, subject)
        if comparison is not None and not comparison.did_the_same:
            lines += _line(results, comparison, _cost_items(results, comparison, names_doubts=other == BEST_STATIC))
    return tuple(lines)


def unclear(results: StudyResults) -> tuple[str, ...]:
    """The objectives in which the exported setting is neither clearly better nor clearly worse than the reference."""
    comparison = _of_export(results)
    if comparison is None:
        return ()
    lines = []
    for metric in (objective.metric for objective in results.objectives):
        effect = comparison.overall.get(metric)
        tone = "even" if effect is None else tone_of(effect)
        if effect is None or (tone != "even" and abs(effect.improvement_pct) >= _least_pct(results)):
            continue
        if not effect.is_measurable:
            lines.append(
                f"{capitalised(metric_name(metric))} against {role_words(comparison.reference)}: {choose.NOT_MEASURABLE}."
            )
            continue
        found = change(effect.improvement_pct, metric)
        shown = f"{found}; " if found[0].isdigit() else ""
        said = "no clear difference" if tone == "even" else f"less than the {_least_pct(results):g} % that counts"
        lines.append(
            f"{capitalised(metric_name(metric))} against {role_words(comparison.reference)}: {said} "
            f"({shown}{comparison.confidence:.0%} interval {_within(effect, metric)})."
        )
    return tuple(lines)


def _exported(results: StudyResults) -> str:
    return results.exported_role if results.exported_role in roles.KNOWN else TUNED


def _of_export(results: StudyResults) -> Comparison | None:
    """The comparison of what is exported with the reference, where both are not the same."""
    comparison = _other(results, roles.reference_role(results), _exported(results))
    return None if comparison is None or comparison.did_the_same else comparison


def _is_beside(results: StudyResults, metric: str) -> bool:
    """Whether the metric is no objective: in a sort such ones come last."""
    return all(objective.metric != metric for objective in results.objectives)


def _line(results: StudyResults, comparison: Comparison, named: Sequence[str]) -> tuple[str, ...]:
    """What was found against a setting, the smaller things counted; of what stays by name, the rest speaks of another."""
    if not named:
        return ()
    more = len(named) - _MOST_NAMED
    text = ", ".join(named[:_MOST_NAMED]) + (f", and {counted(more, 'smaller one')}" if more > 0 else "")
    subject = f"{role_words(_exported(results))} " if results.exported_role in REFERENCES else ""
    return (capitalised(f"{subject}against {role_words(comparison.reference)}: {text}."),)


def _least_pct(results: StudyResults) -> float:
    """The least gain that counts for the study, as it recorded it."""
    study = results.provenance.get("study")
    known = study.get("min_gain_pct") if isinstance(study, Mapping) else None
    value = finite(known) if isinstance(known, int | float) else None
    return StudySpec.model_fields["min_gain_pct"].default if value is None else value


def _not_everywhere(comparison: Comparison, metric: str) -> str:
    """Where a gain is not clear: the regimes, or how many of them; nothing where it is clear, or clearly a loss, in each."""
    known = {r: effects[metric] for r, effects in comparison.regimes.items() if metric in effects}
    tones = {regime: tone_of(known[regime]) for regime in ordered_regimes(known)}
    clear, unclear = ([regime for regime, tone in tones.items() if tone == want] for want in ("good", "even"))
    if not unclear or len(known) < 2:
        return ""
    if len(unclear) == len(known):
        return f" (not clear in any of {len(known)} load regimes alone)"
    if len(known) > _MOST_NAMED:
        return f" (not clear in {len(unclear)} of {len(known)} load regimes)"
    there = [f"{percent(known[r].improvement_pct, signed=False)} at {cleaned(r, 40)}" for r in clear]
    return f" ({', '.join(there)}{'; ' if there else ''}not clear at {' and '.join(cleaned(r, 40) for r in unclear)})"


def _cost_items(results: StudyResults, comparison: Comparison, *, names_doubts: bool) -> list[str]:
    preferred, least_pct = _preferred(results, comparison), _least_pct(results)
    found: list[tuple[bool, float, str]] = []
    for metric, effect in comparison.overall.items():
        known = {r: e[metric] for r, e in comparison.regimes.items() if metric in e}
        by_regime = {r: known[r] for r in ordered_regimes(known) if _is_worse(known[r], metric, least_pct)}
        worst = min(by_regime, key=lambda regime: by_regime[regime].improvement_pct, default=None)
        there = 0.0 if worst is None or len(known) < 2 else by_regime[worst].improvement_pct
        words = f"{metric_name(metric)} {change(effect.improvement_pct, metric)}"
        size = effect.improvement_pct
        if _is_worse(effect, metric, least_pct):
            if there and (len(by_regime) < len(known) or there < _FAR * size):
                words += f" ({percent(-there, signed=False)} at {cleaned(worst, 40)})"
        elif there:
            words = f"{metric_name(metric)} {change(there, metric)} at {cleaned(worst, 40)}"
            size = there / len(known)  # in one regime only: it weighs as much as one regime does in the overall figure
        elif names_doubts and metric in preferred and _reads_as_worse(size, metric) and effect.low_pct <= -least_pct:
            words += f", which is not sure ({_within(effect, metric)})"
            if not effect.is_measurable:
                words = f"{metric_name(metric)} {choose.NOT_MEASURABLE}"
        else:
            continue
        found.append((_is_beside(results, metric), size, words))
    return [words for *_, words in sorted(found)]


def _is_worse(effect: Effect, metric: str, least_pct: float) -> bool:
    is_clear = effect.high_pct < 0 and effect.improvement_pct <= -least_pct
    return is_clear and _reads_as_worse(effect.improvement_pct, metric)


def _reads_as_worse(improvement_pct: float, metric: str) -> bool:
    return improvement_pct < 0 and finite(improvement_pct) is not None and change(improvement_pct, metric)[0].isdigit()


def _within(effect: Effect, metric: str) -> str:
    return change_between(effect.low_pct, effect.high_pct, metric)


def _other(results: StudyResults, other: str, subject: str) -> Comparison | None:
    """The comparison of `subject` with another role, unless that is the same setting."""
    if other == subject or roles.same_setting(results, subject, other):
        return None
    return compared(results, other, subject)


def _unchanged(results: StudyResults, main: Comparison) -> tuple[str, str]:
    """The chip's word and the headline where the pick is the reference itself."""
    word = "Inconclusive" if main.verdict == "inconclusive" else "Unchanged"
    return word, _kept(results, word + ": {} stays")


def _title(results: StudyResults, main: Comparison) -> tuple[str, str]:
    """The chip's word and the headline."""
    word = capitalised(main.verdict)
    if results.exported_role in REFERENCES:
        kept = {
            "worse": "The tuned setting is worse: {} stays",
            "no clear winner": "No clear winner: {} stays",
            "inconclusive": "Inconclusive: {} stays",
        }
        return word, _kept(results, kept.get(main.verdict, "{} stays"))
    if results.exported_role in (TUNED, BEST_STATIC) and roles.is_static(results.exported) and main.verdict == "better":
        budget = roles.setting_words(results.exported).removesuffix(" (P-PAS off)").removeprefix("static budget ")
        return "Better without P-PAS", f"A static budget is better: {budget} tokens a step; P-PAS is not needed here"
    candidate, reference = role_words(main.candidate), role_words(main.reference)
    if main.verdict in ("better", "worse"):
        metrics = " and ".join(metric_name(m) for m in _preferred(results, main) if m in main.overall)
        title = capitalised(f"{candidate} is {main.verdict} than {reference}") + (f" in {metrics}" if metrics else "")
        effect = main.overall.get(main.preferred_metric)
        error_pct = results.simulator_error_pct
        if effect is None or not aggregate.is_within_error(effect.improvement_pct, error_pct):
            return word, title + _price(results, main)
        return f"{word} in the simulator", f"{title}, but within the simulator's own error of {error_pct:.1f} %"
    if main.verdict == "no clear winner":
        return word, f"No clear winner between {candidate} and {reference}"
    return word, capitalised(f"{candidate} against {reference} is inconclusive")


def _price(results: StudyResults, main: Comparison) -> str:
    """In what a better setting is worse over all regimes: an objective, or by as much as it gains.

    So the headline promises no more than was found; smaller costs stand below it.
    """
    gain = main.overall[main.preferred_metric].improvement_pct if main.preferred_metric in main.overall else 0.0
    worse = [m for m, effect in main.overall.items() if _is_worse(effect, m, _least_pct(results))]
    worse = [m for m in worse if not _is_beside(results, m) or -main.overall[m].improvement_pct >= gain]
    if main.verdict != "better" or main.did_the_same or not worse:
        return ""
    worse.sort(key=lambda m: (_is_beside(results, m), not m.startswith("mean_"), main.overall[m].improvement_pct))
    return f", and worse in {metric_name(worse[0])}"


def _kept(results: StudyResults, sentence: str) -> str:
    return capitalised(sentence.format(role_words(roles.reference_role(results))))


def _sentence(results: StudyResults, comparison: Comparison, *, names_basis: bool) -> str:
    """What a comparison found in the preferred metrics, and on what it rests."""
    metrics = [m for m in _preferred(results, comparison) if m in comparison.overall]
    effects = [
        f"{metric_label(m)} {_is(comparison.overall[m].improvement_pct, m)} "
        f"({comparison.confidence:.0%} interval {_within(comparison.overall[m], m)})"
        if comparison.overall[m].is_measurable
        else f"{metric_label(m)} is {choose.NOT_MEASURABLE}"
        for m in metrics
    ]
    subject = "" if comparison.candidate == TUNED else f"{role_words(comparison.candidate)} "
    if _is_rejected(results, comparison):
        subject = f"{role_words(comparison.candidate)}{', not exported,' if names_basis else ''} "
    text = f"{subject}against {role_words(comparison.reference)}: {' and '.join(effects)}"
    if names_basis:
        origin = "simulated " if results.origin == Origin.SIMULATED else ""
        traces = counted(comparison.num_traces, f"{origin}held-out trace")
        text += f", over {traces} with {counted(comparison.num_requests, 'request')}"
    return f"{capitalised(text)}.{_without_saturated(comparison, metrics)}"


def _is_rejected(results: StudyResults, comparison: Comparison) -> bool:
    """Whether the comparison is of a tuned setting that is not exported, because the reference stays."""
    stays = results.exported_role in REFERENCES
    return stays and comparison.candidate == TUNED and not roles.same_setting(results, TUNED, results.exported_role)


def _without_saturated(comparison: Comparison, metrics: Sequence[str]) -> str:
    """What is left of the effect without the saturated regimes; nothing where that says no more."""
    if not comparison.steady or comparison.did_the_same:
        return ""
    effects = {m: comparison.steady[m] for m in metrics if m in comparison.steady}
    said = " and ".join(
        f"{metric_label(m)} {_is(effect.improvement_pct, m)} ({_within(effect, m)})"
        if effect.is_measurable
        else f"{metric_label(m)} is {choose.NOT_MEASURABLE}"
        for m, effect in effects.items()
    )
    is_clear = choose.is_borne_out(comparison.verdict, [(e.low_pct, e.high_pct) for e in effects.values()])
    doubt = "" if is_clear else f", which is not clearly {comparison.verdict}"
    where = " and ".join(cleaned(regime, 40) for regime in comparison.saturated)
    return f" Without the saturated {where}, {said}{doubt}."


def _is(improvement_pct: float, metric: str) -> str:
    words = change(improvement_pct, metric)
    return f"is {words}" if words[0].isdigit() else "shows no difference" if words == "no difference" else words


def _noise_floor(results: StudyResults) -> list[str]:
    if not results.noise:
        return []
    floor = max(noise.visible_held_out_pct for noise in results.noise)
    return [f"Differences below {percent(floor, signed=False)} drown in the noise of the measurement."]


def _cold(results: StudyResults) -> list[str]:
    """That the export did not do cold what was measured hot, where noise does not explain it."""
    cold = results.cold
    if cold is None or cold.change_pct is None or not cold.is_beyond_noise:
        return []
    label = metric_label(cold.metric)
    words = change(-cold.change_pct, cold.metric)
    return [f"On a server started cold with the export, {label} was {words} than here: more than noise explains."]


def _preferred(results: StudyResults, comparison: Comparison) -> list[str]:
    return list(dict.fromkeys([comparison.preferred_metric, *choose.preferred_of(results)]))


def _tiles(results: StudyResults, shown: Sequence[Comparison]) -> list[Tile]:
    if not shown:
        return []
    main = shown[0]
    picked = [(comparison, comparison.preferred_metric) for comparison in shown]
    picked += [(main, o.metric) for o in results.objectives if o.metric != main.preferred_metric][:1]
    picked += _both_sides(results, main, [metric for comparison, metric in picked if comparison is main])
    effects = [(c, metric, c.overall[metric]) for c, metric in picked if metric in c.overall]
    known = [effect for *_, effect in effects if effect.is_measurable]
    ends = [v for e in known for v in (e.low_pct, e.high_pct, 0.0) if finite(v) is not None] or [0.0]
    tiles = []
    for comparison, metric, effect in effects:
        of = f" of {role_words(comparison.candidate)}" if _is_rejected(results, comparison) else ""
        label = f"{capitalised(metric_label(metric))}{of} against {role_words(comparison.reference)}"
        if not effect.is_measurable:
            note = f"the {comparison.confidence:.0%} interval reaches to both sides by more than a factor of two or so"
            tiles.append(Tile(label, "Not measurable", "here", note, "even"))
            continue
        words = change(effect.improvement_pct, metric)
        number, unit, direction = words.partition(" % ")
        tiles.append(
            Tile(
                label,
                f"{number} %" if unit else capitalised(words),
                direction,
                f"{'no clear difference; ' if _spans_zero(effect) else ''}"
                f"{comparison.confidence:.0%} interval: {_within(effect, metric)}",
                tone_of(effect),
                strip_of(effect, min(ends), max(ends)),
            )
        )
    return [*tiles, _share_tile(results, main)]


def _both_sides(results: StudyResults, main: Comparison, shown: Sequence[str]) -> list[tuple[Comparison, str]]:
    """Where a better setting has a price: its greatest further gain, and that price; a mean rather than a P95."""
    others = sorted((m for m in main.overall if m not in shown), key=lambda m: -abs(main.overall[m].improvement_pct))
    others = [m for m in others if abs(main.overall[m].improvement_pct) >= _least_pct(results)]
    sides = [[m for m in others if tone_of(main.overall[m]) == tone] for tone in ("good", "bad")]
    if main.verdict != "better" or main.did_the_same or not sides[1]:
        return []
    return [(main, max(side, key=lambda m: m.startswith("mean_"))) for side in sides if side]


def _share_tile(results: StudyResults, main: Comparison) -> Tile:
    low, high = main.share_faster_interval
    note = f"slower: {percent(main.share_slower * 100, signed=False)}"
    if finite(low) is not None and finite(high) is not None:
        note = f"{main.confidence:.0%} interval: {low * 100:.1f} to {percent(high * 100, signed=False)}; {note}"
    known = not math.isnan(main.share_faster + main.share_slower)
    of = f"with {role_words(main.candidate)} " if _is_rejected(results, main) else ""
    return Tile(
        f"Requests faster {of}than with {role_words(main.reference)}",
        percent(main.share_faster * 100, signed=False),
        "of them",
        note,
        "good" if low > main.share_slower else "bad" if high < main.share_slower else "even",
        split=Split(main.share_faster * 100, main.share_slower * 100) if known else None,
    )


def tone_of(effect: Effect) -> Tone:
    """Good or bad when the whole interval lies on that side of 0 and the value is no 0 as written."""
    if finite(effect.improvement_pct) is None or round(effect.improvement_pct, 1) == 0:
        return "even"
    return "good" if effect.low_pct > 0 else "bad" if effect.high_pct < 0 else "even"


def _spans_zero(effect: Effect) -> bool:
    return effect.low_pct <= 0 <= effect.high_pct


def strip_of(effect: Effect, low: float, high: float) -> Strip | None:
    """The effect on a line from `low` to `high` with a margin; None when it is not finite, or not measurable."""
    if any(finite(v) is None for v in (effect.low_pct, effect.improvement_pct, effect.high_pct)):
        return None
    if not effect.is_measurable:
        return None
    margin = 0.08 * max(high - low, 1.0)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return round((value - low) / (high - low) * 100, 2)

    return Strip(place(0), place(effect.low_pct), place(effect.improvement_pct), place(effect.high_pct))
