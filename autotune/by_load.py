"""Under which loads is the gain on a preferred metric not clear? In one line, for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from autotune import metrics
from autotune.results import Comparison, Effect, StudyResults

_MOST_NAMED: Final = 3
"""Load regimes named one by one; more are counted."""
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")


def by_load(results: StudyResults) -> str | None:
    """Of the first comparison, that of the pick with the reference; None where nothing is gained, or all of it is clear.

    Clear: the whole interval lies on one side of 0.
    """
    if not results.comparisons or results.comparisons[0].verdict != "better":
        return None
    from autotune.choose import preferred_of

    said = [_of_metric(results.comparisons[0], name) for name in preferred_of(results)]
    return "; ".join(words for words in said if words) or None


def _of_metric(comparison: Comparison, name: str) -> str:
    """One metric's gain regime by regime, in ascending load; empty where it is clear in each, or there is only one."""
    found = {regime: effects[name] for regime, effects in comparison.regimes.items() if name in effects}
    regimes = sorted(found, key=lambda regime: ([float(number) for number in _NUMBER.findall(regime)], regime))
    unclear = [regime for regime in regimes if not _is_clear(found[regime])]
    if len(found) < 2 or not unclear:
        return ""
    label, short = metrics.metric(name).label, _short_names(regimes)
    if len(unclear) == len(found):
        return f"{label} not clear in any of {len(found)} load regimes alone"
    if len(found) > _MOST_NAMED:
        return f"{label} not clear in {len(unclear)} of {len(found)} load regimes"
    clear = [
        f"{found[regime].improvement_pct:+.1f} % at {short[regime]}" for regime in regimes if regime not in unclear
    ]
    return f"{label} {', '.join(clear)}, not clear at {' and '.join(short[regime] for regime in unclear)}"


def _is_clear(effect: Effect) -> bool:
    return effect.is_measurable and not effect.low_pct <= 0 <= effect.high_pct


def _short_names(regimes: Sequence[str]) -> dict[str, str]:
    """The regimes without the words that all of them share: `λ=5` of `λ=5 p1500 o32` where only the load differs."""
    shared = set.intersection(*(set(regime.split()) for regime in regimes))
    short = {regime: " ".join(word for word in regime.split() if word not in shared) for regime in regimes}
    return (
        short if all(short.values()) and len(set(short.values())) == len(regimes) else {name: name for name in regimes}
    )
