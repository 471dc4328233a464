"""A study that several processes share, and a look at its trials."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from small_study import SMALL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from autotune.distributed.url import VARIABLE, StorageUrl
from autotune.spec import StudySpec, parse_spec

STUDY: dict[str, Any] = {**SMALL, "name": "shared"}


def spec(**changes: object) -> StudySpec:
    return parse_spec({**STUDY, **changes}, "test")


def write(folder: Path, **changes: object) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return path


class Process:
    """A `ppas worker`, or `ppas tune`, of its own, with what it said in a file."""

    def __init__(self, study: Path, storage: str, run: Path, *options: str, command: str = "worker") -> None:
        self.run = run
        self.log = run.with_name(f"{run.name}.log")
        words = [sys.executable, "-m", "autotune.entry", command, str(study), "--run", str(run), "--quiet", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, env={**os.environ, VARIABLE: storage}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def name(self) -> str:
        """What its trials call it."""
        return (self.run / "worker.txt").read_text().strip()

    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Trials:
    """The trials of the study as the storage has them."""

    def __init__(self, url: str, name: str = "shared") -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._url = StorageUrl.parse(url).full
        self._name = name
        self._storage: RDBStorage | None = None

    def all(self) -> list[FrozenTrial]:
        if (
            self._storage is None
        ):  # made once: that takes longer than a trial. Its server may end: no connection is kept
            self._storage = RDBStorage(self._url, engine_kwargs={"poolclass": NullPool})
        return optuna.load_study(study_name=self._name, storage=self._storage).get_trials(deepcopy=False)

    def begun(self, owner: str) -> bool:
        """Whether the worker ever took a trial."""
        return any(trial.user_attrs.get("owner") == owner for trial in self.all())

    def running(self, owner: str) -> list[FrozenTrial]:
        """Trials that the worker measures at present, and has not measured yet."""
        return [
            trial
            for trial in self.all()
            if trial.state == optuna.trial.TrialState.RUNNING
            and trial.user_attrs.get("owner") == owner
            and "settings" in trial.user_attrs
            and "measured" not in trial.user_attrs
        ]

    def by(self, owner: str) -> list[FrozenTrial]:
        """Finished trials that the worker measured."""
        return [trial for trial in self.done() if trial.user_attrs.get("owner") == owner]

    def done(self) -> list[FrozenTrial]:
        return [trial for trial in self.all() if trial.state == optuna.trial.TrialState.COMPLETE]


def stop_in_mid_trial(worker: Process, trials: Trials, *, measuring: bool = False) -> int:
    """Halts the worker (SIGSTOP) while it has a trial that it did not tell; the number of its trial.

    measuring: of a lone worker, whose trials' numbers are those of its folders: it has not written the trial down either,
    so what it does is measure.
    """
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        worker.process.send_signal(signal.SIGSTOP)  # so that what the storage says of it stays true
        if found := trials.running(worker.name):
            number = found[0].number
            if not (measuring and (worker.run / f"trials/{number}/metrics.json").exists()):
                return number
        worker.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("the worker was never seen in a trial")


def wait_until(what: str, holds: Callable[[], bool], *, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if holds():
                return
        except (KeyError, FileNotFoundError, SQLAlchemyError, StorageInternalError):
            pass  # nobody has begun yet
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
