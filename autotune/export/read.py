"""Reading an exported file back: the settings in it, refused where they were changed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from autotune.export.common import KIND, SAFE_VALUE, SCHEDULER_CLASS, VERSION, one_line, settings_digest
from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean
from ppas_core.plain_json import load_json
from ppas_core.policy import PolicyParams
from ppas_core.versions import require_version
from ppas_core.vllm.settings import EngineLimits, params_from_environment
from search_spaces.yaml_file import parse_yaml, read_text

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
        raise InvalidInput(f"{path}: is damaged: {one_line(' '.join(str(error).split()))}; export again") from None
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


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
        if not equals or not SAFE_VALUE.fullmatch(value):
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
    require_version("export", data.get("version"), VERSION, again="export again with `ppas export RUN`")
    if not isinstance(data.get("params"), dict):
        raise InvalidInput("has no params; export again")
    return _checked(PolicyParams.from_dict(data["params"]), data.get("params_digest"))
