"""A server that leaks: seen, told, and started anew between trials; one that does not is left alone."""

import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from live_study import live, logs, own_server, plan_of, write_study

from autotune.runfolder import identity
from autotune.server_memory import MemoryWatch, Sample, left_bytes, size, trend, used_bytes
from autotune.tune import tune
from reports.quality import memory_words

MIB = 2**20


def samples(used_mib: Callable[[int], float], count: int = 44, left_mib: float = 1950) -> list[Sample]:
    return [Sample("server-1", int(used_mib(i) * MIB), int(left_mib * MIB)) for i in range(count)]


# --- a study ---


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed, and its command is what is stood in for")
def test_a_server_that_leaks_is_started_anew_between_trials_and_the_study_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = dict[int, int]()

    def of_a_machine_of_its_own(leader: int) -> int:
        used = used_bytes(leader) or 0
        return 2**30 - (used - first.setdefault(leader, used))

    monkeypatch.setattr("autotune.server_memory.left_bytes", of_a_machine_of_its_own)
    server = own_server(tmp_path, leak_bytes=2 * MIB)
    reserve = {"memory_reserve_gib": (1024 - 100) / 1024}  # in reach of a few trials
    path = write_study(tmp_path, {**server, **reserve}, trials=4, stop_early=False, static_budgets=[256, 1024])
    plan, run, said = plan_of(path), tmp_path / "run", list[str]()
    live(plan.evaluator).say = said.append
    results = tune(plan, run)
    assert {trial.state for trial in results.trials} == {"ok"}, "a restart was a trial's expense"
    assert all((trial.server_memory_bytes or 0) > 10 * MIB for trial in results.trials)
    memory = results.server_memory
    assert memory is not None
    assert memory.restarts >= 1
    assert len(logs(run)) == memory.restarts + 1
    assert memory.growth_bytes is not None
    assert 10 * MIB <= memory.growth_bytes <= 14 * MIB, "five requests of 2 MiB a trial, and now and then a probe"
    restart = next(text for text in said if "starting the server anew between trials" in text)
    assert "the server grew by 1" in restart
    (note,) = (text for text in results.warnings if "leaks memory" in text)
    assert note.endswith(f"servers started anew for that, between trials: {memory.restarts}")
    assert "MiB a trial" in note
    assert "MiB a trial" in (memory_words(results) or "")
    seen = Counter(line.split('"server": "')[1].split('"')[0] for line in (run / "servers/memory.jsonl").open())
    assert seen["server-1"] >= 12

    # What an earlier process saw counts for the next one.
    watch = MemoryWatch(run / "servers/memory.jsonl", reserve_bytes=0, replays_per_trial=1)
    assert watch.summary() == memory.model_dump()
    with (run / "servers/memory.jsonl").open("a") as file:
        file.write('{"server": "server-9", "used_by')  # a line that a killed process left
    assert MemoryWatch(run / "servers/memory.jsonl", reserve_bytes=0, replays_per_trial=1).summary() == watch.summary()


def test_a_study_that_goes_on_may_keep_more_memory_free(tmp_path: Path) -> None:
    server = {"model": "m", "wrapper": ["sh"]}
    found = [
        identity(plan_of(write_study(tmp_path, {**server, **more})))
        for more in ({}, {"memory_reserve_gib": 64}, {"request_timeout": "9s"})
    ]
    assert found[0] == found[1] != found[2]


# --- the trend ---


def test_steady_growth_is_found_at_its_pace_with_the_trials_left_in_words() -> None:
    noise = random.Random(1)
    growth = trend(samples(lambda i: 500 + 6 * i + noise.gauss(0, 20)), 2)
    assert growth is not None
    assert growth.per_trial_bytes == pytest.approx(12 * MIB, rel=0.25)
    exact = trend(samples(lambda i: 500 + 6 * i), 2)
    assert exact is not None
    assert exact.sentence == "the server grew by 12 MiB a trial, 1.9 GiB left: about 160 trials"
    assert exact.is_near
    plenty = trend(samples(lambda i: 500 + 6 * i, left_mib=2e6), 2)
    assert plenty is not None
    assert not plenty.is_near


def test_growth_of_a_server_s_first_replays_is_told_only_where_its_end_is_close() -> None:
    """The jumps of a server that meets a study's settings and traces for the first time, in MiB, as measured live."""
    warming = [2116, 2121, 2121, 2121, 2121, 2121, 2121, 2159, 2159, 2163, 2221, 2329, 2329, 2329, 2330, 2330]
    first = samples(lambda i: warming[min(max(0, i - 6), 15)], count=24, left_mib=20_000)
    assert trend(first, 2) is None
    steady = samples(lambda i: 500 + 6 * i, count=24, left_mib=20_000)
    assert trend(steady, 2) is None
    close = trend(samples(lambda i: 500 + 6 * i, count=24, left_mib=1000), 2)
    assert close is not None
    assert close.sentence.endswith("about 83 trials")


