"""Writes docs/study-file.md, the reference of study files, from the code that checks them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from autotune.metrics import METRICS
from autotune.spec import LimitsSpec, ServerSpec, StudySpec
from autotune.workloads import Heterogeneous, RagBursts, TraceFiles
from ppas_core.sim.profile import profile_names
from search_spaces.space import Space, preset_names

TARGET = Path(__file__).resolve().parents[1] / "docs" / "study-file.md"

_HEAD = """# The study file

A study file is YAML; `examples/demo.yaml` is a commented one. Mistyped keys are refused, with the right name.
These tables are generated from the code (`scripts/write_study_reference.py`), and a test holds them current.

"""


def render() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        _section("Keys", StudySpec),
        _section("`workload` with `family: rag-bursts`", RagBursts),
        _section("`workload` with `family: heterogeneous`", Heterogeneous),
        _section("`workload` with `family: files`", TraceFiles),
        _section("`limits`", LimitsSpec),
        _section("`server`", ServerSpec),
        _section("`space`, when written out or over a preset", Space),
        f"## Names\n- Metrics: {_names(METRICS)}\n- Simulator profiles: {_names(profile_names())}\n"
        f"- Space presets: {_names(preset_names())}\n",
    ]
    return "".join(parts)


def _section(title: str, model: type[BaseModel]) -> str:
    rows = [
        f"| `{field.alias or name}` | {_default(field.default)} | {_cell(field.description or '')} |"
        for name, field in model.model_fields.items()
    ]
    about = _cell((model.__doc__ or "").split("\n\n")[0])
    return "\n".join([f"## {title}", about, "", "| key | default | meaning |", "|---|---|---|", *rows, "", ""])


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
        if isinstance(value, dict) and value.get("low", 0) == value.get("high"):  # a range of one is a fixed value
            value = value["low"]
    if value is None or value in ((), {}, ""):
        return "none"
    value = list(value) if isinstance(value, tuple) else value
    return f"`{json.dumps(value, ensure_ascii=False)}`".replace("|", "\\|").replace('"', "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(TARGET.read_text(encoding="utf-8") != render())
    TARGET.write_text(render(), encoding="utf-8")
