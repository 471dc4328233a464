"""How one setting leaves the tuner: files for vLLM with our scheduler, for the published patched servers, and as JSON.

    vllm.yaml            for `vllm serve --config`, with the scheduler class and the settings
    ppas.env             the same for our plugin, by environment alone
    vllm-0.22.1.env      for the published patch of that vLLM: the setting, or the nearest that it can express
    vllm-0.27.1.env      likewise
    settings.json        the settings with their provenance

Every file carries a digest of its settings; `load_export` gives them back and refuses what was changed by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from autotune.provenance import now
from autotune.results import Setting, StudyResults
from ppas_core import __version__
from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically
from ppas_core.naming import did_you_mean
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams, Scope
from ppas_core.vllm.settings import EngineLimits, params_from_environment
from search_spaces.yaml_file import parse_yaml, read_text

Generation = Literal["0.22.1", "0.27.1"]
"""A published patched server, by the vLLM version it patches."""

Cost = Callable[[PolicyParams], float]
"""The predicted preferred objective of other settings as ratio to the exported one: 1.03 is 3 % worse."""

GENERATIONS: Final[tuple[Generation, ...]] = ("0.22.1", "0.27.1")
SCHEDULER_CLASS: Final = "ppas_core.vllm.scheduler.PpasScheduler"
KIND: Final = "ppas-autotune settings"
VERSION: Final = 1

PATCH_N_TH: Final = 2
"""n_th is fixed in both published patches."""
PATCH_0_22_1_B_CAP: Final = 2048
"""b_cap is fixed in the published patch of vLLM 0.22.1."""

_SAFE_VALUE: Final = re.compile(r"[A-Za-z0-9_./=-]*")
_DIGEST_LINE: Final = re.compile(r"^# settings (sha256:[0-9a-f]{64})$", re.MULTILINE)
_FLAGS_LINE: Final = re.compile(r"^# flags --max-num-batched-tokens (\d+) --max-num-seqs (\d+)$", re.MULTILINE)
_VARIABLES: Final = (
    "PPAS_ENABLED",
    "PPAS_PLUS_ENABLED",
    "PPAS_B_CAP",
    "PPAS_LARGE_PREFILL_THRESHOLD",
    "PPAS_N_TH",
    "PPAS_SCOPE",
    "PPAS_DECODE_GUARD",
)


def server_flags(params: PolicyParams) -> tuple[str, ...]:
    """The `vllm serve` flags that belong to `params`, whichever way the rest is switched on."""
    return ("--max-num-batched-tokens", str(params.b_max), "--max-num-seqs", str(params.max_num_seqs))


def environment(params: PolicyParams, generation: Generation | None = None) -> dict[str, str]:
    """The variables that switch `params` on, beside `server_flags`; none for a static budget.

    generation: the published patch to write for; None is our plugin, which knows every knob. PPAS_SCOPE is always
    written, so that our plugin reads an environment for a patch exactly as the patch does.
    Raises InvalidInput when that patch cannot express `params`.
    """
    if generation is not None and (reasons := nearest_expressible(params, generation)[1]):
        raise InvalidInput(f"the patched vLLM {generation} cannot express {params.label()}: {'; '.join(reasons)}")
    if params.is_static:
        return {}
    switch = "PPAS_ENABLED" if params.t_large is None else "PPAS_PLUS_ENABLED"
    variables = {switch: "1"}
    if generation != "0.22.1":
        variables["PPAS_B_CAP"] = str(params.b_cap)
    if params.t_large is not None:
        variables["PPAS_LARGE_PREFILL_THRESHOLD"] = str(params.t_large)
    if generation is None:
        variables["PPAS_N_TH"] = str(params.n_th)
    variables["PPAS_SCOPE"] = str(params.scope)
    if params.decode_guard and generation is None:
        variables["PPAS_DECODE_GUARD"] = "1"
    return variables


def nearest_expressible(params: PolicyParams, generation: Generation) -> tuple[PolicyParams, tuple[str, ...]]:
    """The setting nearest to `params` that the published patch can express, and why it is not `params` itself.

    No reason means that it acts as `params` does. b_max, max_num_seqs and, where the patch has them, b_cap and t_large
    are kept; what the patch fixes is replaced. Raises InvalidInput for another generation.
    """
    if generation not in GENERATIONS:
        raise InvalidInput(f"no published patch for vLLM {generation!r}{did_you_mean(generation, GENERATIONS)}")
    if params.is_static:
        return params, ()
    reasons = [f"n_th is {params.n_th}, the patch fixes {PATCH_N_TH}"] if params.n_th != PATCH_N_TH else []
    near = _nearest_0_22_1(params, reasons) if generation == "0.22.1" else _nearest_0_27_1(params, reasons)
    return near, tuple(reasons)


def _nearest_0_22_1(params: PolicyParams, reasons: list[str]) -> PolicyParams:
    if params.t_large is not None:
        reasons.append(f"t_large is {params.t_large}, the patch has no P-PAS+")
    if params.scope is not Scope.PREFILL:
        reasons.append(f"the scope is {params.scope}, the patch fixes prefill")
    if params.b_cap != PATCH_0_22_1_B_CAP:
        reasons.append(f"b_cap is {params.b_cap}, the patch fixes {PATCH_0_22_1_B_CAP}")
    if params.b_max <= PATCH_0_22_1_B_CAP:
        reasons.append(f"b_max is {params.b_max}, not above that b_cap: the patch would never act, so a static budget")
        return PolicyParams.static(params.b_max, max_num_seqs=params.max_num_seqs)
    # The guard acts under the global scope only: losing it is no reason of its own.
    return PolicyParams(params.b_max, PATCH_0_22_1_B_CAP, PATCH_N_TH, max_num_seqs=params.max_num_seqs)


def _nearest_0_27_1(params: PolicyParams, reasons: list[str]) -> PolicyParams:
    if params.scope is not Scope.GLOBAL:
        reasons.append(f"the scope is {params.scope}, the patch fixes global")
    elif params.decode_guard:
        reasons.append("decode_guard is on, the patch has none")
    b_cap = max(params.b_cap, params.max_num_seqs)
    if b_cap != params.b_cap:
        reasons.append(
            f"b_cap is {params.b_cap}, which under the global scope can starve decodes of {params.max_num_seqs} "
            f"sequences: raised to {b_cap}"
        )
    if b_cap == params.b_max:
        return PolicyParams.static(params.b_max, max_num_seqs=params.max_num_seqs)
    return replace(params, n_th=PATCH_N_TH, b_cap=b_cap, scope=Scope.GLOBAL, decode_guard=False)


# Writing


def write_export(
    results: StudyResults, directory: Path, *, setting: Setting | None = None, cost: Cost | None = None
) -> tuple[Path, ...]:
    """Writes the export of a study into `directory` and returns the files, `vllm.yaml` first.

    setting: what to export; None is what the study itself exports. A static budget is exported, and loads again, as
    `PolicyParams.static`. cost: asked for the nearest settings of patches
    that cannot express it. Each file is written whole or not at all. Raises InvalidSettings, OSError.
    """
    setting = setting or results.exported
    params = setting.to_params()
    if params.is_static:  # the other knobs cannot act, and no file could say them
        params = PolicyParams.static(params.b_max, max_num_seqs=params.max_num_seqs)
    origin = _origin_lines(results, setting, params)
    nearest = {generation: nearest_expressible(params, generation) for generation in GENERATIONS}
    costs = {
        generation: cost(near) if reasons and cost is not None else None
        for generation, (near, reasons) in nearest.items()
    }
    files = {
        "vllm.yaml": _vllm_yaml(params, origin),
        "ppas.env": _own_env(params, origin, nearest),
        **{
            f"vllm-{generation}.env": _patch_env(params, generation, origin, near, reasons, costs[generation])
            for generation, (near, reasons) in nearest.items()
        },
        "settings.json": _settings_json(results, setting, params, nearest, costs),
    }
    for name, text in files.items():
        write_atomically(directory / name, text.encode())
    return tuple(directory / name for name in files)


def _origin_lines(results: StudyResults, setting: Setting, params: PolicyParams) -> list[str]:
    role = _role(results, setting)
    named = f"{params.label()} ({_one_line(role)})" if role else params.label()
    study = f"the study {_one_line(results.name)}, {_one_line(results.created_at)}"
    return [
        f"Made by ppas-autotune {__version__} from {study}.",
        f"Setting {named}; its measurements are {results.origin}.",
    ]


def write_vllm_config(params: PolicyParams, path: Path) -> Path:
    """Writes `params` alone as a file for `vllm serve --config`, and returns its path."""
    write_atomically(path, _vllm_yaml(params, ["Made by ppas-autotune to check an export."]).encode())
    return path


def _vllm_yaml(params: PolicyParams, origin: Iterable[str]) -> str:
    body: dict[str, Any] = {"max-num-batched-tokens": params.b_max, "max-num-seqs": params.max_num_seqs}
    use = "A static budget needs no scheduler of ours: vllm serve MODEL --config vllm.yaml"
    if not params.is_static:
        body |= {"scheduler-cls": SCHEDULER_CLASS, "additional-config": {"ppas": params.to_dict()}}
        use = "With ppas-autotune installed beside vLLM: vllm serve MODEL --config vllm.yaml"
    return _header([*origin, use], params) + yaml.safe_dump(body, sort_keys=False)


def _own_env(
    params: PolicyParams,
    origin: Iterable[str],
    nearest: dict[Generation, tuple[PolicyParams, tuple[str, ...]]],
) -> str:
    lines = [*origin, "For vLLM with ppas-autotune installed beside it; published names where there is one."]
    for generation, (_, reasons) in nearest.items():
        if reasons:
            lines.append(
                f"NOT for the patched vLLM {generation}, which would run another setting: {'; '.join(reasons)}."
            )
            lines.append(f"  Use vllm-{generation}.env there.")
    return _env_text(params, environment(params), lines)


def _patch_env(
    params: PolicyParams,
    generation: Generation,
    origin: Iterable[str],
    near: PolicyParams,
    reasons: tuple[str, ...],
    ratio: float | None,
) -> str:
    lines = [*origin, f"For the published patch of vLLM {generation}."]
    if reasons:
        lines.append(f"The patch CANNOT express this setting: {'; '.join(reasons)}.")
        lines.append(f"Below is the nearest setting that it can: {near.label()}.")
        lines.append(_cost_line(ratio))
    else:
        lines.append("The patch expresses this setting exactly.")
    return _env_text(near, environment(near, generation), lines)


def _cost_line(ratio: float | None) -> str:
    if ratio is None:
        return "What that costs was not predicted."
    change = (ratio - 1) * 100
    word = "worse" if change > 0 else "better"
    return f"Predicted (simulated) cost: {abs(change):.1f} % {word} than the setting on the preferred objective."


def _env_text(params: PolicyParams, variables: dict[str, str], lines: list[str]) -> str:
    if variables:
        lines = [*lines, "Use: set -a; . ./THIS_FILE; set +a; vllm serve MODEL, with these flags:"]
    else:
        lines = [*lines, "A static budget: no variable, PPAS_ENABLED and PPAS_PLUS_ENABLED unset, and these flags:"]
    for name, value in variables.items():
        assert _SAFE_VALUE.fullmatch(value), f"{name} needs quoting"  # noqa: S101 - values are numbers and words of ours
    body = "".join(f"{name}={value}\n" for name, value in variables.items())
    return _header([*lines, f"flags {' '.join(server_flags(params))}"], params) + body


def _settings_json(
    results: StudyResults,
    setting: Setting,
    params: PolicyParams,
    nearest: dict[Generation, tuple[PolicyParams, tuple[str, ...]]],
    costs: dict[Generation, float | None],
) -> str:
    data = {
        "kind": KIND,
        "version": VERSION,
        "label": params.label(),
        "params": params.to_dict(),
        "params_digest": settings_digest(params),
        "created_at": now(),
        "made_by": {"ppas-autotune": __version__},
        "origin": str(results.origin),
        "study": {
            "name": results.name,
            "created_at": results.created_at,
            # The digest of results.json as `StudyResults.save` writes it.
            "digest": _sha256(dump_json(results.model_dump(mode="json")).encode()),
            "role": _role(results, setting),
            "choice": results.choice,
            "verdicts": _verdicts(results, setting),
            "not_identified": results.not_identified,
        },
        "measured_on": results.provenance.get("measured_on"),
        "versions": results.provenance.get("versions"),
        "traces": [{"name": t.name, "purpose": t.purpose, "digest": t.digest} for t in results.traces],
        "published_patches": {
            generation: {
                "exact": not reasons,
                "why_not": list(reasons),
                "nearest": near.to_dict(),
                "predicted_ratio": costs[generation],
            }
            for generation, (near, reasons) in nearest.items()
        },
    }
    return dump_json(data, indent=1) + "\n"


def _role(results: StudyResults, setting: Setting) -> str | None:
    """What the study calls the setting; None for one that it tried without quoting it, or never tried."""
    if setting.params == results.exported.params:
        return results.exported_role
    return next((held.role for held in results.held_out if held.setting.params == setting.params), None)


def _verdicts(results: StudyResults, setting: Setting) -> list[dict[str, str]]:
    """What the held-out traces say of the setting; empty when it was not compared there."""
    roles = {held.role for held in results.held_out if held.setting.params == setting.params}
    return [
        {"against": found.reference, "verdict": found.verdict, "sentence": found.sentence}
        for found in results.comparisons
        if found.candidate in roles
    ]


def _header(lines: Iterable[str], params: PolicyParams) -> str:
    return "".join(f"# {line}\n" for line in [*lines, f"settings {settings_digest(params)}"])


def _one_line(text: str) -> str:
    """`text` without what could end a comment or hide in a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


