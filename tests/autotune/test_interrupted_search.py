"""What an interrupt leaves of a search on one machine: every finished trial, under its own number, and a run that goes on."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_study import small, write_study
from terminal import COMMAND, ENVIRONMENT

from autotune import interrupt
from autotune.plan import Plan, make_plan
from autotune.runfolder import RunFolder
from autotune.study import Search
from autotune.tune import tune

LAST = 5
"""The trial in which the interrupt comes."""


def planned() -> Plan:
    """With a known setting outside the space, which takes the number after the last trial."""
    return make_plan(small(static_budgets=[700, 2048], robustness_rates=[]))


def calls(function: Callable[..., Any], signals: Callable[..., bool], number: signal.Signals) -> Callable[..., Any]:
    """`function`, with a signal after the call of which `signals` says so."""

    def through(*args: Any) -> Any:
        found = function(*args)
        if signals(*args):
            os.kill(os.getpid(), number)
        return found

    return through


@pytest.mark.parametrize("told", [True, False], ids=["while it is told", "after it was kept, before it is told"])
def test_ctrl_c_at_the_end_of_a_trial_gives_no_other_setting_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    plan, run = planned(), tmp_path / "run"
    with monkeypatch.context() as during, interrupt.remembered():
        if told:
            write = calls(Search._write, lambda _, trial, *__: bool(trial.number == LAST), signal.SIGINT)
            during.setattr(Search, "_write", write)
        else:
            save = calls(RunFolder.save_trial, lambda _, folder, *__: bool(folder == f"trials/{LAST}"), signal.SIGINT)
            during.setattr(RunFolder, "save_trial", save)
        results = tune(plan, run)
    measured = LAST + 1 if told else LAST
    assert f"Ctrl-C ended the search after {measured} of" in " ".join(results.warnings)
    assert len(plan.outside) == 1
    assert len(results.trials) == measured + len(plan.outside)
    kept = {int(folder.name): json.loads((folder / "settings.json").read_text()) for folder in run.glob("trials/*")}
    assert kept == {trial.number: trial.setting.to_params().to_dict() for trial in results.trials[:measured]}
    if not told:  # it is measured again, under the number that it had
        again = tune(plan, run)
        assert len(again.trials) == len(plan.in_space) + plan.spec.trials + len(plan.outside)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_process_concludes_nothing_and_keeps_every_finished_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    plan, run = planned(), tmp_path / "run"
    with monkeypatch.context() as during, interrupt.remembered():
        write = calls(Search._write, lambda _, trial, *__: bool(trial.number == LAST), number)
        during.setattr(Search, "_write", write)
        with pytest.raises(KeyboardInterrupt):
            tune(plan, run)
    assert not (run / "results.json").exists()
    kept = {folder.name: (folder / "metrics.json").read_bytes() for folder in run.glob("trials/*")}
    assert len(kept) == LAST + 1
    tune(plan, run)
    assert {name: (run / "trials" / name / "metrics.json").read_bytes() for name in kept} == kept


def test_a_terminal_that_hangs_up_ends_a_study_as_interrupted(tmp_path: Path) -> None:
    write_study(tmp_path, trials=100_000)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "tune", "study.yaml", "--run", "run"], cwd=tmp_path, env=ENVIRONMENT,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    try:
        screen = b""
        while b"best so far" not in screen:
            screen += os.read(ours, 65536)
        os.close(ours)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    assert json.loads((tmp_path / "run/progress.json").read_text())["state"] == "interrupted"
    assert not (tmp_path / "run/results.json").exists()
