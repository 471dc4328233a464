"""What every command keeps to: exit codes, JSON and nothing else in a pipe, quiet, colours, completion."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from small_study import write_study
from terminal import ENVIRONMENT, on_a_terminal, plain
from typer.testing import CliRunner

from autotune.cli import app
from traces.format import Trace, TraceRequest, write_trace

RUN = "{run}"
STUDY = "{study}"
OK, NO_RESULT, BAD_INPUT = 0, 1, 2

CODES = [
    (["--version"], OK),
    (["--help"], OK),
    (["tune", STUDY, "-q"], OK),
    (["tune", "no.yaml"], BAD_INPUT),
    (["tune"], BAD_INPUT),
    (["tune", STUDY, "--trials", "0"], BAD_INPUT),
    (["tune", STUDY, "--run", "file.jsonl/x"], BAD_INPUT),
    (["sweep", STUDY, "-q"], OK),
    (["sweep", STUDY, "-s", "nothing"], BAD_INPUT),
    (["status", RUN], OK),
    (["status", "nowhere"], BAD_INPUT),
    (["top", "nowhere"], BAD_INPUT),
    (["top", RUN], BAD_INPUT),  # without a terminal
    (["report", RUN, "-o", "r.html"], OK),
    (["report", "nowhere"], BAD_INPUT),
    (["export", RUN, "-o", "e"], OK),
    (["export", RUN, "--results", "-o", "t"], OK),
    (["export", RUN, "--trial", "99"], BAD_INPUT),
    (["init", "new.yaml"], OK),
    (["init", "file.jsonl"], BAD_INPUT),
    (["simulate", "ppas", "--trace", "file.jsonl"], OK),
    (["simulate", "pppas"], BAD_INPUT),
    (["compare", "ppas", "mbt-2048", "--trace", "file.jsonl"], OK),
    (["compare", "ppas", "pppas"], BAD_INPUT),
    (["trace", "show", "file.jsonl"], OK),
    (["trace", "show", "no.jsonl"], BAD_INPUT),
    (["trace", "validate", "file.jsonl"], OK),
    (["replay", "--url", "http://127.0.0.1:9", "--trace", "file.jsonl"], BAD_INPUT),
    (["serve", "m", "--config", "no.yaml"], BAD_INPUT),
    (["nothing"], BAD_INPUT),
    (["tune", STUDY, "--nothing"], BAD_INPUT),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a study file and a trace."""
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, trials=1)
    write_trace(Trace(name="t", requests=(TraceRequest(0, 9, 2), TraceRequest(1, 9, 2))), tmp_path / "file.jsonl")
    return tmp_path


def filled(arguments: list[str], run: Path) -> list[str]:
    return [str(run) if word == RUN else "study.yaml" if word == STUDY else word for word in arguments]


@pytest.mark.parametrize(("arguments", "code"), CODES, ids=[" ".join(arguments) for arguments, _ in CODES])
def test_the_exit_code_tells_how_it_went_and_an_error_is_one_message(
    folder: Path, finished_run: Path, arguments: list[str], code: int
) -> None:
    found = CliRunner().invoke(app, filled(arguments, finished_run))
    assert found.exit_code == code, found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert "Traceback" not in found.output
    if code != OK:
        assert found.stdout == "", "errors go to stderr"
        assert "rror" in found.stderr


JSON = [
    ["tune", STUDY],
    ["sweep", STUDY],
    ["status", RUN],
    ["report", RUN, "-o", "r.html"],
    ["export", RUN, "-o", "e"],
    ["export", RUN, "--results", "-o", "t"],
    ["init", "new.yaml"],
    ["simulate", "ppas", "--trace", "file.jsonl"],
    ["compare", "ppas", "mbt-2048", "--trace", "file.jsonl"],
    ["trace", "show", "file.jsonl"],
]


def test_doctor_says_in_json_and_by_its_code_whether_ppas_can_act_here() -> None:
    found = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(found.stdout)
    assert {"ppas-autotune", "python", "vllm", "launch", "environment"} <= {finding["topic"] for finding in findings}
    assert found.exit_code == (NO_RESULT if any(finding["ok"] is False for finding in findings) else OK)