# Reading


def load_export(path: Path) -> PolicyParams:
    """The settings in one exported file: `vllm.yaml`, an `.env` file, or `settings.json`.

    Raises InvalidInput when it cannot be read, is no export, or was changed by hand since. Keys of `vllm serve` that
    were added to `vllm.yaml` are left alone.
    """
    readers: dict[str, Callable[[str], PolicyParams]] = {
        ".yaml": _read_yaml, ".yml": _read_yaml, ".env": _read_env, ".json": _read_json,
    }  # fmt: skip
    if path.suffix not in readers:
        raise InvalidInput(f"{path}: is no export; allowed: vllm.yaml, an .env file, or settings.json")
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: cannot be read: there is no such file; `ppas export` writes it") from None
    try:
        return readers[path.suffix](text)
    except ValueError as error:
        raise InvalidInput(f"{path}: is damaged: {_one_line(' '.join(str(error).split()))}; export again") from None
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


def settings_digest(params: PolicyParams) -> str:
    """The digest that exported files carry: SHA-256 over the settings as compact JSON with sorted keys."""
    return _sha256(json.dumps(params.to_dict(), sort_keys=True, separators=(",", ":")).encode())


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _checked(params: PolicyParams, digest: object) -> PolicyParams:
    if digest != settings_digest(params):
        raise InvalidInput("the settings do not match their digest: changed by hand, or damaged; export again")
    return params


