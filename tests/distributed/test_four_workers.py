"""A shared study on PostgreSQL: a worker is killed, another is cut off, the server stops for a while; nothing is lost."""

import signal
import time
from pathlib import Path

from postgres import Postgres, Wire
from shared_study import Process, Trials, spec, wait_until, write

from autotune.cli.pipeline import run_study
from autotune.distributed.url import StorageUrl
from autotune.distributed.work import Shared
from autotune.pareto import hypervolume
from autotune.plan import make_plan
from autotune.progress import Silent
from autotune.results import StudyResults

LONG = {"family": "rag-bursts", "rates_per_s": [0.4, 1.0], "prompt_tokens": 4000, "phase_s": 2000}
TRIALS = 24
CUT_S = 8.0


def kill_in_mid_trial(worker: Process, trials: Trials) -> int:
    """Ends the worker with SIGKILL while it measures; the number of its trial."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        worker.process.send_signal(signal.SIGSTOP)  # so that what the storage says of it stays true
        if found := trials.running(worker.name):
            worker.process.kill()
            return found[0].number
        worker.process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
    raise AssertionError("the worker was never seen in a trial")


def front_volume(results: StudyResults) -> float:
    points = [tuple(t.objectives.values()) for t in results.trials if t.state == "ok" and t.arm != "random"]
    return hypervolume(points, (1.2, 1.2))


def test_four_workers_measure_exactly_the_trials_asked_for_though_one_is_killed_and_one_is_cut_off(
    server: Postgres, tmp_path: Path
) -> None:
    study = write(tmp_path, workload=LONG, trials=TRIALS, robustness_rates=[])
    total = len(make_plan(spec(workload=LONG)).in_space) + TRIALS
    trials, wire = Trials(server.url()), Wire(server.port)
    workers = [
        Process(study, server.url(wire.port if name == "cut" else None), tmp_path / name, "--heartbeat", "1s")
        for name in ("killed", "cut", "third", "fourth")
    ]
    killed = workers[0]
    try:
        wait_until("all work", lambda: all(trials.by(worker.name) for worker in workers))
        abandoned = kill_in_mid_trial(killed, trials)
        server.stop()
        time.sleep(1)
        server.start()
        wire.cut()
        time.sleep(CUT_S)
        wire.mend()
        for worker in workers[1:]:
            assert worker.process.wait(timeout=90) == 0, worker.said()
    finally:
        wire.close()
        for worker in workers:
            worker.end()

    shared = Shared(StorageUrl.parse(server.url()), say=lambda text: None)
    base = spec(workload=LONG, trials=TRIALS, robustness_rates=[])
    results = run_study(base, tmp_path / "run", base=tmp_path, progress=Silent(), shared=shared)
    assert len([trial for trial in results.trials if trial.dimensions]) == total  # the others lie outside the space
    assert len(list((tmp_path / "run" / "trials").iterdir())) == total

    done = trials.done()
    assert len(done) == total  # none was scored twice, none beyond those asked for
    roots = [trial.user_attrs.get("root", trial.number) for trial in done]
    assert len(set(roots)) == total
    retried = {trial.user_attrs["root"]: trial for trial in done if trial.user_attrs.get("attempt", 1) > 1}
    assert retried[abandoned].user_attrs["owner"] != killed.name
    assert retried[abandoned].user_attrs["attempt"] == 2
    owners = {trial.user_attrs["owner"] for trial in done}
    assert {worker.name for worker in workers[1:]} <= owners

    for worker in workers[1:]:
        assert "is away" in worker.said()
        assert "is back after" in worker.said()
    for text in (*(worker.said() for worker in workers), (tmp_path / "run" / "results.json").read_text()):
        assert Postgres.PASSWORD not in text

    alone = run_study(base, tmp_path / "alone", base=tmp_path, progress=Silent())
    assert abs(front_volume(results) / front_volume(alone) - 1) < 0.03
    assert results.exported_role == alone.exported_role
