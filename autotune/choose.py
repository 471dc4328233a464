"""Which setting is picked, and what is said of it in words.

The rule, in this order: no failure; no worse than the reference, beyond noise, in any protected regime; best on
the preferred objective, among the settings that were measured again where there are any; settings within `tie_pct` of
the best are ties, and a tie goes to the reference, then to the setting nearest to it. The verdict comes from held-out
traces, which the pick has not seen.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from autotune import aggregate, metrics
from autotune.records import Origin
from autotune.results import NoiseInfo, StudyResults, Verdict
from autotune.stats import Interval, PairedComparison
from ppas_core.errors import InvalidInput, InvalidSettings, NoResult
from ppas_core.policy import Branch, PolicyParams

BALANCED: Final = "balanced"
NOT_MEASURABLE: Final = "not measurable here"
"""Stands for an effect whose interval is too wide to say anything; results.json keeps the numbers."""
_SHORT_NAMES: Final = {"mean": "mean_latency_s", "p95": "p95_latency_s"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting with what the search measured of it.

    objectives: metric name to ratio to the reference. regimes: regime to metric name to mean. measurements: how often it
    was measured.
    """

    params: PolicyParams
    objectives: Mapping[str, float]
    regimes: Mapping[str, Mapping[str, float]]
    measurements: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The index of the picked candidate and the reason in a sentence."""

    index: int
    sentence: str


def preferred_metrics(prefer: str, objectives: Sequence[str]) -> tuple[str, ...]:
    """The objectives that `prefer` asks for: `mean`, `p95`, a metric's name, or all of them for `balanced`.

    Raises InvalidInput when the study has no such objective.
    """
    if prefer == BALANCED:
        return tuple(objectives)
    name = _SHORT_NAMES.get(prefer, prefer)
    if name not in objectives:
        allowed = [word for word, full in _SHORT_NAMES.items() if full in objectives]
        raise InvalidInput(
            f"prefer is {prefer!r}, which is no objective of this study; allowed: "
            f"{', '.join([*allowed, BALANCED, *(n for n in objectives if n not in _SHORT_NAMES.values())])}"
        )
    return (name,)


def preferred_of(results: StudyResults) -> tuple[str, ...]:
    """The metrics that decide in a finished study; none where it has no objectives. Raises InvalidInput as above."""
    objectives = [objective.metric for objective in results.objectives]
    return preferred_metrics(results.prefer, objectives) if objectives else ()


def score(objectives: Mapping[str, float], preferred: Sequence[str]) -> float:
    """The number that the rule minimises: the geometric mean of the preferred objectives' ratios."""
    return aggregate.geometric_mean(objectives[name] for name in preferred)


def choose(
    candidates: Sequence[Candidate],
    reference: int,
    preferred: Sequence[str],
    *,
    protect: Mapping[str, float] = MappingProxyType({}),
    tie_pct: float = 0.5,
    noise_pct: float | None = None,
) -> Choice:
    """Applies the rule above to `candidates`, of which number `reference` is the reference.

    protect: regimes in which the pick must not be worse than the reference, with the difference in per cent that says
    nothing there. noise_pct: the largest difference that noise alone makes between two candidates; it changes no choice, it
    says how many are as good as the pick for all that is known. None without noise. Raises NoResult without candidates.
    """
    if not candidates:
        raise NoResult("no setting was measured without a failure; see the trials' reasons")
    base = candidates[reference]
    allowed = [i for i, c in enumerate(candidates) if i == reference or not _harmed(c, base, preferred, protect)]
    scores = {i: score(candidates[i].objectives, preferred) for i in allowed}
    again = [i for i in allowed if i != reference and candidates[i].measurements > 1]
    rivals = [reference, *again] if again else allowed
    best = min(scores[i] for i in rivals)
    ties = [i for i in rivals if scores[i] <= best * (1 + tie_pct / 100)]
    label = " and ".join(metrics.metric(name).label for name in preferred)
    label += " together (geometric mean of their ratios)" if len(preferred) > 1 else ""
    excluded = len(candidates) - len(allowed)
    note = f"; {excluded} settings were left out for harming a protected regime" if excluded else ""
    of = f"Of {len(allowed)} settings"
    if again:
        of += f", of which the {f'{len(again)} best were' if len(again) > 1 else 'best was'} measured again,"
    pick = min(ties, key=lambda i: (_distance(candidates[i].params, base.params), scores[i], i))
    name = candidates[pick].params.label()
    if reference in ties:
        pick = reference
        said = f"The reference is within {tie_pct:g} % of the best setting on {label}, so it is kept"
    elif len(ties) > 1:
        said = f"{of} {len(ties)} lie within {tie_pct:g} % of the best on {label}; "
        said += f"of these, {name} is nearest to the reference"
    else:
        said = f"{of} {name} is the best on {label}"
        said += "" if noise_pct is not None else f", and no other lies within {tie_pct:g} % of it"
    alike = "" if noise_pct is None else f" {_alike(scores, pick, noise_pct)}"
    return Choice(pick, f"{said}{note}.{alike}")