def _checked_static(b_max: int, max_num_seqs: int, digest: str) -> PolicyParams:
    return _checked(PolicyParams.static(b_max, max_num_seqs=max_num_seqs), digest)


def _digest_in_comments(text: str) -> str:
    if (match := _DIGEST_LINE.search(text)) is None:
        raise InvalidInput("is no export of ppas-autotune: its line '# settings sha256:…' is missing; export again")
    return match[1]


def _read_yaml(text: str) -> PolicyParams:
    digest = _digest_in_comments(text)
    data = parse_yaml(text, "is damaged")
    if not isinstance(data, dict) or not {"max-num-batched-tokens", "max-num-seqs"} <= set(data):
        raise InvalidInput("max-num-batched-tokens and max-num-seqs must both be there; export again")
    b_max, max_num_seqs = data["max-num-batched-tokens"], data["max-num-seqs"]
    scheduler, extra = data.get("scheduler-cls"), data.get("additional-config")
    settings = extra.get("ppas") if isinstance(extra, dict) else None
    if scheduler is None and settings is None:
        return _checked_static(b_max, max_num_seqs, digest)
    if scheduler != SCHEDULER_CLASS:
        raise InvalidInput(f"scheduler-cls is {scheduler!r}; allowed: {SCHEDULER_CLASS}")
    if not isinstance(settings, dict):
        raise InvalidInput("additional-config has no settings under the key ppas; export again")
    params = PolicyParams.from_dict(settings)
    for key, found, wanted in (
        ("max-num-batched-tokens", b_max, params.b_max),
        ("max-num-seqs", max_num_seqs, params.max_num_seqs),
    ):
        if found != wanted:
            raise InvalidInput(f"{key} is {found!r}, the settings say {wanted}; export again")
    return _checked(params, digest)


