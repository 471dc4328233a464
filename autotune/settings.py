"""How a person names one scheduler setting on the command line or in a study file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ppas_core import defaults
from ppas_core.errors import InvalidInput
from ppas_core.naming import nearest
from ppas_core.plain_json import load_json
from ppas_core.policy import DEFAULT_MAX_NUM_SEQS, PolicyParams, Scope

HELP: Final = (
    f"a published name ({', '.join(defaults.PUBLISHED)}), mbt-2048 for a static budget, N_TH/B_MAX/B_CAP as in "
    "2/16384/2048 with further parts as tables show them (/T32768 for P-PAS+, /prefill or /global, /s20 for "
    "max_num_seqs, /guard), or a file: settings as JSON or YAML, or an export"
)

_SHOWN = 80
"""Characters of what was given that a message repeats."""
_LABEL = re.compile(
    r"(?:mbt-(?P<static>[0-9]{1,30})|(?P<n_th>[0-9]{1,30})/(?P<b_max>[0-9]{1,30})/(?P<b_cap>[0-9]{1,30})"
    r"(?:[/ ]T?(?P<t_large>[0-9]{1,30}))?(?:[/ ](?P<scope>prefill|global))?(?P<guard>[/ ]guard)?)(?:[/ ]s(?P<seqs>[0-9]{1,30}))?"
)


def parse_setting(source: str | Mapping[str, Any]) -> PolicyParams:
    """The setting that `source` names; see HELP. Raises InvalidInput, or InvalidSettings for values out of range."""
    if isinstance(source, Mapping):
        return PolicyParams.from_dict(dict(source))
    if source in defaults.PUBLISHED:
        return defaults.published(source)
    if match := _LABEL.fullmatch(source):
        return _from_label(match)
    path = Path(source)
    if path.suffix == ".env":
        return _from_export(path)
    if path.suffix in {".json", ".yaml", ".yml"}:
        return _read_settings(path)
    hint = nearest(source, defaults.PUBLISHED)
    shown = source if len(source) <= _SHOWN else f"{source[:_SHOWN]}…"
    raise InvalidInput(f"{shown!r} is no setting{f'; did you mean {hint!r}?' if hint else ''}; give {HELP}")


def _from_label(match: re.Match[str]) -> PolicyParams:
    numbers = {name: int(text) for name, text in match.groupdict().items() if text and text.isdigit()}
    max_num_seqs = numbers.get("seqs", DEFAULT_MAX_NUM_SEQS)
    if "static" in numbers:
        return PolicyParams.static(numbers["static"], max_num_seqs=max_num_seqs)
    t_large = numbers.get("t_large")
    return PolicyParams(
        b_max=numbers["b_max"],
        b_cap=numbers["b_cap"],
        n_th=numbers["n_th"],
        t_large=t_large,
        scope=Scope(match["scope"] or ("global" if t_large else "prefill")),
        max_num_seqs=max_num_seqs,
        decode_guard=match["guard"] is not None,
    )


def _read_settings(path: Path) -> PolicyParams:
    from search_spaces.yaml_file import parse_yaml, read_text

    try:
        text = read_text(path)
        data = load_json(text) if path.suffix == ".json" else parse_yaml(text, str(path))
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file; a setting is {HELP}") from None
    except ValueError as error:
        raise InvalidInput(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: is not a mapping of settings such as b_max: 16384")
    if not {"b_max", "b_cap"} & set(data):
        return _from_export(path)
    try:
        return PolicyParams.from_dict(data)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


def _from_export(path: Path) -> PolicyParams:
    from autotune.export import load_export  # loads numpy and pandas, which most settings do not need

    return load_export(path)
