"""What the report quotes as it is: the exported setting, the commands, the study file, the provenance. Plain data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
    """A named value of the provenance, or a group of them. is_folded: a group that few readers open."""

    name: str
    text: str | None
    entries: tuple[Entry, ...] = ()
    is_folded: bool = False


_OF_SERVER: Final = {
    "max_num_batched_tokens": "budget that it was started with",
    "settings": "setting that it was started with",
    "kv_blocks": "KV blocks",
    "block_size": "tokens in a KV block",
    "start_s": "seconds to start",
}
"""What a server says of itself, named so that nobody takes it for what was tuned."""
_READ_BACK: Final = {
    "flags": "flags as the first server read them, its port among them",
    "cache": "cache configuration",
}
_OF_MACHINE: Final = {
    "cpu": "processor",
    "cores": "cores",
    "machine": "architecture",
    "gpus": "GPUs",
    "memory_gib": "memory, GiB",
}


def provenance(results: StudyResults) -> tuple[Entry, ...]:
    """The provenance but the commands and the study file, which stand apart: the machine first, vLLM's own last."""
    known = {k: v for k, v in results.provenance.items() if k not in (*_COMMAND_KEYS, "study")}
    measured_on = dict(_mapping(known.pop("measured_on", None)))
    platform = _mapping(known.pop("platform", None))
    server = _mapping(measured_on.pop("server", None))
    read_back = {name: server[key] for key, name in _READ_BACK.items() if server.get(key)}
    named = {_OF_SERVER.get(key, key): value for key, value in server.items() if key not in _READ_BACK}
    where = "machine of the tuner; the server was joined at its address" if measured_on.get("url") else "machine"
    if isinstance(flags := measured_on.get("flags"), list | tuple):
        measured_on["flags"] = shlex.join(map(str, flags))
    if "max_num_batched_tokens" in measured_on:  # of one server the largest that is searched
        measured_on["budget at the start"] = measured_on.pop("max_num_batched_tokens")
    loose = {key: known.pop(key) for key, value in list(known.items()) if not isinstance(value, Mapping)}
    groups = {
        where: {_OF_MACHINE.get(key, key): platform[key] for key in (*_OF_MACHINE, *platform) if key in platform},
        "measured on": {**measured_on, **({"server": named} if named else {})},
        **known,
        "search": loose,
    }
    shown = entries({name: value for name, value in groups.items() if value})
    folded = Entry("What vLLM said of itself", None, entries(read_back), is_folded=True)
    return (*shown, folded) if read_back else shown


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
