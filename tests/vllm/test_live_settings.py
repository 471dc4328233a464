"""Settings files, acknowledgements, the step log and their bad days; without vLLM."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ppas_core.errors import InvalidInput, InvalidSettings, NoResult
from ppas_core.policy import PolicyParams, Scope
from ppas_core.vllm import live
from ppas_core.vllm.control import Ack, LiveControl
from ppas_core.vllm.reporter import Reporter
from ppas_core.vllm.settings import EngineLimits, RuntimeOptions, params_from_environment, read_activation
from ppas_core.vllm.steplog import StepLog, StepRow, read_step_log

LIMITS = EngineLimits(startup_budget_tokens=4096, max_num_seqs=16)
START = PolicyParams(b_max=4096, b_cap=512, max_num_seqs=16)


def control(path: Path | None, acks: list[Ack] | None = None) -> LiveControl:
    return LiveControl(START, LIMITS, path, (acks if acks is not None else []).append)


def ask(path: Path, version: object, ppas: object) -> None:
    live.write_atomically(path, json.dumps({"version": version, "ppas": ppas}).encode())


def test_a_changed_file_is_applied_at_the_step_that_sees_it(tmp_path: Path) -> None:
    path, acks = tmp_path / "settings.json", []
    watch = control(path, acks)
    assert watch.poll(1) == START
    ask(path, 1, {"b_max": 2048, "b_cap": 256, "scope": "global"})
    params = watch.poll(7)
    assert params == PolicyParams(2048, 256, scope=Scope.GLOBAL, max_num_seqs=16)
    assert watch.poll(8) is params
    assert [(a.version, a.status, a.step, a.reason) for a in acks] == [(1, "applied", 7, None)]
    ask(path, 2, None)
    assert watch.poll(9) is None
    assert acks[-1].ppas is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"version": 3, "ppas": {"b_max": 8192, "b_cap": 512}}', "started with 4096 tokens per step"),
        ('{"version": 3, "ppas": {"b_max": 8, "b_cap": 4}}', "one token per sequence"),
        ('{"version": 3, "ppas": {"b_max": 512, "b_cap": 8, "scope": "global"}}', "it can starve"),
        ('{"version": 3, "ppas": {"b_max": 512, "b_cap": 64, "max_num_seqs": 4}}', "started with --max-num-seqs 16"),
        ('{"version": 3, "ppas": {"b_max": 512, "bcap": 64}}', "unknown setting 'bcap'"),
        ('{"version": 3, "ppas": [512]}', "the settings are"),
        ('{"version": 3}', "has no key ppas"),
        ('{"version": 2, "ppas": null}', "version 2 is not above 2"),
        ('{"version": true, "ppas": null}', "version is True"),
        ('{"version": 3, "ppas": null, "more": 1}', "unknown key 'more'"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 60_000, "not JSON"),
        (" " * 70_000, "larger than"),
        ("\udcff", "not JSON"),
    ],
)
def test_a_refused_file_leaves_the_old_settings_in_force_and_says_why(
    tmp_path: Path, content: str, reason: str
) -> None:
    path, acks = tmp_path / "settings.json", []
    watch = control(path, acks)
    ask(path, 2, {"b_max": 1024, "b_cap": 128})
    before = watch.poll(1)
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert watch.poll(2) is before
    assert watch.poll(3) is before
    assert len(acks) == 2
    assert acks[-1].status == "refused"
    assert reason in (acks[-1].reason or "")
    assert acks[-1].ppas == acks[0].ppas


def test_a_file_that_goes_or_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    path, acks = tmp_path / "settings.json", []
    watch = control(path, acks)
    ask(path, 1, {"b_max": 1024, "b_cap": 128})
    before = watch.poll(1)
    path.unlink()
    assert watch.poll(2) is before
    path.mkdir()
    assert watch.poll(3) is before
    assert acks[-1].status == "refused"


def test_looking_for_a_change_costs_a_stat(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    ask(path, 1, {"b_max": 1024, "b_cap": 128})
    watch = control(path)
    watch.poll(1)
    best_s = min(_time_of(lambda: watch.poll(2), 500) for _ in range(10))
    assert best_s < 20e-6


def test_versions_go_on_from_whatever_was_seen(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    assert live.write_settings(path, START) == 1
    assert live.write_settings(path, None) == 2
    path.write_text("broken")
    state = {"format": live.STATE_FORMAT, "in_force": {"version": 4}, "acks": [{"version": 9, "status": "refused"}]}
    live.state_path(path).write_text(json.dumps(state))
    assert live.write_settings(path, START) == 10
    assert live.find_ack(path, 9) == {"version": 9, "status": "refused"}
    with pytest.raises(NoResult, match="did not acknowledge settings version 10"):
        live.wait_for_ack(path, 10, timeout_s=0.05)


def test_a_reader_never_meets_half_a_settings_file(tmp_path: Path) -> None:
    path, acks = tmp_path / "settings.json", []
    watch = control(path, acks)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            live.write_settings(path, START)

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(acks) < 50:
        watch.poll(1)
    stop.set()
    thread.join()
    assert len(acks) == 50
    assert {ack.status for ack in acks} == {"applied"}


# Environment and additional-config


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PPAS_ENABLED": "0"}, None),
        ({"PPAS_ENABLED": "1"}, PolicyParams(4096, 2048, max_num_seqs=16)),
        ({"PPAS_ENABLED": "1", "PPAS_B_CAP": "768"}, PolicyParams(4096, 768, scope=Scope.GLOBAL, max_num_seqs=16)),
        (
            {"PPAS_PLUS_ENABLED": "1", "PPAS_B_CAP": "768"},
            PolicyParams(4096, 768, t_large=65536, scope=Scope.GLOBAL, max_num_seqs=16),
        ),
        (
            {
                "PPAS_PLUS_ENABLED": "true",
                "PPAS_B_CAP": "8",
                "PPAS_LARGE_PREFILL_THRESHOLD": "100",
                "PPAS_N_TH": "3",
                "PPAS_DECODE_GUARD": "1",
            },
            PolicyParams(4096, 8, 3, t_large=100, scope=Scope.GLOBAL, max_num_seqs=16, decode_guard=True),
        ),
        (
            {"PPAS_ENABLED": "1", "PPAS_B_CAP": "100", "PPAS_SCOPE": "prefill"},
            PolicyParams(4096, 100, max_num_seqs=16),
        ),
    ],
)
def test_the_published_variables_mean_what_the_patches_make_of_them(
    environ: dict[str, str], expected: PolicyParams | None
) -> None:
    assert params_from_environment(environ, LIMITS) == expected
    assert read_activation({}, environ, LIMITS).params == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PPAS_ENABLED": "1", "PPAS_PLUS_ENABLED": "1"}, "both set"),
        ({"PPAS_PLUS_ENABLED": "1"}, "without PPAS_B_CAP"),
        ({"PPAS_ENABLED": "maybe"}, "PPAS_ENABLED is 'maybe'"),
        ({"PPAS_ENABLED": "1", "PPAS_B_CAP": "2k"}, "PPAS_B_CAP is '2k'"),
        ({"PPAS_ENABLED": "1", "PPAS_B_CAP": "5000"}, "must not exceed b_max"),
        ({"PPAS_ENABLED": "1", "PPAS_SCOPE": "all"}, "scope is 'all'"),
    ],
)
def test_variables_that_cannot_be_meant_stop_the_start(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_activation({}, environ, LIMITS)


def test_additional_config_wins_over_the_environment_and_carries_runtime_options() -> None:
    config = {
        "ppas": {"b_max": 2048, "b_cap": 100},
        "ppas_runtime": {"step_log": "/y/steps.csv", "step_log_files": 2},
    }
    environ = {"PPAS_ENABLED": "1", "PPAS_SETTINGS_FILE": "/x/settings.json", "PPAS_STEP_LOG": "/x/steps.csv"}
    activation = read_activation(config, environ, LIMITS)
    assert activation.params == PolicyParams(2048, 100, max_num_seqs=16)
    assert activation.source == "additional-config"
    assert activation.options == RuntimeOptions(
        settings_file=Path("/x/settings.json"),
        step_log=Path("/y/steps.csv"),
        step_log_files=2,
    )
    with pytest.raises(InvalidSettings, match="unknown key 'steplog' in ppas_runtime"):
        read_activation({"ppas_runtime": {"steplog": "x"}}, {}, LIMITS)


# Step log and reporter


def row(step: int) -> StepRow:
    return StepRow(step, 1.0, 1.25, float("nan"), 0, "prefill", "max", 8, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0)


def test_the_step_log_rotates_and_is_read_back_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "steps.csv"
    log = StepLog(path, max_bytes=900, keep_files=3)
    for step in range(1, 61):
        log.add(row(step))
        if step % 5 == 0:
            log.write_out()
    log.close()
    files = sorted(file.name for file in path.parent.iterdir())
    assert files in (
        ["steps.csv", "steps.csv.1", "steps.csv.2", "steps.csv.3"],
        ["steps.csv.1", "steps.csv.2", "steps.csv.3"],
    )
    frame = read_step_log(path)
    assert list(frame.columns) == list(StepRow._fields)
    steps = frame["step"].tolist()
    assert steps == list(range(steps[0], 61))
    assert len(steps) < 60
    assert frame["scheduled_s"].iloc[0] == 1.25
    assert frame["done_s"].isna().all()


def test_a_cut_last_line_is_left_out_and_a_new_start_keeps_the_old_log(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    for start in (1, 3):
        log = StepLog(path, max_bytes=10_000, keep_files=4)
        log.add(row(start))
        log.add(row(start + 1))
        log.close()
    with path.open("a") as file:
        file.write("5,1.0,1.")
    assert read_step_log(path)["step"].tolist() == [1, 2, 3, 4]


def test_a_full_buffer_or_a_broken_disk_drops_rows_and_counts_them(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.csv", max_bytes=10_000, keep_files=1, buffered_rows=10)
    for step in range(15):
        log.add(row(step))
    assert log.dropped == 5
    log.write_out()
    assert log.written == 10
    blocked = StepLog(tmp_path / "file" / "steps.csv", max_bytes=10_000, keep_files=1)
    (tmp_path / "file").write_text("no folder")
    blocked.add(row(1))
    blocked.write_out()
    assert (blocked.written, blocked.dropped) == (0, 1)
    (tmp_path / "file").unlink()
    blocked.add(row(2))
    blocked.close()
    assert (blocked.written, blocked.dropped) == (1, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_never_raises_into_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.symlink_to("/dev/full")
    log = StepLog(path, max_bytes=10_000, keep_files=1)
    for step in range(3):
        log.add(row(step))
    log.close()
    assert log.written == 0
    assert log.dropped >= 3


def test_a_disk_that_hangs_stalls_the_reporter_and_not_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    os.mkfifo(path)  # opening it for writing blocks until somebody reads
    log = StepLog(path, max_bytes=10_000, keep_files=1, buffered_rows=100)
    reporter = Reporter(lambda: {"step": 0}, None, log)
    log.add(row(0))
    time.sleep(0.3)
    start_s = time.monotonic()
    for step in range(1000):
        log.add(row(step))
    assert time.monotonic() - start_s < 0.1
    assert log.dropped >= 800
    reporter.close(timeout_s=0.1)
    assert time.monotonic() - start_s < 1.0


def test_adding_a_row_costs_less_than_a_microsecond_or_two(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.csv", max_bytes=10_000, keep_files=1)
    sample = row(1)
    assert min(_time_of(lambda: log.add(sample), 500) for _ in range(10)) < 2e-6


def test_the_state_is_published_at_once_and_retried_until_it_is_on_disk(tmp_path: Path) -> None:
    target = tmp_path / "blocked" / "state.json"
    (tmp_path / "blocked").write_text("in the way")
    state: dict[str, Any] = {"step": 5}
    reporter = Reporter(lambda: state, target, None)
    reporter.publish()
    time.sleep(0.4)
    assert reporter.failed_writes > 0
    (tmp_path / "blocked").unlink()
    deadline = time.monotonic() + 5
    while not target.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert json.loads(target.read_text()) == state
    reporter.close()


def _time_of(call: Any, number: int) -> float:
    start_s = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start_s) / number
