"""Writes docs/commands.md and docs/settings.md, the references of the command line and of a server's settings, from the code."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from autotune import settings as names_of_settings
from autotune.cli import app
from ppas_core.defaults import PUBLISHED, STATIC_BUDGETS
from ppas_core.policy import MAX_VALUE, PolicyParams
from ppas_core.vllm import control, steplog
from ppas_core.vllm.live import state_path, write_settings
from ppas_core.vllm.settings import EngineLimits, RuntimeOptions, params_from_environment

ROOT = Path(__file__).resolve().parents[1]
_NOTE = "This page is generated from the code (`scripts/write_reference.py`), and a test holds it current.\n\n"

_VARIABLES = {
    "PPAS_ENABLED": "`1` switches P-PAS on; not together with PPAS_PLUS_ENABLED",
    "PPAS_PLUS_ENABLED": "`1` switches P-PAS+ on",
    "PPAS_B_CAP": "b_cap; P-PAS+ needs it",
    "PPAS_LARGE_PREFILL_THRESHOLD": "t_large, P-PAS+ only",
    "PPAS_N_TH": "n_th",
    "PPAS_SCOPE": "`prefill` or `global`",
    "PPAS_DECODE_GUARD": "`1` switches the decode guard on",
    "PPAS_SETTINGS_FILE": "the live settings file, see below; its folder must exist, the file need not",
    "PPAS_STEP_LOG": "write a step log to this CSV file",
    "PPAS_STEP_LOG_MAX_BYTES": "size at which the step log rotates",
    "PPAS_HTTP_TOKEN": "the route `/ppas/settings` asks for this bearer token; `ppas tune --server-url` sends it",
}
"""What each variable of a server means; names and defaults are held against the code."""
_CLIENT_VARIABLES = {
    "PPAS_API_KEY": "the API key that `ppas replay`, and a study that joins a running server, send to vLLM",
    "PPAS_KEY_PASSPHRASE": "the passphrase of the private key that `ppas export --sign` signs with",
    "PPAS_STORAGE": "the URL of the database that several machines share, as `--storage` of `ppas tune` and `ppas worker`",
}


def commands_page() -> str:
    """docs/commands.md."""
    root: Any = typer.main.get_command(app)
    body = "".join(part for name in root.commands for part in _command(("ppas", name), root.commands[name]))
    head = f"# Commands\n\nEvery command explains itself with `--help`. {_NOTE}"
    listing = "".join(
        f"- [`{' '.join(path)}`](#{'-'.join(path)}): {_sentence(command)}\n"
        for path, command in _leaves(("ppas",), root)
    )
    return f"{head}{listing}\n{body}".rstrip() + "\n"


def _leaves(path: tuple[str, ...], group: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves((*path, name), command)
        else:
            yield (*path, name), command


def _command(path: tuple[str, ...], command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name in command.commands:
            yield from _command((*path, name), command.commands[name])
        return
    about = "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n"))
    yield f"## `{' '.join(path)}`\n\n{_plain(about)}\n\n"
    yield "| argument or option | default | meaning |\n|---|---|---|\n"
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            yield f"| {_named(parameter)} | {_default_of(parameter)} | {_cell(parameter.help or '')} |\n"
    yield "\n"


def _named(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(
        f"`{name}`" for name in sorted([*parameter.opts, *parameter.secondary_opts], key=len, reverse=True)
    )


def _default_of(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return f"`{value}`" if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "" else ""


def _sentence(command: Any) -> str:
    return _plain(" ".join((command.help or "").split("\n\n")[0].split()))


def settings_page() -> str:
    """docs/settings.md."""
    return "".join(
        (
            f"# Settings of the scheduler\n\n{_NOTE}",
            _policy(),
            _published(),
            _environment(),
            _runtime(),
            _live(),
            _step_log(),
        )
    )


def _policy() -> str:
    meaning = _documented(PolicyParams)
    rows = [
        f"| `{field.name}` | {_shown(field.default)} | {_cell(meaning[field.name])} |\n"
        for field in fields(PolicyParams)
    ]
    rules = _cell((PolicyParams.__doc__ or "").split("Raises InvalidSettings")[1])
    return (
        "## Policy\n\nOne complete setting; the keys of `additional-config: {ppas: {…}}`, of the settings file and of "
        f"`reference:` in a study file. Numbers are whole, from 1 to {MAX_VALUE:,}; b_cap must not exceed b_max, and "
        f"b_max not be below max_num_seqs.\n\n| key | default | meaning |\n|---|---|---|\n{''.join(rows)}\n"
        f"`scope` `prefill`: the budget bounds a step's prefill tokens, decodes come on top, within b_max as a whole. `global`: "
        f"it bounds all tokens of the step. `t_large` null is P-PAS, a number P-PAS+.\n\nA setting is refused {rules}\n\n"
    )


def _published() -> str:
    rows = "".join(f"| `{name}` | `{params.label()}` |\n" for name, params in PUBLISHED.items())
    budgets = ", ".join(f"`mbt-{budget}`" for budget in STATIC_BUDGETS)
    return (
        "## Names\n\nOn the command line and in study files a setting is "
        f"{_cell(names_of_settings.HELP)}.\n\n| published name | setting |\n|---|---|\n{rows}\n"
        f"The paper's static budgets: {budgets}.\n\n"
    )


def _environment() -> str:
    _held_against_the_code()
    limits = EngineLimits(startup_budget_tokens=16384, max_num_seqs=256)
    plain = _required(params_from_environment({"PPAS_ENABLED": "1"}, limits))
    capped = _required(params_from_environment({"PPAS_ENABLED": "1", "PPAS_B_CAP": "1024"}, limits))
    plus = _required(params_from_environment({"PPAS_PLUS_ENABLED": "1", "PPAS_B_CAP": "1024"}, limits))
    options = RuntimeOptions()
    defaults = {
        "PPAS_B_CAP": f"`{plain.b_cap}`",
        "PPAS_LARGE_PREFILL_THRESHOLD": f"`{plus.t_large}`",
        "PPAS_N_TH": f"`{plain.n_th}`",
        "PPAS_SCOPE": f"`{capped.scope}` where PPAS_B_CAP is set, else `{plain.scope}`",
        "PPAS_STEP_LOG_MAX_BYTES": f"`{options.step_log_max_bytes}`",
    }
    rows = "".join(f"| `{name}` | {defaults.get(name, 'none')} | {text} |\n" for name, text in _VARIABLES.items())
    client = "".join(f"| `{name}` | none | {text} |\n" for name, text in _CLIENT_VARIABLES.items())
    return (
        "## Environment of the server\n\nWhere vLLM was started without `--scheduler-cls` these variables put P-PAS in; b_max "
        "is then `--max-num-batched-tokens`. `additional-config` wins over them.\n\n"
        f"| variable | default | meaning |\n|---|---|---|\n{rows}\n"
        f"## Environment of the client\n\n| variable | default | meaning |\n|---|---|---|\n{client}\n"
    )


def _held_against_the_code() -> None:
    """Fails where the code reads a variable that the tables do not have, or the other way round."""
    sources = [path for package in ("ppas_core", "autotune") for path in (ROOT / package).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(PPAS_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    if wrong := read ^ {*_VARIABLES, *_CLIENT_VARIABLES}:
        sys.exit(f"scripts/write_reference.py and the code differ in the variables {', '.join(sorted(wrong))}")


def _required(params: PolicyParams | None) -> PolicyParams:
    assert params is not None
    return params


def _runtime() -> str:
    meaning = _documented(RuntimeOptions)
    rows = "".join(
        f"| `{field.name}` | {_shown(field.default)} | {_cell(meaning[field.name])} |\n"
        for field in fields(RuntimeOptions)
    )
    return (
        "## `additional-config: {ppas_runtime: {…}}`\n\nThe same without variables.\n\n"
        f"| key | default | meaning |\n|---|---|---|\n{rows}\n"
    )


def _live() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        write_settings(path, PUBLISHED["ppas"])
        example = json.dumps(json.loads(path.read_text(encoding="utf-8")))
        answer = state_path(path).name
    metrics = re.findall(
        r'(Counter|Gauge)MetricFamily\(\s*"(ppas_\w+)", "([^"]+)"',
        (ROOT / "ppas_core/vllm/metrics.py").read_text(encoding="utf-8"),
    )
    routes = re.findall(
        r'router\.(get|put)\(\s*"(/\w+)"', (ROOT / "ppas_core/vllm/routes.py").read_text(encoding="utf-8")
    )
    listed = ", ".join(f"`{method.upper()} /ppas{path}`" for method, path in routes)
    rows = "".join(f"| `{name}{'_total' * (kind == 'Counter')}` | {text} |\n" for kind, name, text in metrics)
    return (
        f'## The live settings file\n\n    {example}\n\n`version` must be higher at each change, `"ppas": null` switches off, '
        f"`max_num_seqs` may be left out. At most {control.MAX_SETTINGS_BYTES:,} bytes. The engine answers in `{answer}` beside "
        f"it, with the last {control.KEPT_ACKS} acknowledgements. The same by HTTP: {listed}. How and why: "
        "[live settings](decisions/vllm-live-settings.md).\n\n"
        f"With a settings file vLLM's `/metrics` also has:\n\n| metric | meaning |\n|---|---|\n{rows}\n"
    )


def _step_log() -> str:
    text = inspect.cleandoc(steplog.StepRow.__doc__ or "")
    columns = ", ".join(f"`{name}`" for name in steplog.StepRow._fields)
    about = _cell(text.split("\n\n", 1)[1])
    return f"## The step log\n\nColumns: {columns}.\n\n{about}\n"


def _documented(record: type[Any]) -> dict[str, str]:
    """Field to its meaning, from the record's docstring: `name: meaning.`"""
    names = [field.name for field in fields(record)]
    text = inspect.cleandoc(record.__doc__ or "").split("Raises ")[0]
    parts = re.split(rf"(?:^|\s)({'|'.join(names)}): ", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], (" ".join(part.split()) for part in parts[2::2]), strict=True))
    if missing := set(names) - set(found):
        sys.exit(f"the docstring of {record.__name__} does not say what {', '.join(sorted(missing))} means")
    return found


def _shown(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None:
        return "none"
    value = str(value) if isinstance(value, StrEnum) else value
    return f"`{json.dumps(value)}`".replace('"', "")


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _plain(text: str) -> str:
    return text.replace("*", "\\*")


PAGES = {ROOT / "docs/commands.md": commands_page, ROOT / "docs/settings.md": settings_page}

if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(any(path.read_text(encoding="utf-8") != page() for path, page in PAGES.items()))
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
