"""Which setting plays which part in a study, what it is called, and how two of them compare. Plain data."""

from __future__ import annotations

from collections.abc import Mapping

from autotune import alike
from autotune.alike import Behaviour
from autotune.results import Comparison, Effect, HeldOut, Setting, StudyResults, Verdict
from ppas_core.errors import InvalidInput
from reports.numbers import cleaned, tokens

TUNED = "tuned"
PAPER_DEFAULT = "paper default"
OWN_REFERENCE = "reference"
REFERENCES = (PAPER_DEFAULT, OWN_REFERENCE)
"""Roles of the setting to beat: a published one, or one that the study names."""
BEST_STATIC = "best static"
KNOWN = (TUNED, *REFERENCES, BEST_STATIC)

_WORDS = {TUNED: "the tuned setting", BEST_STATIC: "the best static budget"}
_ACTS_ON_STATIC = ("b_max", "max_num_seqs")
_STATIC_PARAMS = ("b_max", "b_cap", "max_num_seqs")
_MIRRORED: dict[Verdict, Verdict] = {"better": "worse", "worse": "better"}


def role(results: StudyResults, name: str) -> HeldOut | None:
    """The first held-out setting in the role called `name`."""
    return next((held for held in results.held_out if held.role == name), None)


def role_words(name: str) -> str:
    """A role in a sentence: `the paper default`; anything else (a setting's label) as it is."""
    return _WORDS.get(name) or (f"the {name}" if name in REFERENCES else cleaned(name, 60))


def is_static(setting: Setting) -> bool:
    """Whether the budget never changes: then it makes no difference which branch a step took."""
    return "b_max" in setting.params and setting.params.get("b_cap") == setting.params["b_max"]


def acts(setting: Setting, knob: str) -> bool:
    """Whether the knob does anything in this setting: in a static budget only its size and the sequence cap do."""
    return not is_static(setting) or knob in _ACTS_ON_STATIC


def acting_params(setting: Setting) -> dict[str, object]:
    """The setting's values without those that do nothing; still a whole setting (b_cap says that a budget is static)."""
    if not is_static(setting):
        return dict(setting.params)
    return {knob: value for knob, value in setting.params.items() if knob in _STATIC_PARAMS}


def setting_words(setting: Setting) -> str:
    """A setting in a sentence: its label, or `static budget 4,096 (P-PAS off)`."""
    if is_static(setting):
        return f"static budget {cleaned(tokens(setting.params['b_max']), 40)} (P-PAS off)"
    return cleaned(setting.label)


def behaviour(setting: Setting, branch_steps: Mapping[str, int]) -> Behaviour | None:
    """As `autotune.alike.behaviour`; None also where the values are none that the scheduler would take."""
    try:
        return alike.behaviour(setting.to_params(), branch_steps)
    except InvalidInput:
        return None


def reference_role(results: StudyResults) -> str:
    """What the setting to beat is called in this study."""
    return next((name for name in REFERENCES if role(results, name) is not None), PAPER_DEFAULT)


def reference_setting(results: StudyResults) -> HeldOut | None:
    """The setting to beat on the held-out traces."""
    return role(results, reference_role(results))


def same_setting(results: StudyResults, one: str, other: str) -> bool:
    """Whether two roles name the same setting, or two static budgets of the same size."""
    first, second = role(results, one), role(results, other)
    return first is not None and second is not None and acting_params(first.setting) == acting_params(second.setting)


def compared(results: StudyResults, reference: str, candidate: str = TUNED) -> Comparison | None:
    """The comparison of one role with another, by role or by label; turned round where it was made the other way."""
    ours, theirs = _names(results, candidate), _names(results, reference)
    made = results.comparisons
    direct = next((c for c in made if c.reference in theirs and c.candidate in ours), None)
    turned = next((c for c in made if c.reference in ours and c.candidate in theirs), None)
    return direct or (mirrored(turned) if turned else None)


def mirrored(comparison: Comparison) -> Comparison:
    """The same comparison seen from the other side. The interval of the share is not known from there: NaN."""
    return comparison.model_copy(
        update={
            "candidate": comparison.reference,
            "reference": comparison.candidate,
            "overall": {metric: _turned(effect) for metric, effect in comparison.overall.items()},
            "steady": comparison.steady and {metric: _turned(effect) for metric, effect in comparison.steady.items()},
            "regimes": {
                regime: {metric: _turned(effect) for metric, effect in effects.items()}
                for regime, effects in comparison.regimes.items()
            },
            "share_faster": comparison.share_slower,
            "share_slower": comparison.share_faster,
            "share_faster_interval": (float("nan"), float("nan")),
            "verdict": _MIRRORED.get(comparison.verdict, comparison.verdict),
            "sentence": "",
        }
    )


def _names(results: StudyResults, name: str) -> set[str]:
    held = role(results, name)
    return {name} | ({held.setting.label} if held else set())


def _turned(effect: Effect) -> Effect:
    def turn(improvement_pct: float) -> float:
        return (1 - 1 / (1 - improvement_pct / 100)) * 100 if improvement_pct < 100 else float("-inf")

    return Effect(
        improvement_pct=turn(effect.improvement_pct), low_pct=turn(effect.high_pct), high_pct=turn(effect.low_pct)
    )
