"""How the short names of settings and of load regimes are to be read, in words for who sees them first. Plain data."""

from __future__ import annotations

import re

from autotune.results import Setting, StudyResults
from ppas_core.errors import InvalidInput
from ppas_core.policy import DEFAULT_MAX_NUM_SEQS
from reports import roles
from reports.numbers import cleaned, tokens
from reports.views import ordered_regimes

_REGIME = re.compile(r"λ=(?P<rate>[\d.]+)(?: p(?P<prompt>\d+) o(?P<output>\d+))?")


def names(results: StudyResults) -> tuple[str, ...]:
    """A sentence on a setting's name and one on a regime's, each by example; none for names that are not ours."""
    held = {held.role: held.setting for held in results.held_out}
    settings = [results.exported, *held.values()]
    made = [_setting(next((s for s in settings if not roles.is_static(s) and _is_ours(s)), None))]
    static = next((s for s in settings if roles.is_static(s) and _is_ours(s)), None)
    if static is not None:
        made.append(f"{cleaned(static.label)} is a static budget of {tokens(static.params['b_max'])} tokens a step.")
    regimes = ordered_regimes(trace.regime for trace in results.traces)
    made.append(_regime(regimes[0]) if regimes else None)
    return tuple(sentence for sentence in made if sentence)


def _is_ours(setting: Setting) -> bool:
    """Whether the label says what the setting is: a file of results may name it otherwise."""
    try:
        return setting.to_params().label() == setting.label
    except InvalidInput:
        return False


def _setting(setting: Setting | None) -> str | None:
    if setting is None:
        return None
    params = setting.to_params()
    parts = [f"n_th {params.n_th}", f"b_max {tokens(params.b_max)}", f"b_cap {tokens(params.b_cap)}"]
    parts += [] if params.t_large is None else [f"t_large {tokens(params.t_large)}"]
    parts += [f"scope {params.scope}"]
    if params.max_num_seqs != DEFAULT_MAX_NUM_SEQS:
        parts.append(f"at most {tokens(params.max_num_seqs)} sequences at once (s{params.max_num_seqs})")
    return f"{cleaned(setting.label)} is {', '.join(parts)}."


def _regime(name: str) -> str | None:
    found = _REGIME.fullmatch(name)
    if found is None:
        return None
    noun = "request" if found["rate"] == "1" else "requests"
    text = f"{cleaned(name)} is traffic with {found['rate']} {noun} per second in its bursts"
    if found["prompt"]:
        text += f", each with {int(found['prompt']):,} prompt and {int(found['output']):,} output tokens"
    return text + "."