def _read_env(text: str) -> PolicyParams:
    digest = _digest_in_comments(text)
    if (flags := _FLAGS_LINE.search(text)) is None:
        raise InvalidInput("its line '# flags --max-num-batched-tokens … --max-num-seqs …' is missing; export again")
    b_max, max_num_seqs = int(flags[1]), int(flags[2])
    variables = _variables(text)
    if not variables:
        return _checked_static(b_max, max_num_seqs, digest)
    params = params_from_environment(variables, EngineLimits(b_max, max_num_seqs))
    if params is None:
        raise InvalidInput("neither PPAS_ENABLED nor PPAS_PLUS_ENABLED is 1; export again")
    return _checked(params, digest)


def _variables(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _SAFE_VALUE.fullmatch(value):
            raise InvalidInput(f"line {line!r} is no NAME=VALUE with a plain value; export again")
        if name not in _VARIABLES:
            raise InvalidInput(f"unknown variable {name!r}{did_you_mean(name, _VARIABLES)}")
        if name in found:
            raise InvalidInput(f"{name} stands there twice; keep one")
        found[name] = value
    return found


def _read_json(text: str) -> PolicyParams:
    data = load_json(text)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InvalidInput(f"is no export of ppas-autotune (kind: {KIND!r})")
    if data.get("version") != VERSION:
        raise InvalidInput(f"has version {data.get('version')!r}; this release reads version {VERSION}")
    if not isinstance(data.get("params"), dict):
        raise InvalidInput("has no params; export again")
    return _checked(PolicyParams.from_dict(data["params"]), data.get("params_digest"))
