"""Who takes part in a shared study, and what a storage of another kind changes: nothing."""

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from postgres import Postgres, started_on_a_free_port
from shared_study import STUDY, Process, Trials, spec, stop_in_mid_trial, wait_until, write

from autotune.cli.pipeline import run_study
from autotune.distributed.agreement import fingerprint
from autotune.distributed.per_gpu import parse_gpus, run_workers
from autotune.distributed.shared import rebased
from autotune.distributed.storage import Patience, open_storage
from autotune.distributed.url import VARIABLE, StorageUrl
from autotune.distributed.work import Shared, work
from autotune.evaluate import SimulatedEvaluator
from autotune.plan import make_plan
from autotune.progress import Silent
from autotune.study import Outcome, SearchTrial
from ppas_core.errors import InvalidInput, NoResult

PROXY = """
import sys
from optuna.storages import get_storage, run_grpc_proxy_server
run_grpc_proxy_server(get_storage(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]))
"""


def sqlite(folder: Path) -> StorageUrl:
    return StorageUrl.parse(f"sqlite:///{folder / 'shared.db'}")


def measured(trials: list[SearchTrial]) -> list[tuple[int, str, dict[str, float]]]:
    return [(trial.number, trial.params.label(), trial.outcome.objectives) for trial in trials]


def take_part(where: StorageUrl, run: Path, **changes: Any) -> list[SearchTrial]:
    shared = Shared(where, say=lambda text: None, heartbeat_s=1.0)
    return work(make_plan(spec(**changes)), run, Silent(), shared)[0]


@contextlib.contextmanager
def proxy(database: str, port: int | None = None) -> Iterator[StorageUrl]:
    servers: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> None:
        servers.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROXY, database, str(port)]))
        while servers[-1].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)
        raise RuntimeError(f"the proxy ended with {servers[-1].returncode}")

    try:
        if port is None:
            port = started_on_a_free_port(start, RuntimeError)
        else:
            start(port)
        yield StorageUrl.parse(f"grpc://127.0.0.1:{port}")
    finally:
        for server in servers:
            server.kill()
            server.wait()


def test_postgresql_and_a_grpc_proxy_give_the_study_that_sqlite_and_a_study_alone_give(
    server: Postgres, tmp_path: Path
) -> None:
    alone = run_study(spec(trials=4), tmp_path / "alone", base=tmp_path, progress=Silent())
    wanted = [(t.setting.to_params().label(), t.objectives) for t in alone.trials if t.dimensions]
    own = take_part(sqlite(tmp_path), tmp_path / "sqlite", trials=4)
    assert [(label, objectives) for _, label, objectives in measured(own)] == wanted
    assert measured(take_part(StorageUrl.parse(server.url()), tmp_path / "postgres", trials=4)) == measured(own)
    with proxy(f"sqlite:///{tmp_path / 'proxied.db'}") as where:
        assert measured(take_part(where, tmp_path / "grpc", trials=4)) == measured(own)


def test_a_worker_behind_a_proxy_that_is_killed_goes_on_when_there_is_one_again(tmp_path: Path) -> None:
    where, long = sqlite(tmp_path), {**STUDY["workload"], "phase_s": 2000}
    trials = Trials(where.full)
    study = write(tmp_path, workload=long, trials=2)
    with proxy(where.full) as behind:
        worker = Process(study, behind.full, tmp_path / "worker", "--heartbeat", "1s")
        # Not its trial 0, which is the reference over again: it would be told before the proxy is gone.
        wait_until("it measures", lambda: any(trial.number > 0 for trial in trials.running(worker.name)))
    try:
        wait_until("it misses the proxy", lambda: "is away (gRPC: UNAVAILABLE)" in worker.said())
        with proxy(where.full, behind.address()[1]):
            assert worker.process.wait(timeout=90) == 0, worker.said()
    finally:
        worker.end()
    assert len(trials.done()) == len(trials.all()) == len(make_plan(spec()).in_space) + 2
    assert "is back after" in worker.said()


def test_a_worker_that_comes_back_takes_nothing_twice_and_a_larger_study_goes_on(tmp_path: Path) -> None:
    where = sqlite(tmp_path)
    first = take_part(where, tmp_path / "one", trials=2)
    assert measured(take_part(where, tmp_path / "one", trials=2)) == measured(first)
    shared = Shared(where, say=lambda text: None)
    results = run_study(spec(trials=3), tmp_path / "run", base=tmp_path, progress=Silent(), shared=shared)
    assert len([trial for trial in results.trials if trial.dimensions]) == len(first) + 1
    assert [t.objectives for t in results.trials if t.dimensions][: len(first)] == [t.outcome.objectives for t in first]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reference": {"b_max": 8192, "b_cap": 1024, "n_th": 2}}, r"reference is .*16384.* there.*8192.* here"),
        ({"tuning_seeds": [0, 5]}, r"tuning_seeds is \[0, 1\] there, \[0, 5\] here"),
        ({"noise_sigma": 0.1}, r"noise_sigma is 0.0 there, 0.1 here"),
        ({"profile": "rtx5090-qwen2.5-0.5b"}, r"machine: profile"),
    ],
)  # fmt: skip
def test_a_stranger_is_refused_with_both_values_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    take_part(sqlite(tmp_path), tmp_path / "one", trials=1)
    with pytest.raises(InvalidInput, match=named):
        take_part(sqlite(tmp_path), tmp_path / "two", **{"trials": 1, **changes})


