"""What a worker that died leaves in the storage, between any two of its writes, is put right by the next one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from shared_study import spec

from autotune import interrupt
from autotune.distributed.per_gpu import run_workers
from autotune.distributed.shared import MAX_DEATHS, SharedSearch
from autotune.distributed.url import StorageUrl
from autotune.distributed.work import Shared, SharedSearching
from autotune.measure import Measurement
from autotune.plan import Plan, make_plan
from autotune.progress import Silent
from autotune.runfolder import open_run
from autotune.study import Outcome, SearchTrial
from ppas_core.policy import PolicyParams

DIES = """
import os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from test_left_behind import joined, plan
with joined(plan(), Path(sys.argv[2]), Path(sys.argv[3])) as (study, search):
    if sys.argv[4] == "measuring":
        while True:
            search.take(
                lambda number, params: os.kill(os.getpid(), 9) if number == 0
                else study.outcome(f"trials/{number}", params)
            )
    else:
        search._finish = lambda number, outcome: os.kill(os.getpid(), 9)
        search.take(lambda number, params: study.outcome(f"trials/{number}", params))
"""


def plan() -> Plan:
    return make_plan(spec(trials=2))


class joined:  # noqa: N801 - reads as a context
    """A worker with the run folder `run` that has joined the study in the SQLite file `database`."""

    def __init__(self, plan: Plan, database: Path, run: Path) -> None:
        self._plan = plan
        self._where = StorageUrl.parse(f"sqlite:///{database}")
        self._opened = open_run(run, plan)

    def __enter__(self) -> tuple[Measurement, SharedSearch]:
        study = Measurement(self._plan, self._opened.__enter__(), Silent())
        shared = Shared(self._where, say=lambda text: None, heartbeat_s=0.2)
        return study, shared.search(study)

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(None, None, None)


def dies(database: Path, run: Path, when: str) -> None:
    """A worker that is killed while it measures the first trial, or after it stored its first measurement."""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", DIES, here, str(database), str(run), when],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((os.getcwd(), str(Path(here).parent)))}, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL


def take_all(study: Measurement, search: SharedSearch) -> dict[int, PolicyParams]:
    """Measures what is left; number to setting of what was measured here."""
    taken: dict[int, PolicyParams] = {}

    def measure(number: int, params: PolicyParams) -> Outcome:
        taken[number] = params
        return study.outcome(f"trials/{number}", params)

    while len(search.trials()) < search.total:
        search.take(measure)
    return taken


def first(trials: list[SearchTrial]) -> SearchTrial:
    return trials[0]


def test_a_setting_of_which_three_workers_died_counts_as_failed(tmp_path: Path) -> None:
    database = tmp_path / "s.db"
    for _ in range(MAX_DEATHS):  # the same worker again: it knows at once what it left
        dies(database, tmp_path / "deadly", "measuring")
    with joined(plan(), database, tmp_path / "deadly") as (study, search):
        taken = take_all(study, search)
        deadly = first(search.trials())
    assert deadly.number == 0
    assert deadly.outcome.reason == "3 workers died while they measured it"
    assert 0 not in taken
    assert len(search.trials()) == search.total


def test_a_measurement_that_a_dead_worker_stored_is_told_and_not_repeated(tmp_path: Path) -> None:
    database = tmp_path / "s.db"
    dies(database, tmp_path / "one", "told")
    with joined(plan(), database, tmp_path / "other") as (study, search):
        taken = take_all(study, search)
    assert 0 not in taken
    assert first(search.trials()).outcome.reason is None
    assert search.attempts()[0] == 1


def test_two_that_queue_the_same_retry_make_one_attempt(tmp_path: Path) -> None:
    database = tmp_path / "s.db"
    with (
        joined(plan(), database, tmp_path / "one") as (_, one),
        joined(plan(), database, tmp_path / "two") as (study, two),
    ):
        with pytest.raises(RuntimeError):
            one.take(lambda number, params: fail())
        # Both look before either writes: as two processes may.
        trials = one._study.get_trials(deepcopy=False)
        for search in (one, two):
            search._again(search._slots(trials)[0], trials[0])
        taken = take_all(study, two)
        done = [t for t in two._study.get_trials() if t.state == optuna.trial.TrialState.COMPLETE]
    assert sorted(taken) == list(range(two.total))
    assert len(done) == two.total
    assert two.attempts()[0] == 2


def test_a_trial_beyond_those_asked_for_is_taken_back_and_never_measured(tmp_path: Path) -> None:
    with joined(plan(), tmp_path / "s.db", tmp_path / "one") as (study, search):
        take_all(study, search)
        search.propose("predicted", plan().in_space[0][1])
        assert search.take(lambda number, params: fail()) is None
        assert len(search.trials()) == search.total


def fail() -> Outcome:
    raise RuntimeError("what measures broke")


@pytest.mark.parametrize(
    "write", ["create_new_trial", "set_trial_param", "set_trial_user_attr", "set_trial_state_values"]
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_interrupt_at_any_write_of_a_trial_leaves_none_half_taken_and_nobody_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, before: bool
) -> None:
    def torn(write: Callable[..., Any]) -> Callable[..., Any]:
        def through(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if before and len(calls) == at:
                os.kill(os.getpid(), signal.SIGINT)
            found = write(*args, **options)
            if not before and len(calls) == at:
                os.kill(os.getpid(), signal.SIGINT)
            return found

        return through

    database, planned = tmp_path / "shared.db", plan()
    known = len(planned.in_space)
    with joined(planned, database, tmp_path / "first") as (study, search):
        for _ in range(known):  # from here on the sampler draws
            search.take(lambda number, params: study.outcome(f"trials/{number}", params))
        for at in (1, 2, 3):
            calls: list[int] = []
            with monkeypatch.context() as during, interrupt.remembered():
                during.setattr(type(search._storage), write, torn(getattr(type(search._storage), write)))
                try:
                    search.take(lambda number, params: study.outcome(f"trials/{number}", params))
                except KeyboardInterrupt:
                    assert len(calls) >= at
                else:
                    assert len(calls) < at
            states = [trial.state.name for trial in search._study.get_trials(deepcopy=False)]
            assert "RUNNING" not in states
        take_all(study, search)
        assert all(trial.user_attrs.get("deaths", 0) == 0 for trial in search._study.get_trials(deepcopy=False))


def test_a_worker_that_its_parent_asks_to_end_as_slurm_did_gives_its_trial_back_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(number: int, params: PolicyParams) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)  # Slurm's, to every process of the job
        raise AssertionError("it ends the measuring at once")

    def through(storage: Any, trial_id: int, key: str, value: Any) -> None:
        if key == "released":
            os.kill(os.getpid(), signal.SIGTERM)  # and the parent's
        write(storage, trial_id, key, value)

    database = tmp_path / "s.db"
    with joined(plan(), database, tmp_path / "one") as (_, search):
        kind = type(search._storage)
        write = kind.set_trial_user_attr
        with monkeypatch.context() as during, interrupt.remembered():
            during.setattr(kind, "set_trial_user_attr", through)
            with pytest.raises(KeyboardInterrupt):
                search.take(ends)
        (trial,) = (t for t in search._study.get_trials(deepcopy=False) if t.state != optuna.trial.TrialState.WAITING)
        assert (trial.state.name, trial.user_attrs.get("released")) == ("FAIL", True)


def test_workers_of_one_host_are_ended_by_the_signal_that_may_come_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hear(line: str) -> None:
        heard.append(line)
        if line == "gpu 0: ready":
            os.kill(os.getpid(), signal.SIGTERM)

    heard: list[str] = []
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\ntrap 'echo SIGTERM; exit 0' TERM\ntrap 'echo SIGINT; exit 0' INT\necho ready\n"
        "while :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with interrupt.remembered(), pytest.raises(KeyboardInterrupt):
        run_workers({"0": []}, {}, hear)
    assert heard == ["gpu 0: ready", "gpu 0: SIGTERM"]


def test_a_measurement_that_came_too_late_leaves_the_run_folder_to_the_one_that_counts(tmp_path: Path) -> None:
    def is_overtaken(number: int, params: PolicyParams) -> Outcome:
        found = study.outcome(f"trials/{number}", params)
        if number == last:
            assert (folder / "requests.parquet").exists()
            other._study.tell(one._study.get_trials(deepcopy=False)[-1].number, state=optuna.trial.TrialState.FAIL)
            assert last in take_all(elsewhere, other)
        return found

    database = tmp_path / "s.db"
    with (
        joined(plan(), database, tmp_path / "one") as (study, one),
        joined(plan(), database, tmp_path / "other") as (elsewhere, other),
    ):
        last = one.total - 1
        folder = tmp_path / "one/trials" / str(last)
        for number in range(one.total):
            assert (one.take(is_overtaken) is None) == (number == last)
        done = SharedSearching(study, None, coordinates=True).search(one, one.total)
        for trial in done:
            kept = study.run.load_trial(f"trials/{trial.number}", trial.params)
            assert kept is not None
            assert kept.to_dict() == trial.outcome.to_dict()
            assert (tmp_path / "one/trials" / str(trial.number) / "requests.parquet").exists() == (trial.number != last)
