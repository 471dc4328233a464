"""Live studies that are killed, or run out of disk, or are given again when they are finished."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from live_study import MIDDLE, REFERENCE, command, environment, live, logs, own_server, plan_of, static, write_study
from traffic import wait_until

from autotune.records import Replay
from autotune.replay.kept import keep_replay, read_replay
from autotune.results import StudyResults
from autotune.sweep import sweep
from ppas_core.policy import PolicyParams

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed, and its command is what is stood in for"
)


def replays_by_trace(run: Path) -> Counter[int]:
    """Measured replays by trace, as the servers' step logs tell: each has one request of the length that is the trace's."""
    lengths: Counter[int] = Counter()
    for log in (run / "servers").glob("*.steps.csv"):
        lengths.update(pd.read_csv(log)["remaining_running_prefill_tokens"].tolist())
    return Counter({number: lengths[300 + number] for number in range(3)})


def test_held_out_traces_that_all_finalists_were_replayed_on_before_a_kill_are_not_replayed_again(
    tmp_path: Path,
) -> None:
    server = {**own_server(tmp_path), "max_send_lag_ms": 1000}  # a busy machine is no reason to replay one again
    path = write_study(tmp_path, server, static_budgets=[1024])
    run = tmp_path / "runs/small"

    def finished(number: int) -> dict[Path, bytes]:
        files = run.glob(f"finalists/turns-*/{number:03}-*.parquet")
        return {file: file.read_bytes() for file in files if ".steps" not in file.name}

    with (tmp_path / "first.log").open("wb") as log:
        first = subprocess.Popen(
            command(path), cwd=tmp_path, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        wait_until(lambda: first.poll() is not None or finished(1), 180)
        assert first.poll() is None, (tmp_path / "first.log").read_text()
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert not (run / "results.json").exists()
    whole, cut_short, before = finished(0), finished(1), replays_by_trace(run)
    second = subprocess.run(command(path), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    results = StudyResults.load(run / "results.json")
    settings = {entry.setting.label for entry in results.held_out}
    assert len(whole) == len(settings)
    assert finished(0) == whole
    found = replays_by_trace(run)
    assert found[1] == before[1]
    if len(cut_short) < len(settings):  # else the kill came just after it
        assert found[2] - before[2] >= len(settings), "replays of before the kill and of after it do not pair"

    servers = logs(run)
    third = subprocess.run(command(path), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert third.returncode == 0, third.stderr
    assert logs(run) == servers, "a finished study given again starts no server"
    again = StudyResults.load(run / "results.json")
    assert again.comparisons == results.comparisons
    assert again.held_out == results.held_out


def test_a_kept_replay_is_read_back_as_it_was_and_only_as_what_it_is(tmp_path: Path) -> None:
    plan = plan_of(write_study(tmp_path, own_server(tmp_path)))
    trace = plan.tuning[0]
    with live(plan.evaluator).session(tmp_path / "servers"):
        replay = plan.evaluator.replay(REFERENCE, trace)
    file = tmp_path / "kept.parquet"
    keep_replay(replay, file)
    found = read_replay(file, REFERENCE, trace)
    assert found is not None
    assert_same(found, replay)
    assert replay.ack is not None
    assert replay.ack["ppas"] == REFERENCE.to_dict()
    assert read_replay(file, PolicyParams.static(256, max_num_seqs=16), trace) is None
    assert read_replay(file, REFERENCE, plan.held_out[0]) is None
    assert read_replay(tmp_path / "none.parquet", REFERENCE, trace) is None
    file.write_bytes(file.read_bytes()[:-200])
    assert read_replay(file, REFERENCE, trace) is None


def assert_same(one: Replay, other: Replay) -> None:
    for name in one.requests.__dataclass_fields__:
        left, right = getattr(one.requests, name), getattr(other.requests, name)
        assert (left is None) == (right is None)
        np.testing.assert_array_equal(left, right)
    assert one.steps is not None
    assert other.steps is not None
    pd.testing.assert_frame_equal(one.steps, other.steps)
    for name in ("params", "trace_name", "trace_digest", "regime", "origin", "branch_steps", "client", "ack"):
        assert getattr(one, name) == getattr(other, name)


IN_A_SMALL_DISK = """
import json, subprocess, sys, time
from pathlib import Path
disk, study = Path(sys.argv[1]), sys.argv[2]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)], check=True)
run = disk / "run"
command = [sys.executable, "-m", "autotune.entry", "tune", study, "--run", str(run)]
first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
while first.poll() is None and not (run / "trials/1/metrics.json").exists():
    time.sleep(0.05)
