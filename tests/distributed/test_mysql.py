"""A storage named by a `mysql://` URL, on MariaDB: the same study, also when workers and the server die."""

from pathlib import Path

from mariadb import MariaDb
from shared_study import Process, Trials, spec, stop_in_mid_trial, wait_until, write
from test_four_workers import LONG
from test_sharing import measured, sqlite, take_part

from autotune.distributed.url import StorageUrl
from autotune.plan import make_plan

TRIALS = 48


def test_one_worker_on_mysql_gives_the_study_that_sqlite_gives(mysql: MariaDb, tmp_path: Path) -> None:
    found = take_part(StorageUrl.parse(mysql.url()), tmp_path / "mysql", trials=4)
    assert len(found) == len(make_plan(spec()).in_space) + 4
    assert measured(found) == measured(take_part(sqlite(tmp_path), tmp_path / "sqlite", trials=4))


def test_workers_on_mysql_measure_exactly_the_trials_asked_for_though_one_and_then_the_server_are_killed(
    mysql: MariaDb, tmp_path: Path
) -> None:
    study = write(tmp_path, workload=LONG, trials=TRIALS)
    total = len(make_plan(spec(workload=LONG)).in_space) + TRIALS
    trials = Trials(mysql.url())
    killed, *others = workers = [
        Process(study, mysql.url(), tmp_path / name, "--heartbeat", "1s") for name in ("killed", "second", "third")
    ]
    try:
        wait_until("it measures", lambda: bool(trials.running(killed.name)))
        abandoned = stop_in_mid_trial(killed, trials)
        killed.process.kill()
        wait_until("the others work", lambda: all(trials.begun(worker.name) for worker in others))
        mysql.kill()
        wait_until("it is missed", lambda: any("is away" in worker.said() for worker in others))
        mysql.start()
        for worker in others:
            assert worker.process.wait(timeout=240) == 0, worker.said()
    finally:
        for worker in workers:
            worker.end()
    done = trials.done()
    assert len(done) == total
    assert len({trial.user_attrs.get("root", trial.number) for trial in done}) == total
    retried = {trial.user_attrs["root"]: trial.user_attrs["owner"] for trial in done if "root" in trial.user_attrs}
    assert retried[abandoned] in {worker.name for worker in others}
    assert any("is back after" in worker.said() for worker in others)  # one that computes all the while missed nothing
    for worker in others:
        assert MariaDb.PASSWORD not in worker.said()
