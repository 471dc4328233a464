"""The chain of digests from the traces to the export is computed again, and tells what differs."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.verify import verify
from ppas_core.errors import InvalidInput


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def findings(path: Path) -> set[tuple[str, str]]:
    return {(finding.what, finding.path) for finding in verify(path).findings}


def test_a_finished_run_and_its_export_are_as_recorded(finished_run: Path, tmp_path: Path) -> None:
    found = verify(finished_run)
    assert found.findings == ()
    assert found.checked > len(list(finished_run.rglob("metrics.json")))
    taken = Path(shutil.copytree(finished_run / "export", tmp_path / "taken"))
    assert verify(taken).findings == ()
    assert verify(taken).kind == "export"


def test_a_changed_request_of_a_trace_breaks_the_chain_to_identity_results_and_export(run: Path) -> None:
    lines = (run / "traces" / "000.jsonl").read_text().splitlines(keepends=True)
    request = json.loads(lines[1])
    request["prompt_tokens"] += 1
    lines[1] = json.dumps(request, separators=(",", ":")) + "\n"
    (run / "traces" / "000.jsonl").write_text("".join(lines))
    assert {
        ("changed", "traces/000.jsonl"),
        ("broken", "identity.json"),
        ("broken", "results.json"),
        ("broken", "export/settings.json"),
    } <= findings(run)


def test_changed_results_no_longer_belong_to_the_export_even_with_a_new_manifest(run: Path) -> None:
    changed(run / "results.json", '"exported_role"', '"exported_role" ')
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["files"]["results.json"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert findings(run) == {("added", "results.json"), ("broken", "export/settings.json")}
    assert findings(run / "export") == {("broken", "settings.json")}


def test_a_file_of_an_export_that_was_edited_or_lost_is_told_without_the_run(run: Path, tmp_path: Path) -> None:
    taken = Path(shutil.copytree(run / "export", tmp_path / "taken"))
    with (taken / "kubernetes.yaml").open("a") as file:
        file.write("# edited\n")
    (taken / "compose.yaml").unlink()
    assert findings(taken) == {("changed", "kubernetes.yaml"), ("missing", "compose.yaml")}


def test_changed_settings_of_an_export_do_not_match_their_digest(run: Path) -> None:
    data = json.loads((run / "export" / "settings.json").read_text())
    data["params"]["b_max"] *= 2
    (run / "export" / "settings.json").write_text(json.dumps(data))
    assert ("broken", "settings.json") in findings(run / "export")


def test_a_changed_lost_or_added_measurement_is_told(run: Path) -> None:
    changed(run / "trials" / "1" / "metrics.json", "duration_s", "duration_x")
    (run / "trials" / "2" / "requests.parquet").unlink()
    (run / "trials" / "99").mkdir()
    (run / "trials" / "99" / "metrics.json").write_text("{}")
    assert findings(run) == {
        ("changed", "trials/1/metrics.json"),
        ("missing", "trials/2/requests.parquet"),
        ("added", "trials/99/metrics.json"),
    }


def test_damaged_files_are_findings_and_not_crashes(run: Path) -> None:
    for name in ("manifest.json", "results.json", "identity.json"):
        (run / name).write_text("[")
    assert {("broken", name) for name in ("manifest.json", "results.json", "identity.json")} <= findings(run)


def test_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="neither a run folder nor an export"):
        verify(tmp_path)


def test_the_command_says_what_differs_and_exits_with_one(run: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["verify", str(run)])
    assert good.exit_code == 0
    assert "all as recorded" in good.output
    (run / "report.html").write_text("other")
    bad = runner.invoke(app, ["verify", str(run)])
    assert bad.exit_code == 1
    assert "changed: report.html" in bad.output
    told = runner.invoke(app, ["verify", str(run), "--json"])
    assert told.exit_code == 1
    assert json.loads(told.stdout)["findings"][0]["path"] == "report.html"
    assert runner.invoke(app, ["verify", str(run.parent)]).exit_code == 2


def rewritten(file: Path, **keys: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.parametrize("name", ["/dev/zero", "/etc/hostname", "../../elsewhere", "a/../../b", "nul\0byte", "\ud800"])
def test_a_name_that_leads_out_of_the_folder_is_told_and_what_lies_there_is_not_read(run: Path, name: str) -> None:
    settings, manifest = run / "export" / "settings.json", run / "manifest.json"
    rewritten(settings, files={**json.loads(settings.read_text())["files"], name: "sha256:0"})
    rewritten(manifest, files={**json.loads(manifest.read_text())["files"], name: "sha256:0"})
    told = {finding.path: finding.reason for finding in verify(run).findings if finding.what == "broken"}
    assert "no file in its folder" in told["manifest.json"]
    assert "no file in its folder" in told["export/settings.json"]


@pytest.mark.parametrize("value", [[1], "text", 5, [[1, 2]], {"digest": 1}], ids=str)
def test_lists_of_files_studies_and_traces_that_are_something_else_are_findings(run: Path, value: object) -> None:
    rewritten(run / "results.json", traces=value)
    rewritten(run / "export" / "settings.json", files=[value], study=value, traces=value)
    rewritten(run / "identity.json", measured_on=value)
    (run / "profile.json").write_text("{}")
    assert {("broken", "results.json"), ("broken", "export/settings.json")} <= findings(run)
    assert ("broken", "settings.json") in findings(run / "export")


@pytest.mark.parametrize("name", ["export/vllm.yaml", "trials/1/metrics.json", "manifest.json", "traces/000.jsonl"])
def test_a_pipe_in_place_of_a_file_makes_nobody_wait(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    assert name in {finding.path for finding in verify(run).findings}
