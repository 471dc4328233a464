"""What the report quotes as it is: the exported setting, the commands, the study file, the provenance. Plain data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from autotune.export import environment, server_flags, vllm_config_text
from autotune.export.deploy import Deployment
from autotune.results import StudyResults
from ppas_core.errors import InvalidInput
from reports import roles
from reports.numbers import NONE, cleaned

_COMMAND_KEYS = ("install", "commands", "command", "command_line", "reproduce")


def commands(results: StudyResults) -> list[str]:
    """The command lines that the provenance records, in order."""
    found: list[str] = []
    for key in _COMMAND_KEYS:
        value = results.provenance.get(key)
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list | tuple):
            texts = [str(v) for v in value]
            found += texts if key in ("commands", "reproduce") else [shlex.join(texts)]
    return [cleaned(line, 1000) for line in found]


def study_file(results: StudyResults) -> str | None:
    """The study as it was resolved, as YAML that can be run again; None when it is not recorded."""
    study = results.provenance.get("study")
    if not isinstance(study, Mapping):
        return None
    return yaml.safe_dump(dict(study), sort_keys=False, allow_unicode=True, width=100)


@dataclass(frozen=True, slots=True)
class Snippet:
    """The exported setting in one form to paste. id: in the page; use: where it goes, for people."""

    id: str
    name: str
    use: str
    text: str


def snippets(results: StudyResults) -> tuple[Snippet, ...]:
    """The exported setting as a vLLM config file, as environment and flags, as commands name it, and as JSON.

    JSON alone where its values are none that the scheduler would take. A static budget without knobs that do nothing.
    """
    values = json.dumps(roles.acting_params(results.exported), indent=2, ensure_ascii=False)
    plain = Snippet("json", "JSON", "For a setting file, or the field ppas of a live settings file.", values)
    try:
        params = results.exported.to_params()
    except InvalidInput:
        return (plain,)
    server = Deployment.of(results)
    command = cleaned(shlex.join(["vllm", "serve", "MODEL", *server_flags(params), *server.flags]), 4000)
    config = cleaned(shlex.join(["vllm", "serve", "MODEL", "--config", "vllm.yaml", *server.beside]), 1000)
    lines = [f"{name}={value}" for name, value in environment(params).items()]
    beside = "" if params.is_static else " Needs ppas-autotune beside vLLM."
    return (
        Snippet("yaml", "vllm.yaml", f"Start: {config}.{beside}", vllm_config_text(params, server.flags)),
        Snippet(
            "env",
            "Environment",
            "A static budget needs flags alone." if params.is_static else f"Variables and flags, for a shell.{beside}",
            "\n".join([*(f"export {line}" for line in lines), command]) + "\n",
        ),
        Snippet("name", "Name", "For ppas compare, simulate and sweep.", params.label().replace(" ", "/")),
        plain,
    )


def digests(results: StudyResults) -> list[str]:
    """The digest of every trace and its name, a line each, as `sha256sum` writes them."""
    return [f"{cleaned(trace.digest)}  {cleaned(trace.name)}" for trace in results.traces]


@dataclass(frozen=True, slots=True)
class Entry:
    """A named value of the provenance, or a group of them."""

    name: str
    text: str | None
    entries: tuple[Entry, ...] = ()


def provenance(results: StudyResults) -> tuple[Entry, ...]:
    """The provenance but the commands and the study file, which stand apart."""
    return entries({k: v for k, v in results.provenance.items() if k not in (*_COMMAND_KEYS, "study")})


def entries(data: Mapping[str, Any], depth: int = 0) -> tuple[Entry, ...]:
    """Nested plain data as named entries, groups last; lists of plain values on one line."""
    made = tuple(_entry(cleaned(name, 80), value, depth) for name, value in data.items())
    return tuple(sorted(made, key=lambda entry: entry.text is None))


def _entry(name: str, value: Any, depth: int) -> Entry:
    if isinstance(value, Mapping) and value and depth < 6:
        return Entry(name, None, entries(value, depth + 1))
    if isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
        return Entry(name, None, entries({str(i + 1): v for i, v in enumerate(value)}, depth + 1))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Entry(name, ", ".join(cleaned(v, 120) for v in value) or NONE)
    if isinstance(value, float):
        return Entry(name, f"{value:.6g}")
    return Entry(name, NONE if value is None or value == {} else cleaned(value, 2000))