with open(disk / "filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(b"x" * 4096)
    except OSError:
        pass
said, _ = first.communicate()
kept = sorted(int(folder.parent.name) for folder in run.glob("trials/*/metrics.json"))
before = {number: (run / f"trials/{number}/metrics.json").read_text() for number in kept}
(disk / "filler").unlink()
second = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
after = {number: (run / f"trials/{number}/metrics.json").read_text() for number in kept}
states = [t["state"] for t in json.loads((run / "results.json").read_text())["trials"]] if second.returncode == 0 else []
print(json.dumps({"first": [first.returncode, said], "second": [second.returncode, second.stdout], "kept": kept,
                  "same": before == after, "states": states, "left": [f.name for f in run.rglob("*.tmp")]}))
"""


def test_a_disk_that_fills_up_in_a_trial_is_said_and_the_same_command_goes_on_once_there_is_room(
    tmp_path: Path,
) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    (tmp_path / "disk").mkdir()
    probe = [*alone, "mount", "-t", "tmpfs", "none", str(tmp_path / "disk")]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this system allows no file system of a user's own (unshare --user --mount)")
    path = write_study(tmp_path, own_server(tmp_path), static_budgets=[256, 512, 1024])
    driver = [*alone, sys.executable, "-c", IN_A_SMALL_DISK, str(tmp_path / "disk"), str(path)]
    done = subprocess.run(driver, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    code, said = found["first"]
    assert code == 1, said
    assert "No space left on device" in said or "full" in said
    assert "give the same command again" in said
    assert "Traceback" not in said
    assert found["kept"][:2] == [0, 1]
    code, said = found["second"]
    assert code == 0, said
    assert found["same"], "a finished trial was lost or measured again"
    assert found["states"] == ["ok"] * 5


WRAPPER = """#!/bin/sh
# Not exec: the server is this wrapper's child, as it is a profiler's.
output=$1
shift
echo "profile of $$" > "$output.profile"
"$@" &
wait
"""


def test_a_wrappers_output_is_kept_per_server_and_its_child_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "wrapper.sh"
    script.write_text(WRAPPER)
    server = own_server(tmp_path, "sh", str(script), "{output}", by_setting={static(256): "die"})
    path = write_study(tmp_path, server, static_budgets=[256, 1024])
    run = tmp_path / "run"
    swept = {one.params.label(): one.outcome.reason for one in sweep(plan_of(path), run)}
    assert "the server died" in (swept[static(256)] or "")
    assert swept[static(1024)] is None
    profiles = [run / f"servers/server-{number}.profile" for number in (1, 2)]
    assert len({file.read_text() for file in profiles}) == 2
    marked = str(tmp_path / "behaviour.json").encode()
    time.sleep(0.2)
    left = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and marked in _command_line(entry).split(b"\0")
    ]
    assert not left


def _command_line(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_server_for_each_setting_runs_what_its_export_says(tmp_path: Path) -> None:
    """The comparison mode: restarts instead of switches."""
    server = {**own_server(tmp_path), "restart_per_trial": True}
    path = write_study(tmp_path, server, static_budgets=[256, 1024])
    run = tmp_path / "run"
    plan, begun_s = plan_of(path), time.monotonic()
    swept = sweep(plan, run)
    all_s = time.monotonic() - begun_s
    assert {one.outcome.reason for one in swept} == {None}
    records = [json.loads(file.read_text()) for file in run.rglob("metrics.json")]
    turns = {(record["duration_s"], record["starting_s"]) for record in records}  # trial 0 is the reference's, copied
    starting_s = live(plan.evaluator).starting_s
    assert 0 < starting_s < all_s - sum(duration_s for duration_s, _ in turns), "no duration holds its server's start"
    assert sum(start_s for _, start_s in turns) == pytest.approx(starting_s), (
        "a time budget counts starts, once resumed too"
    )
    assert logs(run) == ["server-1.log", "server-2.log", "server-3.log"]  # the noise is measured on the reference's
    for number, budget in enumerate((2048, 256, 1024), start=1):
        config = (run / f"servers/server-{number}.yaml").read_text()
        assert f"max-num-batched-tokens: {budget}\n" in config
        steps = pd.read_csv(run / f"servers/server-{number}.steps.csv")
        assert set(steps["budget"]) == {budget}
        assert set(steps["settings_version"]) == {0}
    (about,) = json.loads((run / "references/reference/replays.json").read_text())
    assert about["ack"] is None
    assert about["client"]["attempts"] >= 1
    assert pd.read_parquet(run / "references/reference/requests.parquet")["prompt_tokens"][MIDDLE] == 300