def settle(
    pick: PolicyParams, branch_steps: Mapping[str, int], reference: PolicyParams
) -> tuple[PolicyParams, dict[str, str]]:
    """The pick with the reference's values for knobs whose branch never fired, and those knobs with the reason.

    A knob that no step exercised is not identified by these traces: whatever value the search drew for it is chance.
    The reference's value may act where the pick's did not, so the caller measures the result before taking it.
    """
    if pick.is_static or pick == reference:
        return pick, {}
    settled, reasons = pick, {}
    if pick.t_large is not None and not branch_steps.get(Branch.LARGE_PREFILL, 0):
        reasons["t_large"] = f"no step of the tuning traces took the {Branch.LARGE_PREFILL} branch"
        settled = replace(settled, t_large=reference.t_large)
    if not branch_steps.get(Branch.PRESSURE, 0):
        reasons["n_th"] = f"no step of the tuning traces took the {Branch.PRESSURE} branch"
        settled = replace(settled, n_th=reference.n_th)
        if settled.t_large is None and reference.b_cap <= settled.b_max:
            with contextlib.suppress(InvalidSettings):  # it may not go with the others
                settled = replace(settled, b_cap=reference.b_cap)
                reasons["b_cap"] = "no step of the tuning traces was capped"
    return settled, reasons


def exported_role(against_reference: Verdict, against_static: Verdict, reference_against_static: Verdict) -> str:
    """Which finalist is exported: `tuned`, `best static` or `reference`, from the held-out verdicts on these pairs.

    The pick only when it is clearly better than the reference and no static budget is clearly better than it. A static
    budget that is clearly better than the reference is the better advice then. Without a clear winner, the reference.
    """
    if against_reference == "better" and against_static != "worse":
        return "tuned"
    if reference_against_static == "worse" or (against_reference == "better" and against_static == "worse"):
        return "best static"
    return "reference"


def verdict(
    comparison: PairedComparison, preferred: Sequence[str], *, min_gain_pct: float, floor_pct: float = 0.0
) -> Verdict:
    """`better` or `worse` when the interval of every preferred objective lies on that side of 0.

    Both also ask for a difference of at least `min_gain_pct`, below which it is not worth a change, and of `floor_pct`,
    which is what the noise lets one see. Else `no clear winner` where the intervals exclude both a gain and a loss worth
    having, and `inconclusive` where they do not: more measurements could still find one.
    """
    asked_pct = max(min_gain_pct, floor_pct)
    effects = [comparison.overall[name] for name in preferred]
    if all(effect.low > 0 and effect.value >= asked_pct for effect in effects):
        return "better"
    if all(effect.high < 0 and effect.value <= -asked_pct for effect in effects):
        return "worse"
    may_be_better = all(effect.high > 0 and effect.high >= min_gain_pct for effect in effects)
    may_be_worse = all(effect.low < 0 and effect.low <= -min_gain_pct for effect in effects)
    return "inconclusive" if may_be_better or may_be_worse else "no clear winner"


def sentence(
    candidate: str,
    reference: str,
    comparison: PairedComparison,
    preferred: Sequence[str],
    found: Verdict,
    origin: Origin,
    simulator_error_pct: float | None = None,
) -> str:
    """The verdict in words, with the effect, its interval and what it rests on; says so when that is simulated.

    simulator_error_pct: given where the effect is smaller than that.
    """
    effects = "; ".join(
        f"{metrics.metric(name).label} {change(comparison.overall[name], comparison.confidence)}" for name in preferred
    )
    within = (
        "" if simulator_error_pct is None else f" in the simulator, within its own error of {simulator_error_pct:.1f} %"
    )
    head = {
        "better": f"{candidate} is better than {reference}{within}",
        "worse": f"{candidate} is worse than {reference}{within}",
        "unchanged": f"Unchanged: {candidate} is the same setting as {reference}",
        "no clear winner": f"No clear winner between {candidate} and {reference}",
        "inconclusive": f"{candidate} against {reference} is inconclusive",
    }[found]
    return (
        f"{head}: {effects}, over {_count(comparison.num_traces, f'{origin} held-out trace')} with "
        f"{_count(comparison.num_requests, 'request')}. End to end, {comparison.share_faster.value:.0%} of the requests "
        f"are faster and {comparison.share_slower:.0%} slower."
    )


