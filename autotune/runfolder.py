"""Where a study lives on disk, and whether a folder belongs to it.

    RUN/  study.yaml (as resolved)  identity.json  study.db  traces/
          trials/<n>/  references/<label>/  random/<n>/    settings.json, metrics.json, requests.parquet each; live
                             also replays.json (client lateness, acknowledgement) and steps.parquet
          finalists/<role>/  finalists/turns-*/ (live: each replay, for a process that goes on)
          results.json  report.html  export/  manifest.json (digests)
          progress.json      where the run stands, for `ppas status`
          servers/    logs, step logs and facts of a live study

A new folder is filled and locked beside its final place and renamed, so it exists whole or not at all. One process at a
time works in it: a lock on it is held until the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pandas as pd
from pydantic import ValidationError

from autotune.export.common import SIGNATURE_FILE
from autotune.plan import Plan
from autotune.records import Origin, Replay, request_table
from autotune.runversion import RUN_VERSION, check_run_version, require_readable_run
from autotune.spec import StudySpec, load_spec
from autotune.study import Outcome
from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams
from traces.format import write_trace

# What a resumed study may change: how it searches, how long, and how its results are read. The rest would mix
# measurements; a simulated study's profile is part of what it was measured on.
_MAY_CHANGE: Final = {
    "trials", "time_budget", "random_arm", "prefer", "protect", "tie_pct", "min_gain_pct", "confidence", "simulate",
    "race", "stop_early", "robustness_rates", "calibration", "profile", "stop_at_noise_pct",
}  # fmt: skip


_IDENTITY: Final = ("spec", "reference", "space", "traces", "measured_on")
_BEFORE_MEASURING: Final = {
    ".lock", "identity.json", "profile.json", "progress.json", "references", "servers", "study.yaml", "traces",
}  # fmt: skip
"""What a run folder holds before its search begins."""
MANIFEST: Final = "manifest.json"
NOT_IN_MANIFEST: Final = {
    ".lock", MANIFEST, "progress.json", "study.db", "study.db-wal", "study.db-shm", SIGNATURE_FILE,
}  # fmt: skip
"""A signature is of the manifest, so the manifest cannot hold it."""


class RunFolder:
    """The folder of one study. Make it with `open_run`, or `existing_run` to only read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "study.db"
        self.results = path / "results.json"
        self.report = path / "report.html"
        self.export = path / "export"

    def spec(self) -> StudySpec:
        """The study as resolved. Raises InvalidInput."""
        return load_spec(self.path / "study.yaml")

    def save_trial(self, folder: str, params: PolicyParams, outcome: Outcome, replays: Sequence[Replay]) -> None:
        """Keeps one tried setting under `folder`, such as `trials/12`: settings, metrics and every request."""
        target = self.path / folder
        target.mkdir(parents=True, exist_ok=True)
        _write_json(target / "settings.json", params.to_dict())
        if replays:
            self.save_requests(folder, replays)
        _write_json(target / "metrics.json", outcome.to_dict())

    def save_requests(self, folder: str, replays: Sequence[Replay]) -> None:
        """Keeps every request of `replays` as Parquet under `folder`; of live ones also the engine's steps, where they are
        known, and `replays.json`: how late the client was, and the engine's acknowledgement of the settings.
        """
        target = self.path / folder
        target.mkdir(parents=True, exist_ok=True)
        _write_parquet(request_table(replays), target / "requests.parquet")
        if entries := [_about(replay) for replay in replays if replay.origin is Origin.LIVE]:
            _write_json(target / "replays.json", entries)
        steps = [replay.steps.assign(trace=replay.trace_name) for replay in replays if replay.steps is not None]
        if steps:
            _write_parquet(pd.concat(steps, ignore_index=True), target / "steps.parquet")

    def copy_trial(self, source: str, folder: str) -> None:
        """Has `folder` hold what `source` holds."""
        shutil.copytree(self.path / source, self.path / folder, dirs_exist_ok=True)

    def forget_trial(self, folder: str) -> None:
        """Removes what `save_trial` kept under `folder`, so that it is measured anew."""
        _remove(self.path / folder)

    def load_trial(self, folder: str, params: PolicyParams) -> Outcome | None:
        """What `save_trial` kept of this setting under `folder`; None where it kept nothing, or of another setting."""
        target = self.path / folder
        try:
            settings = load_json((target / "settings.json").read_bytes())
            measured = load_json((target / "metrics.json").read_bytes())
            return Outcome.from_dict(measured) if settings == params.to_dict() else None
        except (OSError, ValueError):
            return None

    def write_manifest(self) -> None:
        """Digests of every file but the database, the lock, the progress and what a killed process left unfinished."""
        digests = {
            str(file.relative_to(self.path)): f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
            for file in sorted(self.path.rglob("*"))
            if file.is_file() and file.suffix != ".tmp" and file.name not in NOT_IN_MANIFEST
        }
        _write_json(self.path / MANIFEST, {"version": 1, "files": digests})


def identity(plan: Plan) -> dict[str, Any]:
    """What must not change while a study grows, as plain JSON values: what the files say that it names, not their names."""
    parts = {
        "spec": _fixed_keys(plan.spec),
        "reference": plan.reference.to_dict(),
        "space": plan.space.describe(),
        "traces": [trace.digest for trace in (*plan.tuning, *plan.held_out)],
        "measured_on": plan.evaluator.identity(),
    }
    identical: dict[str, Any] = load_json(dump_json(parts))
    return identical


def _fixed_keys(spec: StudySpec) -> dict[str, Any]:
    fixed = {key: value for key, value in spec.model_dump(mode="json").items() if key not in _MAY_CHANGE}
    if fixed["server"] is not None:
        del fixed["server"]["memory_reserve_gib"]  # says when a server is started anew, not what it is
    return fixed


