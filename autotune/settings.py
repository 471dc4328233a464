"""How a person names one scheduler setting on the command line or in a study file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from autotune.export import load_export
from ppas_core import defaults
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams, Scope

HELP: Final = (
    "a published name (ppas, ppas-plus-qwen3.8-27b, …), mbt-2048 for a static budget, N_TH/B_MAX/B_CAP with optional "
    "/T_LARGE and /prefill or /global as in 2/16384/2048/prefill, or a file: settings as JSON or YAML, or an export"
)

_STATIC = re.compile(r"mbt-(\d+)")
_COMPACT = re.compile(r"(\d+)/(\d+)/(\d+)(?:/(\d+))?(?:/(prefill|global))?")


def parse_setting(source: str | Mapping[str, Any]) -> PolicyParams:
    """The setting that `source` names; see HELP. Raises InvalidInput, or InvalidSettings for values out of range."""
    if isinstance(source, Mapping):
        return PolicyParams.from_dict(dict(source))
    if source in defaults.PUBLISHED:
        return defaults.published(source)
    if match := _STATIC.fullmatch(source):
        return PolicyParams.static(int(match[1]))
    if match := _COMPACT.fullmatch(source):
        n_th, b_max, b_cap = (int(match[group]) for group in (1, 2, 3))
        t_large = int(match[4]) if match[4] else None
        scope = Scope(match[5]) if match[5] else (Scope.GLOBAL if t_large else Scope.PREFILL)
        return PolicyParams(b_max=b_max, b_cap=b_cap, n_th=n_th, t_large=t_large, scope=scope)
    path = Path(source)
    if path.suffix == ".env":
        return load_export(path)
    if path.suffix in {".json", ".yaml", ".yml"}:
        return _read_settings(path)
    raise InvalidInput(f"{source!r} is no setting; give {HELP}")


def _read_settings(path: Path) -> PolicyParams:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file; a setting is {HELP}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: is not a mapping of settings such as b_max: 16384")
    if not {"b_max", "b_cap"} & set(data):
        return load_export(path)
    try:
        return PolicyParams.from_dict(data)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
