"""What commands and study files say where something is missing or was meant otherwise: the cause, and what to give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from terminal import plain
from typer.testing import CliRunner

from autotune.cli import app
from autotune.spec import load_spec, parse_spec
from ppas_core.errors import InvalidInput

LIVE = "name: live\nbackend: vllm\nserver: {model: m, flags: [--dtype, float32]}\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(*arguments: str) -> tuple[int, str]:
    """The exit code, and all that is printed with its lines joined."""
    found = CliRunner().invoke(app, list(arguments))
    return found.exit_code, re.sub(r"\s+", " ", plain(found.output))


@pytest.mark.parametrize("command", ["tune", "sweep"])
def test_an_address_that_is_none_is_refused_before_anything_is_planned(command: str) -> None:
    Path("live.yaml").write_text(LIVE)
    code, output = said(command, "live.yaml", "--server-url", "foo")
    assert (code, "'foo' is not the address of a server; give one such as http://127.0.0.1:8000" in output) == (2, True)
    assert "plan:" not in output
    assert "Measuring" not in output
    assert not Path("runs").exists()


def test_an_address_that_is_none_is_refused_in_a_study_file_too() -> None:
    server = {"model": "m", "url": "127.0.0.1:8000"}
    with pytest.raises(InvalidInput, match=r"server\.url is '127\.0\.0\.1:8000'; .*such as http://127\.0\.0\.1:8000"):
        parse_spec({"name": "a", "backend": "vllm", "server": server}, "a.yaml")


def test_of_a_list_with_a_wrong_entry_only_the_entry_is_told() -> None:
    workload = {"family": "rag-bursts", "rates_per_s": [-1]}
    with pytest.raises(InvalidInput) as refused:
        parse_spec({"name": "a", "workload": workload}, "a.yaml")
    assert str(refused.value) == "a.yaml: workload.rates_per_s.0 is -1; input should be greater than 0"
    with pytest.raises(InvalidInput, match=r"workload\.rates_per_s: give at least one"):
        parse_spec({"name": "a", "workload": {**workload, "rates_per_s": []}}, "a.yaml")


@pytest.mark.parametrize("name", ["a b", "", ".hidden", "a/b", "x" * 65, "a\n"])
def test_a_name_that_is_none_is_refused_in_words(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_spec({"name": name}, "a.yaml")
    assert str(refused.value).endswith("use letters, digits, '.', '_' and '-', 64 at most, a letter or digit first")
    assert "^" not in str(refused.value)


def test_a_trace_file_that_is_missing_is_named_with_the_key_that_names_it() -> None:
    files = "workload: {family: files, tuning: [gone.jsonl], held_out: [x.jsonl]}\n"
    Path("own.yaml").write_text("name: own\n" + files)
    code, output = said("tune", "own.yaml")
    assert (code, "workload.tuning in the study file: gone.jsonl: " in output) == (2, True), output
    more = "more_workloads: [{family: files, tuning: [gone.jsonl], held_out: [x.jsonl]}]\n"
    Path("more.yaml").write_text("name: more\n" + more)
    with pytest.raises(InvalidInput, match=r"more_workloads\.0\.tuning in the study file: gone\.jsonl"):
        load_spec(Path("more.yaml")).build_traces(Path())


@pytest.mark.parametrize("command", [["evaluate"], ["fit", "-o", "p.json"]])
def test_a_file_that_holds_no_runs_is_refused_with_what_is_accepted(command: list[str]) -> None:
    Path("notes.txt").write_text("nothing here\n")
    code, output = said(command[0], "notes.txt", *command[1:])
    assert (code, "notes.txt: holds no run; allowed: a sweep log" in output) == (2, True), output
    assert "a table of runs (.csv or .csv.gz" in output
    assert "run folder" in output
    assert "trace_id" not in output


@pytest.mark.parametrize("arguments", [["ppas"], ["2/16384/2048/prefill", "ppas"], ["mbt-2048", "2048.json"]])
def test_a_setting_is_not_compared_with_itself(arguments: list[str]) -> None:
    Path("2048.json").write_text('{"b_max": 2048, "b_cap": 2048}')
    code, output = said("compare", *arguments)
    assert (code, "are the same setting" in output, "name another to compare with" in output) == (2, True, True), output


def test_calibrating_the_simulator_says_that_it_is_the_simulator_itself() -> None:
    Path("own.yaml").write_text(
        "name: own\nworkload: {family: rag-bursts, rates_per_s: [2.0], prompt_tokens: 8000}\ntuning_seeds: [0]\n"
        "held_out_seeds: [9]\n"
    )
    code, output = said("calibrate", "own.yaml", "-o", "mine.json", "--target", "20s", "-q")
    assert code == 0, output
    assert "the simulator, which is so calibrated against itself" in output
    assert "the study needs `backend: vllm`" in output