@contextlib.contextmanager
def open_run(path: Path, plan: Plan) -> Iterator[RunFolder]:
    """The run folder at `path` for this plan, new or continued, locked for as long as the context lasts.

    A run in which nothing was measured yet, since its study could not start, gives way to a corrected one. Raises
    InvalidInput, touching nothing, when `path` holds something else or another study, or is in use.
    """
    wanted = identity(plan)
    if os.path.exists(path) and _gives_way(path, wanted):
        with _locked(path):
            _remove(path)
    with contextlib.ExitStack() as lock:
        if os.path.exists(path) or not _create(path, plan, wanted, lock):
            _check_same_study(path, wanted)
            lock.enter_context(_locked(path))
        write_atomically(path / "study.yaml", plan.resolved_spec().to_yaml().encode())
        yield RunFolder(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the folder's lock; the lock file is opened as it is: no link is followed, nothing in it is changed."""
    file = path / ".lock"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise InvalidInput(f"{file}: cannot be opened as a lock: {error.strerror}; remove it") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidInput(f"{file}: is no regular file; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput(
                f"{path}: another ppas process is working in this run folder; wait for it, or stop it"
            ) from None
        yield
    finally:
        os.close(descriptor)


def existing_run(path: Path) -> RunFolder:
    """The run folder at `path`, to read. Raises InvalidInput when it is none, or one of a newer release."""
    if not os.path.isfile(path / "identity.json"):
        raise InvalidInput(f"{path}: is not a run folder; `ppas tune STUDY.yaml` makes one under runs/")
    require_readable_run(path)
    return RunFolder(path)


def folder_name(label: str) -> str:
    """A setting's label as a file name: every other character becomes '-'."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


def require_room_for(plan: Plan, path: Path) -> None:
    """Raises InvalidInput where `path` holds something else or another study, as `open_run` does; touches nothing."""
    if os.path.exists(path):
        _gives_way(path, identity(plan))


def _gives_way(path: Path, wanted: dict[str, Any]) -> bool:
    """Whether `path` is of another study in which nothing was measured. Raises InvalidInput for one that is to stay."""
    try:
        _check_same_study(path, wanted)
        return False
    except InvalidInput:
        if not _measured_nothing(path):
            raise
        return True


def _create(path: Path, plan: Plan, wanted: dict[str, Any], lock: contextlib.ExitStack) -> bool:
    """Makes the run folder, whose lock `lock` holds before anybody can see it; False where another process was quicker."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        unfinished.mkdir(parents=True)
        write_atomically(unfinished / "study.yaml", plan.resolved_spec().to_yaml().encode())
        _write_json(unfinished / "identity.json", {"version": RUN_VERSION, **wanted})
        for name, trace in plan.trace_files().items():
            write_trace(trace, unfinished / "traces" / name)
        if plan.profile_file is not None:
            write_atomically(unfinished / "profile.json", plan.profile_file.read_bytes())
        lock.enter_context(_locked(unfinished))
        unfinished.rename(path)
        return True
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        lock.close()
        _remove(unfinished)
        if not os.path.exists(path):
            raise InvalidInput(f"{path}: the run folder cannot be made: {error}") from None
        return False
    except BaseException:
        _remove(unfinished)
        raise


def _measured_nothing(path: Path) -> bool:
    """Whether `path` is a run folder of ours, with nothing of anybody else in it, and without any measurement."""
    try:
        found = load_json((path / "identity.json").read_bytes())
        strangers = {file.name for file in path.iterdir()} - _BEFORE_MEASURING
    except (OSError, ValueError):
        return False
    ours = isinstance(found, dict) and found.keys() - {"version"} == set(_IDENTITY) and not strangers
    return ours and not any(path.glob("*/*/requests.parquet"))


def _remove(folder: Path) -> None:
    with contextlib.suppress(ValueError):
        shutil.rmtree(folder, ignore_errors=True)


def _check_same_study(path: Path, wanted: dict[str, Any]) -> None:
    file = path / "identity.json"
    if not file.is_file():
        raise InvalidInput(f"{path}: exists and is not a run folder; name another with --run, or move it away")
    try:
        found = load_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file}: cannot be read: {error}; name another folder with --run") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{file}: does not hold what ppas wrote there; name another folder with --run")
    check_run_version(path, found)
    found.pop("version", None)
    with contextlib.suppress(ValidationError):  # an earlier release knew fewer keys: they had today's default
        found["spec"] = load_json(dump_json(_fixed_keys(StudySpec.model_validate(found.get("spec")))))
    if found == wanted:
        return
    for part in _IDENTITY:
        if found.get(part) != wanted[part]:
            raise InvalidInput(
                f"{path}: holds another study ({_difference(part, found.get(part), wanted[part])}); "
                "name another folder with --run, or change the study's name"
            )


def _difference(part: str, found: object, wanted: object) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in wanted:
            if found.get(key) != wanted[key]:
                return f"{key} is {found.get(key)!r} there, {wanted[key]!r} here"
    return f"its {part} differ"


def _about(replay: Replay) -> dict[str, Any]:
    return {
        "trace": replay.trace_name,
        "client": None if replay.client is None else asdict(replay.client),
        "ack": replay.ack,
        "branch_steps": dict(replay.branch_steps),
    }


def _write_json(path: Path, data: Any) -> None:
    write_atomically(path, dump_json(data, indent=1).encode() + b"\n")


def _write_parquet(table: pd.DataFrame, path: Path) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    table.to_parquet(temporary, index=False)
    temporary.replace(path)