@pytest.mark.parametrize("arguments", JSON, ids=" ".join)
def test_json_is_all_that_stdout_gets(folder: Path, finished_run: Path, arguments: list[str]) -> None:
    found = CliRunner().invoke(app, [*filled(arguments, finished_run), "--json"])
    assert found.exit_code == OK, found.output
    json.loads(found.stdout)


QUIET = [arguments for arguments in JSON if arguments[0] in ("tune", "report", "export", "init")]


@pytest.mark.parametrize("arguments", QUIET, ids=" ".join)
def test_quiet_is_quiet(folder: Path, finished_run: Path, arguments: list[str]) -> None:
    found = CliRunner().invoke(app, [*filled(arguments, finished_run), "--quiet"])
    assert (found.exit_code, found.output) == (OK, "")


def test_a_pipe_gets_no_colour_and_a_terminal_does_unless_it_wants_none(folder: Path, finished_run: Path) -> None:
    command = ["status", str(finished_run)]
    piped = subprocess.run(
        [sys.executable, "-m", "autotune.entry", *command], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "\x1b" not in piped.stdout + piped.stderr
    code, coloured = on_a_terminal(command)
    assert (code, "\x1b[1;34m" in coloured or "\x1b[1m\x1b[34m" in coloured) == (0, True), repr(coloured)
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        _, bare = on_a_terminal(command, **environment)
        assert not any(f"{number}m" in bare for number in range(30, 38)), repr(bare)
        assert plain(bare).split()[:2] == ["study", "small"]


def test_progress_on_a_terminal_shows_stage_trial_best_and_eta(folder: Path) -> None:
    write_study(folder, trials=12)
    code, screen = on_a_terminal(["tune", "study.yaml"], cwd=folder)
    shown = plain(screen)
    assert code == 0, shown
    assert re.search(r"Searching ━+ (\d\d)/\1 \d:\d\d:\d\d ETA 0 s", shown), shown
    assert re.search(r"best so far [+-]\d+\.\d % on the reference: (ahead|less than the 1\.0 % that count)", shown), (
        shown
    )
    assert "Pick (simulated)" in shown


def test_progress_in_a_log_has_no_control_characters(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.entry", "tune", "study.yaml"],
        capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, check=True,
    )  # fmt: skip
    assert "Searching: 5 steps …" in done.stderr
    assert re.search(r"Searching: done in (under 1|\d+) s \(best so far", done.stderr)
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [("bash", "ppas st", "status"), ("bash", "ppas status --js", "--json"), ("zsh", "ppas in", "init")],
)
def test_a_shell_completes_commands_and_options(shell: str, words: str, expected: str) -> None:
    environment = {
        **os.environ, "_PPAS_COMPLETE": f"complete_{shell}", "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1), "_TYPER_COMPLETE_ARGS": words,
    }  # fmt: skip
    script = "from autotune.entry import main; import sys; sys.argv = ['ppas']; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True,
        env={**environment, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}, check=False,
    )  # fmt: skip
    assert expected in done.stdout, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell_can_be_shown(shell: str) -> None:
    script = (
        "from autotune.entry import main; import sys; sys.argv = ['ppas', '--show-completion', sys.argv[1]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, shell], capture_output=True, text=True,
        env={**ENVIRONMENT, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}, check=False,
    )  # fmt: skip
    assert (done.returncode, "_PPAS_COMPLETE" in done.stdout) == (0, True), done.stderr


def test_every_command_says_what_it_is_for() -> None:
    def commands(group: typer.core.TyperGroup, path: str) -> list[tuple[str, typer.core.TyperCommand]]:
        found = []
        for name, command in group.commands.items():
            nested = commands(command, f"{path} {name}") if hasattr(command, "commands") else []
            found += nested or [(f"{path} {name}", command)]
        return found

    for name, command in commands(typer.main.get_command(app), "ppas"):  # type: ignore[arg-type]
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None) or parameter.name == "ctx", f"{name}: {parameter.name}"
