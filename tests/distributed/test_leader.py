"""`ppas tune` on a shared study: Ctrl-C finishes with what there is, SIGTERM gives the trial back, two may start at once."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from postgres import Postgres
from shared_study import STUDY, Process, Trials, spec, wait_until, write
from sqlalchemy.exc import OperationalError
from test_sharing import sqlite, take_part

from autotune import interrupt
from autotune.distributed.storage import Patience
from autotune.distributed.url import StorageUrl
from autotune.distributed.work import Shared
from autotune.plan import make_plan
from autotune.tune import tune
from ppas_core.errors import InvalidInput, NoResult

LONG = {**STUDY["workload"], "phase_s": 2000}
KNOWN = len(make_plan(spec()).in_space)


def results(leader: Process) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((leader.run / "results.json").read_text())
    return found


def in_space(leader: Process) -> list[dict[str, Any]]:
    return [trial["setting"] for trial in results(leader)["trials"] if trial["dimensions"]]


def test_ctrl_c_of_the_leader_finishes_with_what_there_is_ends_the_workers_and_the_same_commands_go_on(
    tmp_path: Path,
) -> None:
    where = sqlite(tmp_path)
    study = write(tmp_path, trials=100_000, robustness_rates=[])
    leader = Process(study, where.full, tmp_path / "leader", "--heartbeat", "1s", command="tune")
    worker = Process(study, where.full, tmp_path / "worker", "--heartbeat", "1s")
    trials = Trials(where.full)
    try:
        wait_until("both work", lambda: len(trials.done()) > KNOWN + 2 and bool(trials.by(worker.name)))
        leader.process.send_signal(signal.SIGINT)
        assert leader.process.wait(timeout=240) == 0, leader.said()
        assert worker.process.wait(timeout=240) == 0, worker.said()
    finally:
        leader.end()
        worker.end()
    (cut,) = (line for line in results(leader)["warnings"] if line.startswith("Ctrl-C ended the search after"))
    assert "workers end after the trial that they measure; the same commands go on" in cut
    assert (leader.run / "report.html").exists()
    first = in_space(leader)
    assert KNOWN < len(first) <= len(trials.done())
    begun = len(trials.done())

    study = write(tmp_path, trials=begun - KNOWN + 2, robustness_rates=[])
    again = Process(study, where.full, leader.run, command="tune")
    try:
        assert again.process.wait(timeout=240) == 0, again.said()
    finally:
        again.end()
    assert len(in_space(again)) == begun + 2 == len(trials.done())
    assert not any("Ctrl-C" in line for line in results(again)["warnings"])


def test_sigterm_of_the_leader_gives_its_trial_back_and_concludes_nothing(tmp_path: Path) -> None:
    where = sqlite(tmp_path)
    leader = Process(
        write(tmp_path, workload=LONG, trials=4), where.full, tmp_path / "leader", command="tune"
    )  # at the usual heartbeat a dead one is found after a minute
    trials = Trials(where.full)
    try:
        wait_until("it measures", lambda: len(trials.done()) >= KNOWN and bool(trials.running(leader.name)))
        leader.process.send_signal(signal.SIGTERM)
        assert leader.process.wait(timeout=240) == 130, leader.said()
    finally:
        leader.end()
    assert not (leader.run / "results.json").exists()
    done = take_part(where, tmp_path / "other", workload=LONG, trials=4)
    assert len(done) == len(trials.done()) == KNOWN + 4
    assert all(trial.user_attrs.get("deaths", 0) == 0 for trial in trials.all())


def test_a_process_that_was_asked_to_end_does_not_wait_for_a_storage_that_is_away() -> None:
    waits: list[float] = []
    patience = Patience(StorageUrl.parse("postgresql://db/x"), print, wait=waits.append)

    def away() -> None:
        raise OperationalError("SELECT", {}, Exception("connection refused"))

    interrupt._requested.set()
    try:
        with pytest.raises(NoResult, match="asked to end"):
            patience.through(away)
    finally:
        interrupt.forgive()
    assert sum(waits) < 1


def test_two_leaders_that_start_at_once_on_an_empty_storage_measure_one_study_and_both_finish_it(
    server: Postgres, tmp_path: Path
) -> None:
    study = write(tmp_path, trials=4, robustness_rates=[])
    leaders = [Process(study, server.url(), tmp_path / name, command="tune") for name in ("one", "two")]
    try:
        for leader in leaders:
            assert leader.process.wait(timeout=240) == 0, leader.said()
    finally:
        for leader in leaders:
            leader.end()
    done = Trials(server.url()).done()
    assert len(done) == KNOWN + 4
    assert len({trial.user_attrs["key"] for trial in done if "key" in trial.user_attrs}) == KNOWN
    one, two = map(in_space, leaders)
    assert one == two
    assert len(one) == KNOWN + 4
    assert results(leaders[0])["exported"] == results(leaders[1])["exported"]


def test_a_finished_shared_study_is_not_searched_again_where_its_storage_has_no_trial_of_it(tmp_path: Path) -> None:
    plan, run = make_plan(spec(trials=1, robustness_rates=[])), tmp_path / "leader"
    tune(plan, run, shared=Shared(sqlite(tmp_path), say=print))
    kept = (run / "results.json").read_bytes()
    (tmp_path / "elsewhere").mkdir()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="the storage holds no trial of this finished study"):
            tune(plan, run, shared=Shared(sqlite(tmp_path / "elsewhere"), say=print))
    assert (run / "results.json").read_bytes() == kept
    tune(plan, run, shared=Shared(sqlite(tmp_path), say=print))
