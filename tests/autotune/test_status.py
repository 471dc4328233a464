"""`ppas status` and `ppas top`: what they say of a run in each of its states, from its folder alone."""

import fcntl
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_study import write_study
from terminal import COMMAND, ENVIRONMENT, on_a_terminal
from typer.testing import CliRunner

from autotune import stages
from autotune.cli import app
from autotune.heartbeat import FILE
from autotune.plan import make_plan
from autotune.planned import planned_stages_s
from autotune.results import StudyResults
from autotune.spec import load_spec
from autotune.status import RunStatus, Watch
from ppas_core.errors import InvalidInput

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A study that goes on for long, in a process of its own, after its first trials."""
    folder = tmp_path_factory.mktemp("running")
    study = write_study(folder, trials=100_000)
    process = subprocess.Popen([*COMMAND, "tune", str(study), "-q"], cwd=folder, env=ENVIRONMENT)
    run = folder / "runs/small"
    wait_for(lambda: (run / "trials/6/metrics.json").exists() and (run / FILE).exists())
    yield run, process
    process.kill()
    process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def copy(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def set_beat(run: Path, **changes: object) -> None:
    data = json.loads((run / FILE).read_text())
    (run / FILE).write_text(json.dumps({**data, **changes}))


def status_of(run: Path) -> RunStatus:
    return Watch(run).status()


def test_a_running_study_tells_stage_trials_best_and_eta_and_is_not_disturbed(
    running: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    run, process = running
    watch = Watch(run)
    wait_for(lambda: watch.status().stage == "Searching" and watch.status().stage_eta_s is not None)
    first = watch.status()
    assert first.state == "running"
    assert (first.name, first.backend) == ("small", "simulator")
    assert first.trials_total == 100_004, "the search's own and the known settings in the space"
    assert 0 < first.trials_done < first.trials_total
    assert first.best is not None
    assert first.best.gain_pct == max(line.gain_pct for line in first.trials if line.gain_pct is not None)
    assert first.best.gain_pct >= 0, "the reference itself is among the trials"
    assert first.eta_s is not None
    assert first.stage_eta_s is not None
    assert first.eta_s > first.stage_eta_s > 60, "held-out replays come on top"
    assert "held-out traces decide" in first.verdict
    wait_for(lambda: watch.status().trials_done > first.trials_done)
    assert process.poll() is None
    shown = CliRunner().invoke(app, ["status", str(run)])
    assert shown.exit_code == 0, shown.output
    for word in ("running", "Searching", "of 100004", "ETA", "about"):
        assert word in shown.output


def test_top_draws_a_running_study_until_q_and_gives_the_terminal_back(
    running: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    run, process = running
    code, screen = on_a_terminal(["top", str(run), "--every", "0.2"], [("q to leave", b"q")])
    assert code == 0
    for word in ("Searching", "best so far", "setting", "q to leave"):
        assert word in screen
    assert "\x1b[?1049h" in screen, "a screen of its own"
    assert screen.rindex("\x1b[?1049l") > screen.rindex("q to leave"), "which it leaves"
    assert "running" in screen[screen.rindex("\x1b[?1049l") :], "and the last look stays"
    assert process.poll() is None


def test_ctrl_c_leaves_top_with_130_and_the_study_goes_on(running: tuple[Path, subprocess.Popen[bytes]]) -> None:
    run, process = running
    code, screen = on_a_terminal(["top", str(run)], [("q to leave", b"\x03")])
    assert (code, process.poll()) == (130, None)
    assert "Interrupted" not in screen


def test_a_study_that_was_interrupted_or_killed_says_so_and_what_to_do(
    running: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    run, process = running
    process.kill()
    process.wait()
    killed = status_of(run)
    assert (killed.state, killed.is_over, killed.eta_s) == ("killed", True, None)
    assert killed.trials_done > 4
    shown = CliRunner().invoke(app, ["status", str(run)]).output
    assert "killed" in shown
    assert "give the same `ppas tune` command again" in shown

    study = write_study(tmp_path, trials=100_000, held_out_seeds=list(range(10, 90)))  # it takes long to finish
    again = subprocess.Popen(
        [*COMMAND, "tune", str(study), "-q"], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE
    )
    other = tmp_path / "runs/small"
    wait_for(lambda: (other / "trials/5/metrics.json").exists())
    again.send_signal(signal.SIGINT)  # asks to finish with what there is
    wait_for(lambda: "Ctrl-C" in (other / FILE).read_text())
    again.send_signal(signal.SIGINT)
    again.communicate()
    assert again.returncode == 130
    assert status_of(other).state == "interrupted"


def test_a_finished_study_gives_its_verdict_and_nothing_in_its_folder_changes(finished_run: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished_run.rglob("*")}
    found = CliRunner().invoke(app, ["status", str(finished_run), "--json"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.output)
    assert (data["state"], data["trials_done"], data["trials_total"]) == ("finished", 12, 12)
    assert data["verdict"] == json.loads((finished_run / "results.json").read_text())["comparisons"][0]["sentence"]
    assert len(data["trials"]) == 12
    assert CliRunner().invoke(app, ["status", str(finished_run), "--quiet"]).output == "finished\n"
    assert {file: file.stat().st_mtime_ns for file in finished_run.rglob("*")} == before


def test_a_run_folder_from_before_there_was_progress_is_finished_or_stopped(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    (run / FILE).unlink()
    assert status_of(run).state == "finished"
    (run / "results.json").unlink()
    found = status_of(run)
    assert (found.state, found.trials_done, found.trials_total) == ("stopped", 12, None)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"state": "running", "stages": [1, {"stage": 2}], "eta_s": "x"}'])
def test_damaged_progress_is_as_good_as_none(finished_run: Path, tmp_path: Path, text: str) -> None:
    run = copy(finished_run, tmp_path)
    (run / FILE).write_text(text)
    assert status_of(run).state in ("finished", "killed")
    assert CliRunner().invoke(app, ["status", str(run)]).exit_code == 0


@pytest.mark.parametrize("text", ["", "{}", "[]", "\x00", '{"version": 1, "trials": ['])
def test_results_that_cannot_be_read_are_damaged_and_not_finished(
    finished_run: Path, tmp_path: Path, text: str
) -> None:
    run = copy(finished_run, tmp_path)
    (run / "results.json").write_text(text)
    found = status_of(run)
    assert (found.state, found.is_over, found.trials_done) == ("damaged", True, 12)
    assert found.message is not None
    assert "results.json" in found.message
    assert "held-out traces decide" in found.verdict, "what can still be said"
    shown = CliRunner().invoke(app, ["status", str(run)])
    assert shown.exit_code == 0
    assert "damaged" in shown.output
    assert "the same `ppas tune` command again" in shown.output
    watch = Watch(run)
    assert watch.status().state == "damaged"
    shutil.copy(finished_run / "results.json", run / "results.json")
    assert watch.status().state == "finished", "it was made again"


def test_a_process_that_has_begun_and_said_nothing_yet_is_starting(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status_of(run).state == "starting"
        set_beat(run, state="running", pid=2**22 + 1, process_start="1")
        assert status_of(run).state == "running", "a process that this machine's table does not show"
    assert status_of(run).state == "killed"


def test_asking_takes_no_lock_that_a_study_would_meet(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    status_of(run)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_failures_are_counted_by_reason_and_have_no_gain(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    for number, reason in ((5, "the server died [red]"), (6, "the server died [red]"), (7, "timed out\x1b[2J")):
        file = run / f"trials/{number}/metrics.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "reason": reason, "objectives": {}}))
    found = status_of(run)
    assert found.failures == {"the server died [red]": 2, "timed out\x1b[2J": 1}
    assert found.trials[5].gain_pct is None
    shown = CliRunner().invoke(app, ["status", str(run)]).output
    assert "2 × the server died [red]" in shown
    assert "\x1b" not in shown


def test_of_a_finished_study_the_verdict_pick_and_export_are_told_and_not_the_flattered_best(
    finished_run: Path,
) -> None:
    results = StudyResults.load(finished_run / "results.json")
    found = status_of(finished_run)
    assert found.outcome is not None
    told = (found.outcome.pick, found.outcome.exported, found.outcome.exported_role)
    assert told == (results.pick.label, results.exported.label, results.exported_role)
    shown = CliRunner().invoke(app, ["status", str(finished_run)]).output
    assert f"exported  {results.exported_role}, {results.exported.label}" in shown
    config = finished_run / "export/vllm.yaml"
    assert re.search(rf"^serve     ppas serve .*--config {re.escape(str(config))}", shown, re.MULTILINE), shown
    assert "best " not in shown.replace("best static", "")


def test_what_the_exported_setting_costs_stays_told_after_the_study(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    data = json.loads((run / "results.json").read_text())
    data["comparisons"][0]["costs"] = ["mean TTFT [48] % worse"]
    for role, told in ((data["comparisons"][0]["candidate"], True), ("reference", False)):
        (run / "results.json").write_text(json.dumps({**data, "exported_role": role}))
        shown = CliRunner().invoke(app, ["status", str(run)]).output
        assert ("cost      mean TTFT [48] % worse" in shown) == told, shown


def test_the_doubts_about_a_study_and_its_noise_stay_told_after_it(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    data = json.loads((run / "results.json").read_text())
    metric = data["comparisons"][0]["preferred_metric"]
    bounds = {"replay_pct": 8.4, "objective_pct": 5.9, "visible_pct": 28.1, "visible_held_out_pct": 14.07}
    data |= {
        "warnings": ["Ctrl-C ended the search after 57 of 307 settings [dim]"],
        "noise": [{"metric": metric, **bounds, "repeats": 3, "num_traces": 2}],
        "cold": {
            "metric": metric,
            "num_traces": 4,
            "change_pct": -16.4,
            "reason": "16.4 % below hot",
            "noise_pct": 19.9,
        },
    }
    (run / "results.json").write_text(json.dumps(data))
    shown = CliRunner().invoke(app, ["status", str(run)]).output
    assert "note      Ctrl-C ended the search after 57 of 307 settings [dim]\n" in shown
    assert re.search("^noise     .*differences below 14.1 % are not found$", shown, re.MULTILINE), shown
    assert "16.4" not in shown, "a cold check within the noise is no doubt"
    outcome = json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)["outcome"]
    assert (outcome["notes"], outcome["cold"]) == (data["warnings"], "16.4 % below hot")
    assert len(outcome["noise"]) == 1


def test_a_trial_that_was_stopped_early_is_no_failure_and_never_the_best(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    file = run / "trials/5/metrics.json"
    ratios = {"mean_latency_s": 0.01, "p95_latency_s": 0.01}
    file.write_text(json.dumps({**json.loads(file.read_text()), "stopped": "behind", "objectives": ratios}))
    found = status_of(run)
    assert (found.trials_stopped, found.failures, found.trials[5].gain_pct) == (1, {}, None)
    assert found.best is not None
    assert found.best.folder != "trials/5"
    assert "1 trials early" in CliRunner().invoke(app, ["status", str(run)]).output


PLANNED = {
    "Measuring the noise (reference against itself)": 30.0,
    "Searching": 100.0,
    "Replaying held-out traces": 60.0,
}


@pytest.mark.parametrize(
    ("stages", "stage_eta_s", "eta_s"),
    [
        (["Measuring the reference"], None, 190.0),
        (["Measuring the reference", "Measuring the noise (reference against itself)"], 22.0, 182.0),
        (["Measuring the noise (reference against itself)", "Sweeping the space"], 3.0, 163.0),
        (["Searching"], None, 110.0),
        (["Searching"], 20.0, 80.0),
        (["Searching", "Replaying held-out traces"], 22.0, 22.0),
        (["Searching", "Replaying held-out traces", "Comparing on held-out traces"], None, 0.0),
    ],
    ids=str,
)
def test_the_eta_of_a_planned_study_is_the_studys_and_not_the_stages(
    finished_run: Path, tmp_path: Path, stages: list[str], stage_eta_s: float | None, eta_s: float
) -> None:
    run = copy(finished_run, tmp_path)
    (run / "results.json").unlink()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = [{"stage": stage, "total": 10, "done": 5, "seconds": 1.0} for stage in stages]
        set_beat(
            run, state="running", pid=2**22 + 1, process_start="1", eta_s=stage_eta_s, stages=told, planned_s=PLANNED
        )
        assert status_of(run).eta_s == pytest.approx(eta_s)
        shown = CliRunner().invoke(app, ["status", str(run)]).output
        assert ("to the end of the run" in shown, "to the end of this stage" in shown) == (
            True,
            stage_eta_s is not None,
        )


def test_the_eta_of_a_stage_is_not_given_out_as_that_of_a_study_whose_plan_knows_none(
    finished_run: Path, tmp_path: Path
) -> None:
    run = copy(finished_run, tmp_path)
    (run / "results.json").unlink()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stages = [{"stage": "Measuring known settings outside the space", "total": 10, "done": 5, "seconds": 1.0}]
        set_beat(run, state="running", pid=2**22 + 1, process_start="1", eta_s=22.0, stages=stages)
        assert (status_of(run).eta_s, status_of(run).stage_eta_s) == (None, 22.0)
        shown = CliRunner().invoke(app, ["status", str(run)]).output
        assert "about 22 s to the end of this stage, of the run not known yet" in shown


def test_the_stages_that_a_live_plan_names_are_the_ones_that_a_study_begins(tmp_path: Path) -> None:
    plan = make_plan(load_spec(ROOT / "examples/live-cpu.yaml"), ROOT / "examples")
    planned = planned_stages_s(plan)
    sources = "".join(file.read_text() for file in (ROOT / "autotune").rglob("*.py") if file.name != "planned.py")
    names = {value: name for name, value in vars(stages).items() if name.isupper()}
    assert all(f"begin(stages.{names[stage]}, " in sources for stage in planned)
    assert sum(planned.values()) == pytest.approx(plan.estimate().total_s())
    assert min(planned.values()) > 0
    assert planned_stages_s(make_plan(load_spec(ROOT / "examples/demo.yaml"), ROOT / "examples")) == {}


def test_the_eta_keeps_within_the_time_budget(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path)
    (run / "results.json").unlink()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stages = [{"stage": "Searching", "total": 1000, "done": 12, "seconds": 120.0}]
        set_beat(run, state="running", pid=2**22 + 1, process_start="1", eta_s=9880.0, stages=stages)
        for number in range(12):
            file = run / f"trials/{number}/metrics.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "duration_s": 10.0}))
        found = status_of(run)
        assert found.stage_eta_s == 9880.0
        # 2 tuning and 2 held-out traces: three finalists replay as many traces as three trials.
        assert found.eta_s == pytest.approx(9880.0 + 3 * 10.0)
        spec = (run / "study.yaml").read_text().replace("time_budget: null", "time_budget: 5m")
        (run / "study.yaml").write_text(spec)
        assert status_of(run).eta_s == pytest.approx(300 - 120 + 3 * 10.0)
        for number, change in ((10, {"starting_s": 40.0}), (11, {"reason": "the server died"})):
            file = run / f"trials/{number}/metrics.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        assert status_of(run).eta_s == pytest.approx(300 - 120 - 40 + 3 * 10.0), (
            "starts and failures use up the budget too"
        )


def test_a_sweep_has_a_status_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["sweep", str(write_study(tmp_path)), "-q"]).exit_code == 0
    found = status_of(Path("runs/small"))
    assert (found.state, found.stage, found.stage_done, found.stage_total) == ("finished", "Sweeping", 4, 4)


def test_before_any_trial_the_reference_is_no_gain_and_no_finished_trial_is_spoken_of(
    finished_run: Path, tmp_path: Path
) -> None:
    run = copy(finished_run, tmp_path)
    for left in ("trials", "results.json"):
        (shutil.rmtree if left == "trials" else Path.unlink)(run / left)
    for other in (run / "references").iterdir():
        if other.name != "reference":
            (shutil.rmtree if other.is_dir() else Path.unlink)(other)
    set_beat(run, state="interrupted")
    assert status_of(run).best_is_reference
    shown = CliRunner().invoke(app, ["status", str(run)]).output
    assert re.search(r"^best      2/.* the reference itself \(references/reference\)$", shown, re.MULTILINE), shown
    assert "verdict   nothing but the reference measured yet\n" in shown
    assert "give the same `ppas tune` command again: no trial is finished yet\n" in shown
    assert "%" not in shown


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is not a run folder"):
        Watch(tmp_path)
