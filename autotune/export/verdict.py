"""What a study found of the setting that an export holds, in words: for whoever gets no more of the study than the export."""

from __future__ import annotations

import math

from autotune import choose
from autotune.export.common import one_line
from autotune.results import Comparison, Setting, StudyResults


def role_of(results: StudyResults, setting: Setting) -> str | None:
    """What the study calls the setting; None for one that it tried without quoting it, or never tried."""
    if setting.params == results.exported.params:
        return results.exported_role
    return next((held.role for held in results.held_out if held.setting.params == setting.params), None)


def comparisons_of(results: StudyResults, setting: Setting) -> list[Comparison]:
    """What the held-out traces say of the setting; empty when it was not compared there."""
    roles = {held.role for held in results.held_out if held.setting.params == setting.params}
    return [found for found in results.comparisons if found.candidate in roles]


def verdict_lines(results: StudyResults, setting: Setting) -> list[str]:
    """The verdicts, the costs, the noise, and where and when all that was found."""
    own, role = comparisons_of(results, setting), role_of(results, setting)
    against = [found for found in results.comparisons if found.reference == role]
    lines = [one_line(found.sentence) for found in own]
    if against:
        kept = "The study exports it, since it found no other setting to be clearly better:"
        lines.append(kept if setting.params == results.exported.params else "Others were compared with it:")
        lines += [one_line(found.sentence) for found in against]
    if not lines:
        lines = ["This setting was not compared with others on the held-out traces, so no verdict is known of it."]
    named = {held.role: held.setting.label for held in results.held_out}
    roles = [role for role in named if any(role in (found.candidate, found.reference) for found in (*own, *against))]
    lines += [f"Here {', '.join(f'{one_line(role)} is {one_line(named[role])}' for role in roles)}."] if roles else []
    lines += [
        f"Cost against {one_line(found.reference)}: {one_line(cost)}" for found in own[:1] for cost in found.costs
    ]
    lines += [
        f"Noise: {choose.noise_words(noise)}."
        for noise in results.noise
        if math.isfinite(noise.replay_pct) and math.isfinite(noise.visible_held_out_pct)
    ]
    where = "Measured on a live server" if results.origin == "live" else "Simulated, not measured on a server"
    return [*lines, f"{where}; {one_line(results.created_at)}."]
