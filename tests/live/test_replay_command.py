"""`ppas replay` as a user runs it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from traffic import children, is_gone, trace, wait_until
from typer.testing import CliRunner

from autotune.cli import app
from autotune.replay.records_file import read_records
from traces.format import Trace, TraceRequest, write_trace

ROOT = Path(__file__).parents[2]
Serve = Callable[..., str]


def ppas(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune.entry", "replay", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PPAS_API_KEY": "abc"},
        check=False,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_trace(trace([(10, 4), (11, 4), (12, 1)]), tmp_path / "trace.jsonl")
    return tmp_path / "trace.jsonl"


def test_it_prints_metrics_lateness_and_accounting_and_writes_the_records(serve: Serve, file: Path) -> None:
    output = file.with_name("records.parquet")
    done = ppas("--url", serve(cached=2, first_s=0.3), "--trace", file, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "mean end-to-end latency" in done.stdout
    assert "requests: 3 planned, 3 sent, 3 ok, 0 failed" in done.stdout
    assert "client lateness: P50 " in done.stdout
    assert "prefix cache: 6 of 33" in done.stdout
    assert "(live, " in done.stdout
    assert read_records(output).records.status == ("ok",) * 3


def test_json_is_all_of_stdout_and_a_failed_request_makes_no_score(serve: Serve, file: Path) -> None:
    done = ppas("--url", serve(faults={"11": "refuse"}), "--trace", file, "--json", "--quiet")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["requests"] == {"planned": 3, "unsent": 0, "sent": 3, "ok": 2, "failed": 1, "http_status": 1}
    assert found["first_failure"].startswith("request 1: http_status: 503")
    assert found["metrics"]["p95_latency_failure_adjusted_s"] is None
    assert found["origin"] == "live"
    assert found["about"]["model"] == "tiny"


def test_a_disk_that_cannot_take_the_records_costs_the_file_and_not_the_summary(serve: Serve, file: Path) -> None:
    done = ppas("--url", serve(first_s=0.3), "--trace", file, "--output", file / "records.parquet")
    assert done.returncode == 1
    assert "mean end-to-end latency" in done.stdout
    assert "cannot be written" in done.stderr


def test_ctrl_c_ends_it_with_its_own_exit_code_and_no_client_stays(serve: Serve, file: Path) -> None:
    url = serve(faults={"11": "hang"})
    command = [sys.executable, "-m", "autotune.entry", "replay", "--url", url, "--trace", str(file)]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: children(running.pid, "autotune.replay.client"), 30)
    (client,) = children(running.pid, "autotune.replay.client")
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=20)
    assert running.returncode == 130
    assert "nothing of it is kept" in said
    assert "Traceback" not in said
    wait_until(lambda: is_gone(client), 5)


def test_bad_input_is_one_message_and_exit_code_two(serve: Serve, file: Path, tmp_path: Path) -> None:
    write_trace(Trace("long", (TraceRequest(0.0, 131_072, 1),)), tmp_path / "long.jsonl")
    url = serve()
    for arguments, message in (
        (("--url", "http://127.0.0.1:9", "--trace", file), "no server answers"),
        (("--url", "localhost", "--trace", file), "is not the address of a server"),
        (("--url", url, "--trace", tmp_path / "none"), "there is no such file"),
        (("--url", url, "--trace", tmp_path / "long.jsonl"), "the server takes 131072"),
        (("--url", url, "--trace", file, "--vocab-size", 10), "at least 16 are needed"),
        (("--url", url, "--trace", file, "--timeout", 0), "timeout_s is 0"),
    ):
        done = CliRunner().invoke(app, ["replay", *map(str, arguments)])
        assert done.exit_code == 2, (arguments, done.output)
        assert message in done.output
        assert done.output.count("error:") == 1
