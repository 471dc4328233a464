"""A commented study file from a few answers. The comments are the descriptions of the keys in the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml
from pydantic import BaseModel

from autotune.spec import ServerSpec, StudySpec
from autotune.workloads import WORKLOADS

_WIDTH: Final = 10_000
_MORE: Final = {
    "time_budget": "45m",
    "protect": "all",
    "limits": {"ttft_s": 2.0},
    "random_arm": True,
    "confidence": 0.95,
    "min_gain_pct": 1.0,
}
"""Keys that a file may want later, each with an example; they stand in it as comments."""
_MORE_OF_SERVER: Final = {
    "vocabulary_size": 32_000,
    "start_timeout": "15m",
    "request_timeout": "10m",
    "max_send_lag_ms": 5.0,
}


def study_file(answers: Mapping[str, Any], command: str, about: Sequence[str] = ()) -> str:
    """The study file that says `answers`, every key explained; keys that were not asked for follow as comments.

    answers: as in a study file. command: how to run it, about: what else is worth knowing, for the head.
    """
    lines = [
        "# A study for ppas-autotune, made by `ppas init`. All keys: docs/study-file.md",
        f"# Run it with: {command}",
        *(f"# {line}" for line in about),
    ]
    for key, value in answers.items():
        lines += ["", f"# {_description(StudySpec, key)}"]
        if key == "workload":
            lines += _block("workload", value, WORKLOADS[value["family"]], {})
        elif key == "server":
            lines += _block("server", value, ServerSpec, _MORE_OF_SERVER)
        else:
            lines.append(f"{key}: {_flow(value)}")
    lines += ["", "# What else it could say, each with an example:"]
    for key, value in _MORE.items():
        if key not in answers:
            lines += [f"# {key}: {_flow(value)}", f"#   {_description(StudySpec, key)}"]
    return "\n".join(lines) + "\n"


def _block(name: str, values: Mapping[str, Any], model: type[BaseModel], more: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}:"
    for key, value in values.items():
        yield f"  # {_description(model, key)}"
        yield f"  {key}: {_flow(value)}"
    for key, value in more.items():
        if key not in values:
            yield f"  # {key}: {_flow(value)}"
            yield f"  #   {_description(model, key)}"


def _description(model: type[BaseModel], key: str) -> str:
    return model.model_fields[key].description or key


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=_WIDTH)
    return text.removesuffix("\n").removesuffix("\n...")