def test_a_worker_that_was_silent_too_long_finds_its_trial_given_away_and_its_measurement_does_not_count(
    tmp_path: Path,
) -> None:
    where, long = sqlite(tmp_path), {**STUDY["workload"], "phase_s": 2000}
    study = write(tmp_path, workload=long, trials=4)
    trials = Trials(where.full)
    silent = Process(study, where.full, tmp_path / "silent", "--heartbeat", "1s")
    try:
        wait_until("it measures", lambda: bool(trials.running(silent.name)))
        silent.process.send_signal(signal.SIGSTOP)
        # Not between two trials, and not within a write to the storage: a stopped process would keep its lock.
        while not trials.running(silent.name) or not _can_be_written(where):
            silent.process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
            silent.process.send_signal(signal.SIGSTOP)
        lost = trials.running(silent.name)[0].number
        done = take_part(where, tmp_path / "other", workload=long, trials=4)
        silent.process.send_signal(signal.SIGCONT)
        assert silent.process.wait(timeout=60) == 0, silent.said()
    finally:
        silent.end()
    assert [trial.number for trial in done] == list(range(len(done)))
    assert len(trials.done()) == len(done)
    assert f"trial {lost} was given to another worker" in silent.said()


def _can_be_written(where: StorageUrl) -> bool:
    connection = sqlite3.connect(where.full.removeprefix("sqlite:///"), timeout=0.3)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


def test_an_interrupted_worker_gives_its_trial_back_at_once_and_nobody_counts_as_dead(tmp_path: Path) -> None:
    where = sqlite(tmp_path)
    # Many long traces, so that it is measuring when it is looked at: a trial that is measured already is told instead.
    long = {"workload": {**STUDY["workload"], "phase_s": 3000}, "tuning_seeds": list(range(20, 26)), "trials": 1}
    study = write(tmp_path, **long)
    trials = Trials(where.full)
    worker = Process(study, where.full, tmp_path / "ended")  # at the usual heartbeat a dead one is found after a minute
    try:
        wait_until("it began", lambda: trials.begun(worker.name))
        given_back = stop_in_mid_trial(worker, trials, measuring=True)
        worker.process.send_signal(signal.SIGTERM)
        worker.process.send_signal(signal.SIGCONT)
        assert worker.process.wait(timeout=60) == 130, worker.said()
    finally:
        worker.end()
    assert [trial.number for trial in trials.all() if trial.user_attrs.get("released")] == [given_back]
    assert not [trial for trial in trials.all() if trial.state == optuna.trial.TrialState.RUNNING]
    done = take_part(where, tmp_path / "other", **long)
    assert len(trials.done()) == len(done)
    assert all(trial.user_attrs.get("deaths", 0) == 0 for trial in trials.all())


def test_a_worker_whose_reference_is_broken_takes_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*_: object) -> None:
        raise NoResult("the server died")

    where = sqlite(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(SimulatedEvaluator, "replay", dead)
        with pytest.raises(NoResult, match=r"reference .* cannot be measured"):
            take_part(where, tmp_path / "broken")
    with pytest.raises(KeyError):  # it did not even register
        Trials(where.full).all()
    assert len(take_part(where, tmp_path / "whole", trials=1)) == len(make_plan(spec()).in_space) + 1


def test_measurements_of_another_machine_are_put_on_the_scale_of_ones_own_reference() -> None:
    def outcome(mean: float) -> Outcome:
        return Outcome({"x": 1.0}, {"busy": {"x": mean}}, {}, 1.0, by_trace={"t": {"x": mean}})

    found = rebased(outcome(3.0), theirs=outcome(2.0), ours=outcome(4.0))
    assert found.regimes == {"busy": {"x": 6.0}}
    assert found.by_trace == {"t": {"x": 6.0}}
    assert found.objectives == {"x": 1.0}


def test_a_fingerprint_names_the_profile_and_no_file_of_this_machine(tmp_path: Path) -> None:
    found = fingerprint(make_plan(spec()))
    assert len(found["profile_digest"]) == 64
    assert str(tmp_path.parent) not in str(found)


def test_gpus_are_numbers_or_names_each_once() -> None:
    assert parse_gpus("0, 1,2,3") == ["0", "1", "2", "3"]
    assert parse_gpus("GPU-8f0c,MIG-1a") == ["GPU-8f0c", "MIG-1a"]
    for wrong in ("", "0,,1", "0,0", "all", "0;rm"):
        with pytest.raises(InvalidInput, match="allowed"):
            parse_gpus(wrong)


def test_one_command_runs_a_worker_for_each_gpu_and_tells_them_apart(tmp_path: Path) -> None:
    study, where = write(tmp_path), sqlite(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "autotune.entry", "worker", str(study), "--gpus", "0,1", "--run", str(tmp_path / "w")],
        env={**os.environ, VARIABLE: where.full}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "w.gpu0" / "worker.txt").exists()
    assert (tmp_path / "w.gpu1" / "worker.txt").exists()
    assert len(Trials(where.full).done()) == len(make_plan(spec()).in_space) + STUDY["trials"]


def test_a_worker_that_a_signal_ended_makes_the_command_fail_though_the_others_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\ntest "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER" = "0 PCI_BUS_ID" || kill -9 $$\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert run_workers({"0": []}, {}, print) == 0
    assert run_workers({"0": [], "1": []}, {}, print) == 128 + signal.SIGKILL


def test_a_missing_storage_is_told_before_anything_is_made(tmp_path: Path) -> None:
    where = StorageUrl.parse(f"sqlite:///{tmp_path / 'no' / 'folder.db'}")
    with pytest.raises(InvalidInput, match="unable to open database file"):
        open_storage(where, Patience(where, print))
    with pytest.raises(InvalidInput, match="unable to open"):
        take_part(where, tmp_path / "run")
    assert not (tmp_path / "run").exists()
