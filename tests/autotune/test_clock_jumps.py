"""The machine's wall clock is set an hour on, then back, while a study and a replay run: nobody notices."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_study import small, write_study

from autotune.plan import make_plan
from autotune.status import RunStatus, Watch
from autotune.tune import tune
from traces.format import Trace, TraceRequest, write_trace

ROOT = Path(__file__).parents[2]
LIVE_TESTS = ROOT / "tests/live"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
HOUR_S = 3600

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed: scripts/install_faketime.sh")


class WallClock:
    """The wall clock of the processes that run with `environment`; their monotonic clock stays the kernel's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)
        self.environment = {
            **ENVIRONMENT,
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "NO_FAKE_STAT": "1",
        }

    def set(self, ahead_s: int) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(f"{ahead_s:+d}\n")
        part.replace(self._file)


SITE = """
import os, time
_time, _time_ns = time.time, time.time_ns
def _ahead_s():
    with open(os.environ["TEST_CLOCK_FILE"]) as file:
        return int(file.read())
time.time = lambda: _time() + _ahead_s()
time.time_ns = lambda: _time_ns() + 10**9 * _ahead_s()
"""


class PythonClock(WallClock):
    """The same for Python's `time` alone: under libfaketime a jump may end `time.sleep` of Python 3.11 with EINVAL."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "ahead")
        (folder / "sitecustomize.py").write_text(SITE)
        self.environment = {
            **ENVIRONMENT, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TEST_CLOCK_FILE": str(folder / "ahead"),
        }  # fmt: skip


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path / "ahead")


@pytest.fixture
def python_clock(tmp_path: Path) -> PythonClock:
    return PythonClock(tmp_path)


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("which", ["clock", "python_clock"])
def test_the_clock_really_jumps_for_the_processes_of_these_tests(which: str, request: pytest.FixtureRequest) -> None:
    """And their monotonic clock does not, which a later process compares with its own."""
    clock: WallClock = request.getfixturevalue(which)
    code = "import time; print(time.time(), time.monotonic())"
    for ahead_s in (0, HOUR_S, -HOUR_S):
        clock.set(ahead_s)
        run = subprocess.run([sys.executable, "-c", code], env=clock.environment, capture_output=True, check=True)
        wall_s, monotonic_s = map(float, run.stdout.split())
        assert abs(wall_s - time.time() - ahead_s) < 60
        assert abs(monotonic_s - time.monotonic()) < 60


STUDY: dict[str, Any] = {"trials": 24, "robustness_rates": []}


def found(run: Path) -> list[Any]:
    results = json.loads((run / "results.json").read_text())
    trials = [(trial["setting"]["label"], trial["objectives"], trial["regimes"]) for trial in results["trials"]]
    return [*trials, results["exported"], results["comparisons"]]


def looks(run: Path, process: subprocess.Popen[bytes], trials: int) -> Iterator[RunStatus]:
    """Where the study stands, again and again until it has so many trials, as another process sees it."""
    while process.poll() is None and not (run / f"trials/{trials}/metrics.json").exists():
        if (run / "identity.json").exists():
            yield Watch(run).status()
        time.sleep(0.05)


def told_since(run: Path, written_ns: int, process: subprocess.Popen[bytes]) -> bool:
    """Whether the study wrote down where it stands since then, or is over."""
    return (run / "progress.json").stat().st_mtime_ns != written_ns or process.poll() is not None


def test_a_study_in_which_the_clock_jumps_finds_the_same_and_its_status_stays_sane(
    tmp_path: Path, clock: WallClock
) -> None:
    command = [sys.executable, "-m", "autotune.entry", "tune", str(write_study(tmp_path, **STUDY)), "-q"]
    process = subprocess.Popen(command, cwd=tmp_path, env=clock.environment, stderr=subprocess.PIPE)
    run = tmp_path / "runs/small"
    seen: list[RunStatus] = []
    for trials, ahead_s in ((5, HOUR_S), (13, -HOUR_S), (21, 0)):
        seen += looks(run, process, trials)
        clock.set(ahead_s)
        written_ns = (run / "progress.json").stat().st_mtime_ns
        wait_for(partial(told_since, run, written_ns, process))
        seen.append(Watch(run).status())
    assert process.wait() == 0, process.stderr and process.stderr.read()
    assert len(seen) > 6
    assert {one.state for one in seen} <= {"starting", "running", "finished"}
    running = [one for one in seen if one.state == "running" and one.stage]
    assert running
    for one in running:
        assert one.updated_s_ago is not None
        assert 0 <= one.updated_s_ago < HOUR_S / 4
        assert one.eta_s is None or 0 <= one.eta_s < HOUR_S / 4
    tune(make_plan(small(**STUDY)), tmp_path / "undisturbed")
    assert found(run) == found(tmp_path / "undisturbed")
    results = json.loads((run / "results.json").read_text())
    assert all(0 <= trial["duration_s"] < HOUR_S / 4 for trial in results["trials"])
    beat = json.loads((run / "progress.json").read_text())
    assert all(0 <= stage["seconds"] < HOUR_S / 4 for stage in beat["stages"])
    finished = Watch(run).status()
    assert finished.state == "finished"


def test_a_replay_in_which_the_clock_jumps_keeps_its_times(tmp_path: Path, python_clock: PythonClock) -> None:
    gap_s, count = 0.25, 16
    requests = tuple(TraceRequest(i * gap_s, 20, 4) for i in range(count))
    write_trace(Trace("slow", requests), tmp_path / "slow.jsonl")
    server = subprocess.Popen(
        [sys.executable, str(LIVE_TESTS / "openai_server.py"), json.dumps({"gap_s": 0.02})],
        stdout=subprocess.PIPE,
        text=True,
        env=python_clock.environment,
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        command = [sys.executable, "-m", "autotune.entry", "replay", "--url", url, "-t", str(tmp_path / "slow.jsonl")]
        replay = subprocess.Popen([*command, "--json"], env=python_clock.environment, stdout=subprocess.PIPE)
        for sent, ahead_s in ((4, HOUR_S), (10, -HOUR_S)):
            wait_for(partial(has_seen, url, sent))
            python_clock.set(ahead_s)
        assert replay.stdout is not None
        told = json.loads(replay.stdout.read())
        replay.wait()
    finally:
        server.kill()
        server.wait()
    assert told["requests"]["ok"] == count
    assert count * gap_s - gap_s <= told["metrics"]["makespan_s"] < 60
    assert 0.05 < told["metrics"]["mean_latency_s"] < 30
    assert 0 <= told["client_lag"]["max_s"] < 30


def has_seen(url: str, requests: int) -> bool:
    with urllib.request.urlopen(f"{url}/seen") as reply:  # noqa: S310
        return len(json.load(reply)) >= requests