def test_growth_in_stairs_is_growth() -> None:
    found = trend(samples(lambda i: 500 + 64 * (i // 8), count=60), 1)
    assert found is not None
    assert found.per_trial_bytes == pytest.approx(8 * MIB, rel=0.3)


@pytest.mark.parametrize(
    "used_mib",
    [
        lambda i: 500 + 300 * (1 - math.exp(-i / 6)),  # caches that fill
        lambda i: 500 + 100 * min(i, 4),  # what a first trial allocates
        lambda i: 500.0,
        lambda i: 500 + random.Random(i).gauss(0, 30),
        lambda i: 500 + (800 if i == 30 else 0),
        lambda i: 500 - 3.0 * i,
        lambda i: 500 + 0.2 * i,  # 200 KiB a trial
    ],
)
def test_memory_that_settles_scatters_or_shrinks_is_no_leak(used_mib: Callable[[int], float]) -> None:
    assert trend(samples(used_mib), 1) is None


def test_nothing_is_said_before_a_dozen_replays() -> None:
    assert trend(samples(lambda i: 500 + 50 * i, count=11), 1) is None
    assert trend(samples(lambda i: 500 + 50 * i, count=12), 1) is not None


# --- what the system tells ---

HOLDS = """
import subprocess, sys
held = b"x" * (48 * 2**20)
child = subprocess.Popen([sys.executable, "-c", "held = b'x' * (32 * 2**20); print('up', flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
input()
child.communicate(b"\\n")
"""


def test_the_memory_of_all_processes_of_a_session_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = used_bytes(process.pid)
        left = left_bytes(process.pid)
        process.communicate(b"\n")
    assert found is not None
    assert 80 * MIB <= found <= 140 * MIB
    assert left is not None
    assert left > 0
    assert used_bytes(process.pid) is None


@pytest.mark.parametrize(
    ("line", "place", "files", "wanted_mib"),
    [
        ("0::/a/b", "a/b", {"memory.max": 900, "memory.current": 700}, 300),
        ("0::/a/b", "a", {"memory.max": 900, "memory.current": 700}, 300),  # of a group around it
        ("0::/a/b", "a/b", {"memory.max": "max", "memory.current": 700}, 4000),
        ("4:cpu,memory:/a", "memory/a", {"memory.limit_in_bytes": 900, "memory.usage_in_bytes": 800}, 200),
        ("4:cpu,memory:/gone", "memory", {"memory.limit_in_bytes": 900, "memory.usage_in_bytes": 800}, 200),
        ("4:cpu:/a", "memory/a", {"memory.limit_in_bytes": 900, "memory.usage_in_bytes": 800}, 4000),
        ("0::/a", "a", {"memory.max": 900, "memory.current": 1200}, 0),
    ],
)
def test_what_is_left_is_the_machines_or_the_control_groups_where_that_is_less(
    tmp_path: Path, line: str, place: str, files: dict[str, int | str], wanted_mib: int
) -> None:
    proc, group = tmp_path / "proc", tmp_path / "groups" / place
    (proc / "7").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 4096000 kB\n")
    (proc / "7/cgroup").write_text(f"{line}\n")
    for name, value in files.items():
        (group / name).write_text(str(value * MIB) if isinstance(value, int) else value)
    (group / "memory.stat").write_text(f"inactive_file {100 * MIB}\ntotal_inactive_file {100 * MIB}\n")
    assert left_bytes(7, proc, tmp_path / "groups") == wanted_mib * MIB


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path) -> None:
    assert left_bytes(7, tmp_path, tmp_path) is None
    assert used_bytes(7, tmp_path) is None
    watch = MemoryWatch(tmp_path / "memory.jsonl", reserve_bytes=1, replays_per_trial=1)
    assert watch.note("server-1", None) == (None, None)
    assert (watch.summary(), watch.too_little()) == (None, None)


@pytest.mark.parametrize(("first_left_mib", "helps"), [(3000, True), (900, False)])
def test_a_server_is_not_started_anew_where_that_gives_too_little_memory_back(
    tmp_path: Path, first_left_mib: int, helps: bool
) -> None:
    file = tmp_path / "memory.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {"server": "a", "used_bytes": (500 + 60 * i) * MIB, "left_bytes": (first_left_mib - 60 * i) * MIB}
            )
            + "\n"
            for i in range(30)
        )
    )
    watch = MemoryWatch(file, reserve_bytes=2000 * MIB, replays_per_trial=1)
    watch._server = "a"  # as if it still ran
    assert (watch.too_little() is not None) == helps


def test_sizes_are_written_for_people() -> None:
    assert [size(count) for count in (2**20 * 12, 2**30 * 1.94, 2**30 * 31, 5000)] == [
        "12 MiB",
        "1.9 GiB",
        "31 GiB",
        "5 KiB",
    ]