def without_saturated(
    comparison: PairedComparison, preferred: Sequence[str], found: Verdict, saturated: Sequence[str]
) -> str:
    """What is left of the effect without the saturated regimes, in words; plainly, where that is less than was `found`."""
    effects = [comparison.steady[name] for name in preferred]
    said = "; ".join(
        f"{metrics.metric(name).label} {change(effect, comparison.confidence)}"
        for name, effect in zip(preferred, effects, strict=True)
    )
    where = f"Without the saturated regime{'s' if len(saturated) > 1 else ''} {' and '.join(saturated)}"
    if not is_borne_out(found, [(effect.low, effect.high) for effect in effects]):
        return f"{where} it is not clearly {found}: {said}."
    return f"{where}: {said}."


def noise_words(noise: NoiseInfo) -> str:
    """How far a replay varies by itself, and what that leaves unseen."""
    return (
        f"{metrics.metric(noise.metric).label} of one replay varies by {noise.replay_pct:.1f} %; "
        f"on the held-out traces, differences below {noise.visible_held_out_pct:.1f} % are not found"
    )


def is_borne_out(found: Verdict, intervals: Sequence[tuple[float, float]]) -> bool:
    """Whether `intervals` of improvements (low, high) lie where the verdict says; one that names no winner asks nothing."""
    if found == "better":
        return all(low > 0 for low, _ in intervals)
    return found != "worse" or all(high < 0 for _, high in intervals)


def change(effect: Interval, confidence: float) -> str:
    """An effect in words and without signs, such as `1.7 % better (95% interval 1.0 to 2.4 %)`; each end has its own word
    where the interval spans 0: `0.9 % worse to 2.4 % better`.
    """
    if not aggregate.is_measurable(effect.low, effect.high):
        return NOT_MEASURABLE
    word = "better" if effect.value >= 0 else "worse"
    if effect.low < 0 < effect.high:
        span = f"{-effect.low:.1f} % worse to {effect.high:.1f} % better"
    else:
        span = "{:.1f} to {:.1f} %".format(*sorted((abs(effect.low), abs(effect.high))))
    return f"{abs(effect.value):.1f} % {word} ({confidence:.0%} interval {span})"


def costs(comparison: PairedComparison, preferred: Sequence[str], *, min_gain_pct: float = 0.0) -> list[str]:
    """What the setting pays for its gain: metrics that are clearly worse, and regimes where a preferred one is.

    min_gain_pct: a gain below it is not worth having, so neither is a loss below it worth a word.
    """

    def counts(effect: Interval) -> bool:
        return effect.high < 0 and effect.value <= -min_gain_pct

    found = [
        f"{metrics.metric(name).label} {change(effect, comparison.confidence)}"
        for name, effect in comparison.overall.items()
        if counts(effect)
    ]
    found += [
        f"regime {regime}: {metrics.metric(name).label} {change(effects[name], comparison.confidence)}"
        for regime, effects in comparison.regimes.items()
        for name in preferred
        if name in effects and counts(effects[name])
    ]
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _alike(scores: Mapping[int, float], pick: int, noise_pct: float) -> str:
    """How many settings cannot be told from the pick by noise, in words."""
    alike = sum(100 * abs(math.log(score / scores[pick])) <= noise_pct for i, score in scores.items() if i != pick)
    if not alike:
        return f"No other lies within the {noise_pct:.1f} % that noise alone may put between two trials."
    one = alike == 1
    return (
        f"{_count(alike, 'other')} cannot be told from it: {'it lies' if one else 'they lie'} within the {noise_pct:.1f} % "
        "that noise alone may put between two trials."
    )


def _harmed(candidate: Candidate, reference: Candidate, preferred: Sequence[str], protect: Mapping[str, float]) -> bool:
    """Whether the candidate is worse in a protected regime; one that the reference itself leaves at zero harms nobody."""
    for regime, tolerance_pct in protect.items():
        for name in preferred:
            own, other = candidate.regimes[regime][name], reference.regimes[regime][name]
            if other > 0 and not aggregate.ratio(name, own, other) <= 1 + tolerance_pct / 100:
                return True
    return False


def _distance(params: PolicyParams, reference: PolicyParams) -> float:
    """Doublings of the budgets and of t_large plus steps of n_th; t_large on or off counts as three doublings."""
    distance = abs(math.log2(params.b_max / reference.b_max)) + abs(math.log2(params.b_cap / reference.b_cap))
    distance += abs(params.n_th - reference.n_th) + abs(math.log2(params.max_num_seqs / reference.max_num_seqs))
    if params.t_large is not None and reference.t_large is not None:
        distance += abs(math.log2(params.t_large / reference.t_large))
    elif params.t_large != reference.t_large:
        distance += 3
    return distance + (params.scope is not reference.scope) + (params.decode_guard != reference.decode_guard)
