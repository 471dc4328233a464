"""A shared study on PostgreSQL: the server crashes, a worker is killed, another is cut off for a minute; nothing is lost."""

import re
import signal
import time
from pathlib import Path
from urllib.parse import quote

from postgres import Postgres, Wire
from shared_study import Process, Trials, spec, stop_in_mid_trial, wait_until, write

from autotune.cli.pipeline import run_study
from autotune.distributed.url import StorageUrl
from autotune.distributed.work import Shared
from autotune.plan import make_plan
from autotune.progress import Silent

LONG = {"family": "rag-bursts", "rates_per_s": [0.4, 1.0], "prompt_tokens": 4000, "phase_s": 2000}
TRIALS = 96  # so many that each worker is at work when it is looked for
DOWN_S = 5.0
CUT_S = 60.0


def test_four_workers_measure_exactly_the_trials_asked_for_though_one_is_killed_and_one_is_cut_off_for_a_minute(
    server: Postgres, tmp_path: Path
) -> None:
    study = write(tmp_path, workload=LONG, trials=TRIALS, robustness_rates=[])
    total = len(make_plan(spec(workload=LONG)).in_space) + TRIALS
    trials, wire = Trials(server.url()), Wire(server.port)
    workers = [
        Process(study, server.url(wire.port if name == "cut" else None), tmp_path / name, "--heartbeat", "1s")
        for name in ("killed", "cut", "third", "fourth")
    ]
    killed, cut, *others = workers
    try:
        wait_until("all work", lambda: all(trials.by(worker.name) for worker in workers))
        server.stop("immediate")  # while all four work
        time.sleep(DOWN_S)
        # One that measures all the while misses it at its next beat, which may be late on a busy machine.
        wait_until("they miss it", lambda: all("is away" in worker.said() for worker in workers[1:]))
        server.start()
        abandoned = stop_in_mid_trial(killed, trials)
        killed.process.kill()
        stranded = stop_in_mid_trial(cut, trials)
        wire.cut()
        cut.process.send_signal(signal.SIGCONT)
        # An outage begins with the first call that fails; the one before may not be over for it.
        wait_until("it misses it", lambda: cut.said().count("is away") > cut.said().count("is back after"))
        began = time.monotonic()
        for worker in others:
            assert worker.process.wait(timeout=240) == 0, worker.said()
        time.sleep(max(0.0, began + CUT_S - time.monotonic()))
        wire.mend()
        assert cut.process.wait(timeout=240) == 0, cut.said()
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
    for lost, loser in ((abandoned, killed), (stranded, cut)):
        root = trials.all()[lost].user_attrs.get("root", lost)
        assert retried[root].user_attrs["owner"] != loser.name
        assert retried[root].user_attrs["attempt"] >= 2
    owners = {trial.user_attrs["owner"] for trial in done}
    assert {worker.name for worker in workers[1:]} <= owners

    for worker in workers[1:]:  # the first may be killed in the trial that it had when the server stopped
        assert "is away" in worker.said()
        assert "is back after" in worker.said()
    assert max(float(found) for found in re.findall(r"is back after (\d+) s", cut.said())) >= CUT_S
    assert f"trial {stranded} was given to another worker" in cut.said()  # it told its measurement a minute too late
    for text in (*(worker.said() for worker in workers), (tmp_path / "run" / "results.json").read_text()):
        assert Postgres.PASSWORD not in text
        assert quote(Postgres.PASSWORD, safe="") not in text
