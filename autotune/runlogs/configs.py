"""Which setting a name in a log means: published names, static budgets, labels of ours, or what the user says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from autotune.runlogs.improvement import static_budget
from autotune.runlogs.model import RunResult
from autotune.settings import parse_setting
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput
from ppas_core.policy import DEFAULT_MAX_NUM_SEQS, PolicyParams, Scope

OLD_CAP: Final = 2048
"""b_cap as it is fixed in the author's patch of vLLM 0.22.1; n_th is 2 in both patches."""
NEW_T_LARGE: Final = 65_536
"""t_large of P-PAS+ where the patch of vLLM 0.27.1 is told none."""
_PLUS_BY_MODEL: Final = ((re.compile("qwen.*27b", re.I), "ppas-plus-qwen3.8-27b"), (re.compile("nemotron", re.I), "ppas-plus-nemotron-30b"))  # fmt: skip # noqa: E501
_ADAPTIVE: Final = re.compile(r"p[-_]?pas|adaptive", re.I)
_IN_NAME: Final = {
    "b_cap": re.compile(r"cap[-_]?(\d{1,8})(?!\d)", re.I),
    "b_max": re.compile(r"(?:mbt|b?max)[-_]?(\d{1,8})(?!\d)", re.I),
    "t_large": re.compile(r"(?:[-_]t|large|threshold|thr)[-_]?(\d{1,8})(?!\d)", re.I),
    "max_num_seqs": re.compile(r"[-_]s(\d{1,6})(?!\d)", re.I),
    "n_th": re.compile(r"n[-_]?th[-_]?(\d{1,4})(?!\d)", re.I),
}
_VARIANT: Final = re.compile(r" \[[^\[\]]*\]$")


def parse_mapping(texts: Iterable[str]) -> dict[str, PolicyParams]:
    """Settings from `NAME=SETTING` texts of the command line. Raises InvalidInput."""
    found = {}
    for text in texts:
        name, equals, setting = text.partition("=")
        if not name or not equals:
            raise InvalidInput(f"{text!r} is not NAME=SETTING, as in ppas_x=2/16384/1280/global")
        found[name] = parse_setting(setting)
    return found


def setting_of(run: RunResult, mapping: Mapping[str, PolicyParams]) -> PolicyParams:
    """The setting of `run`: from `mapping`, which may name it with or without its variant; else as the log says.

    Raises InvalidInput, with the remedy, for a name that tells too little.
    """
    name = _VARIANT.sub("", run.config)
    for known in (run.config, name):
        if known in mapping:
            return mapping[known]
    if run.params is not None:
        return run.params
    numbers = {key: int(match[1]) for key, pattern in _IN_NAME.items() if (match := pattern.search(name))}
    numbers = {**numbers, **run.hints}
    try:
        if (budget := static_budget(run)) is not None:
            return _static(run, budget, numbers)
        if _ADAPTIVE.match(name):
            return _adaptive(run, name, numbers)
        if name.endswith((".env", ".json", ".yaml", ".yml")):  # a log opens no file
            raise InvalidInput("it names a file")
        return parse_setting(name)
    except InvalidInput as error:
        raise InvalidInput(
            f"{run.source}: the setting {run.config!r} is not known in full ({str(error).partition(';')[0]}); say it with "
            f"--setting '{run.config}=2/16384/2048/prefill' (N_TH/B_MAX/B_CAP, /T65536 for P-PAS+, /prefill or /global)"
        ) from None


def _static(run: RunResult, budget: int, numbers: Mapping[str, int]) -> PolicyParams:
    told = run.hints.get("b_max", budget)
    if told != budget:
        raise InvalidInput(f"its name says {budget}, its max_num_batched_tokens {told}")
    return PolicyParams.static(budget, max_num_seqs=numbers.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS))


def _adaptive(run: RunResult, name: str, numbers: Mapping[str, int]) -> PolicyParams:
    """P-PAS or P-PAS+ from the numbers that are known, the author's patches, and the published setting of the model."""
    plus = "plus" in name.lower() or "+" in name or "PPAS_PLUS_ENABLED" in run.flags
    new = plus or not run.vllm.startswith("0.22")
    base = next((published(known) for pattern, known in _PLUS_BY_MODEL if pattern.search(run.model)), None)
    b_cap = numbers.get("b_cap", (base.b_cap if base else None) if new else OLD_CAP)
    b_max = numbers.get("b_max", base.b_max if base else None)
    if b_cap is None:
        raise InvalidInput("the log does not say its b_cap")
    if b_max is None:
        raise InvalidInput("the log does not say its max_num_batched_tokens")
    t_large = numbers.get("t_large", base.t_large if base else NEW_T_LARGE) if plus else None
    return PolicyParams(
        b_max=b_max,
        b_cap=b_cap,
        n_th=numbers.get("n_th", 2),
        t_large=t_large,
        scope=Scope.GLOBAL if new else Scope.PREFILL,
        max_num_seqs=numbers.get("max_num_seqs", base.max_num_seqs if base else DEFAULT_MAX_NUM_SEQS),
    )
