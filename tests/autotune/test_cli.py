"""The command line: exit codes, one clear message, nothing half-made, and a study that survives a kill."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from small_study import small, write_study
from typer.testing import CliRunner

from autotune.cli import app
from autotune.plan import make_plan
from autotune.results import StudyResults
from autotune.settings import parse_setting
from autotune.tune import tune
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams, Scope


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune.entry", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_killed_in_mid_study_and_started_again_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    study = write_study(tmp_path, trials=40, random_arm=True)
    command = [sys.executable, "-m", "autotune.entry", "tune", str(study), "--quiet"]
    finished: dict[str, float] = {}
    for _ in range(3):
        process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
        database = tmp_path / "runs/small/study.db"
        deadline = time.monotonic() + 60
        while _count_trials(database) < len(finished) + 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        before = finished
        finished = _finish_times(database)
        assert before.items() <= finished.items(), "a finished trial was lost or measured again"
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    assert finished.items() <= _finish_times(database).items()
    results = StudyResults.load(tmp_path / "runs/small/results.json")
    assert Counter(t.arm for t in results.trials) == {"reference": 1, "static": 3, "search": 40, "random": 40}
    assert (tmp_path / "runs/small/report.html").stat().st_size > 100_000


def _count_trials(database: Path) -> int:
    return len(_finish_times(database))


def _finish_times(database: Path) -> dict[str, float]:
    """Study and number of each finished trial, with the time at which it was finished."""
    if not database.exists():
        return {}
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10) as connection:
            rows = connection.execute(
                "SELECT study_name || ' ' || number, datetime_complete FROM trials JOIN studies USING (study_id) "
                "WHERE state = 'COMPLETE'"
            ).fetchall()
    except sqlite3.OperationalError:  # the tables are not there yet
        return {}
    return dict(rows)


BAD = [
    ({"trails": 5}, "unknown key 'trails'; did you mean 'trials'?"),
    ({"trials": 0}, "trials is 0"),
    ({"workload": {"family": "rag-bursts", "rate": 1}}, "unknown key 'rate' in workload"),
    ({"workload": {"family": "chat"}}, "chat"),
    ({"objectives": ["mean_latency"]}, "did you mean 'mean_latency_s'?"),
    ({"objectives": ["goodput_per_s"], "prefer": "goodput_per_s"}, "no limit is set"),
    ({"prefer": "p99"}, "prefer is 'p99'"),
    ({"protect": ["λ=9"]}, "protect names the regime 'λ=9'"),
    ({"reference": "ppass"}, "'ppass' is no setting"),
    ({"reference": {"b_max": 100, "b_cap": 200}}, "b_cap is 200"),
    ({"space": "pas"}, "pas"),
    ({"space": {"b_max": {"low": 4096, "high": 2048, "step": 256}, "b_cap": 512}}, "high"),
    ({"profile": "rtx5090"}, "rtx5090"),
    ({"held_out_seeds": [1, 2]}, "seed 1 is both in tuning_seeds and in held_out_seeds"),
    ({"workload": {"family": "files", "tuning": ["no.jsonl"], "held_out": ["b.jsonl"]}}, "no.jsonl: there is no such"),
    ({"workload": {"family": "rag-bursts", "prompt_tokens": 100_000}}, "rag-bursts"),
    ({"workload": {"family": "heterogeneous", "phases": ["1"], "prompt_tokens": [8], "output_tokens": [8]}}, "'1'"),
    ({"time_budget": "5 minutes"}, "'5 minutes'"),
    ({"name": "../escape"}, "name"),
    ({"static_budgets": [16]}, "static budget 16"),
    ({"trials": True}, "trials is True; a number is wanted"),
    ({"stop_at_noise_pct": True}, "stop_at_noise_pct is True; a number is wanted"),
    ({"tuning_seeds": [False]}, "tuning_seeds.0 is False; a number is wanted"),
    ({"workload": {"family": "rag-bursts", "rates_per_s": [True]}}, "rates_per_s.0 is True; a number is wanted"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "word"), BAD, ids=[next(iter(changes)) + str(i) for i, (changes, _) in enumerate(BAD)]
)
def test_a_bad_study_is_refused_with_exit_code_2_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["tune", str(write_study(tmp_path, **changes))])
    assert found.exit_code == 2
    assert word in found.output
    assert "Traceback" not in found.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["study.yaml"]


def test_bad_input_fails_in_under_2_seconds_in_a_process_of_its_own(tmp_path: Path) -> None:
    study = write_study(tmp_path, trails=5)
    started = time.perf_counter()
    found = run_cli("tune", str(study), cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr.count("error:") == 1
    # The bar is 2 s on an idle machine (measured in benchmarks); a busy one gets more before this test fails.
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "there is no such study file"),
        ("a: [", "is not YAML"),
        ("- 1", "is a mapping"),
        ("!!python/object:os.x {}", "is not YAML"),
    ],
)
def test_an_unreadable_study_file_is_refused(tmp_path: Path, text: str | None, word: str) -> None:
    path = tmp_path / "study.yaml"
    if text is not None:
        path.write_text(text)
    found = CliRunner().invoke(app, ["tune", str(path)])
    assert (found.exit_code, word in found.output) == (2, True)


def test_a_folder_of_another_study_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run"
    tune(make_plan(small(trials=1)), path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for changes, word in (
        ({"seed": 1}, "seed is 0 there, 1 here"),
        ({"tuning_seeds": (5,)}, "tuning_seeds"),
        ({"profile": "rtx5090-qwen2.5-0.5b"}, "profile"),
    ):
        with pytest.raises(InvalidInput, match=word):
            tune(make_plan(small(trials=1, **changes)), path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    with pytest.raises(InvalidInput, match="exists and is not a run folder"):
        tune(make_plan(small()), tmp_path / "other")
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_work_in_one_run_folder(tmp_path: Path) -> None:
    study = write_study(tmp_path, trials=100_000)
    first = subprocess.Popen([sys.executable, "-m", "autotune.entry", "tune", str(study), "-q"], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while _count_trials(tmp_path / "runs/small/study.db") < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        second = run_cli("tune", str(study), cwd=tmp_path)
        assert second.returncode == 2
        assert "another ppas process is working in this run folder" in second.stderr
        assert first.poll() is None, "the first one goes on"
    finally:
        first.kill()
        first.wait()


def test_ctrl_c_finishes_with_what_there_is_and_the_same_command_goes_on(tmp_path: Path) -> None:
    study = write_study(tmp_path, trials=100_000, random_arm=True)
    database = tmp_path / "runs/small/study.db"
    first = subprocess.Popen(
        [sys.executable, "-m", "autotune.entry", "tune", str(study)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while _count_trials(database) < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGINT)
        shown, _ = first.communicate(timeout=120)
    finally:
        first.kill()
    assert first.returncode == 0
    assert "Ctrl-C ended the search after" in " ".join(shown.split())
    results = json.loads((tmp_path / "runs/small/results.json").read_text())
    assert 7 <= len(results["trials"]) < 100_000
    assert (tmp_path / "runs/small/report.html").exists()
    count = len(results["trials"])
    again = run_cli("tune", str(study), "--trials", str(count), "--no-random-arm", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    more = json.loads((tmp_path / "runs/small/results.json").read_text())["trials"]
    assert len(more) == count + 4  # the reference and three static budgets come on top of --trials
    assert [trial["setting"] for trial in more[:count]] == [trial["setting"] for trial in results["trials"]]


def test_the_main_job_ends_with_a_summary_and_its_files(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    found = run_cli("tune", str(study), "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert summary["origin"] == "simulated"
    assert [c["reference"] for c in summary["comparisons"]] == ["paper default", "best static", "best static"]
    assert all("simulated" in c["sentence"] or "the same" in c["sentence"] for c in summary["comparisons"])
    run = tmp_path / "runs/small"
    assert (run / "report.html").exists()
    manifest = json.loads((run / "manifest.json").read_text())["files"]
    assert {"results.json", "report.html", "export/vllm.yaml", "study.yaml"} <= set(manifest)

    shown = run_cli("tune", str(study), cwd=tmp_path)  # again: nothing left to search
    assert "Pick (simulated)" in shown.stdout
    assert str(Path("runs/small/report.html")) in shown.stdout
    (run / "report.html").unlink()
    assert run_cli("report", "runs/small", cwd=tmp_path).returncode == 0
    assert (run / "report.html").exists()
    exported = run_cli("export", "runs/small", "--trial", "2", "-o", "elsewhere", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert "--config elsewhere/vllm.yaml\n" in exported.stderr, "the command that serves with it"
    compared = run_cli("compare", "elsewhere/settings.json", "ppas", "--study", str(study), "--json", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert json.loads(compared.stdout)["origin"] == "simulated"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["report", "nowhere"], "is not a run folder"),
        (["export", "nowhere"], "is not a run folder"),
        (["simulate", "mbt-16"], "b_max is 16"),
        (["simulate", "2/16384"], "is no setting"),
        (["simulate", "no.json"], "no.json: there is no such file"),
        (["simulate", "ppas", "--trace", "no.jsonl"], "there is no such file"),
        (["compare", "ppas", "2/1024/2048"], "b_cap is 2048"),
        (["compare", "ppas", "mbt-2048", "--prefer", "p50"], "prefer is 'p50'"),
        (["trace", "generate", "rag-bursts", "--rate", "-1", "-o", "t.jsonl"], "out of range"),
        (["trace", "show", "no.jsonl"], "there is no such file"),
    ],
)  # fmt: skip
def test_every_command_refuses_bad_input_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, arguments)
    assert (found.exit_code, word in found.output) == (2, True), found.output
    assert list(tmp_path.iterdir()) == []


def test_traces_are_generated_shown_and_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    assert run.invoke(app, ["trace", "generate", "rag-bursts", "--rate", "1.2", "-o", "a.jsonl"]).exit_code == 0
    assert run.invoke(app, ["trace", "generate", "heterogeneous", "--seed", "3", "-o", "b.jsonl.gz"]).exit_code == 0
    assert json.loads(run.invoke(app, ["trace", "show", "a.jsonl", "--json"]).output)["requests"] == 25
    assert "arrivals over time" in run.invoke(app, ["trace", "show", "b.jsonl.gz"]).output
    assert run.invoke(app, ["trace", "validate", "a.jsonl", "b.jsonl.gz"]).exit_code == 0
    Path("a.jsonl").write_text(Path("a.jsonl").read_text().replace("25000", "25001", 1))
    found = run.invoke(app, ["trace", "validate", "a.jsonl", "b.jsonl.gz"])
    assert (found.exit_code, "the file was changed" in found.output) == (2, True)
    simulated = run.invoke(app, ["simulate", "ppas", "mbt-2048", "--trace", "b.jsonl.gz", "--json"])
    assert simulated.exit_code in (0, 2), simulated.output


@pytest.mark.parametrize(
    "text", ["ppas-plus-qwen3.8-27b", "2/2048/768/32768/global/s20", "2/2048/768 T32768 global s20"]
)
def test_a_label_of_a_table_names_the_setting_that_it_stands_for(text: str) -> None:
    params = parse_setting(text)
    assert params == published("ppas-plus-qwen3.8-27b")
    assert parse_setting(params.label()) == params


@pytest.mark.parametrize(
    "params",
    [
        PolicyParams.static(2048),
        PolicyParams.static(2048, max_num_seqs=20),
        PolicyParams(16384, 2048),
        PolicyParams(2048, 64, scope=Scope.GLOBAL, decode_guard=True, max_num_seqs=100),
    ],
)
def test_every_label_can_be_typed_back(params: PolicyParams) -> None:
    assert parse_setting(params.label()) == params


def test_a_sweep_prints_the_papers_table_and_measures_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = str(write_study(tmp_path))
    command = ["sweep", study, "--setting", "3/8192/1024", "-q"]
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert found["origin"] == "simulated"
    labels = ["2/16384/2048 prefill", "mbt-512", "mbt-2048", "mbt-16384", "3/8192/1024 prefill"]
    assert [one["label"] for one in found["settings"]] == labels
    ppas, static = (found["settings"][i]["regimes"] for i in (0, 2))
    ratios = [ppas[regime]["mean_latency_s"] / static[regime]["mean_latency_s"] for regime in ppas]
    expected = (1 - (ratios[0] * ratios[1]) ** 0.5) * 100
    times = {file: file.stat().st_mtime_ns for file in Path("runs/small/sweep").rglob("*.parquet")}
    assert len(times) == 5
    shown = CliRunner().invoke(app, command).output
    row = next(line for line in shown.splitlines() if "mbt-2048" in line)
    assert f"{expected:+.1f}" in row
    assert "(simulated)" in shown
    assert times == {file: file.stat().st_mtime_ns for file in Path("runs/small/sweep").rglob("*.parquet")}
