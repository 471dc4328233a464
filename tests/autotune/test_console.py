"""What a command says when the machine, the terminal or a damaged file gets in its way: one message, an honest code."""

import errno
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from small_study import small, write_study
from typer.testing import CliRunner

from autotune.cli import app, console
from autotune.plan import make_plan
from autotune.tune import tune
from traces.format import Trace, TraceRequest, write_trace

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "autotune.entry"]


def start(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*COMMAND, *arguments], cwd=cwd, env=environment, **streams)


def raising(error: BaseException) -> tuple[int, str]:
    """Exit code and output of a command that fails with `error`."""
    commands = typer.Typer()

    @commands.command()
    @console.reports_errors
    def fail() -> None:
        raise error

    found = CliRunner().invoke(commands, [])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, "a/b: No space left on device; free some space"),
        (OSError(errno.EIO, "Input/output error", "f"), 1, "f: Input/output error; give the same command again"),
        (OSError(errno.EROFS, "Read-only file system", "f"), 2, "f: Read-only file system; name a place"),
        (PermissionError(errno.EACCES, "Permission denied", "f"), 2, "f: Permission denied; check its permissions"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "f"), 2, "f: Is a directory; name a file"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2, "x: File name too long; choose a shorter name"),
        (OSError("odd"), 1, "odd; give the same command again"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "Broken pipe; give the same command again"),
        (MemoryError(), 1, "out of memory"),
        (UnicodeEncodeError("utf-8", "a\ud800", 1, 2, "surrogates not allowed"), 2, "'\\ud800' cannot be written"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_an_error_of_the_system_is_one_message_with_a_remedy(error: BaseException, code: int, words: str) -> None:
    found, output = raising(error)
    assert (found, words in output) == (code, True), output
    assert len(output.strip().splitlines()) == 1


def test_text_of_a_file_is_neither_markup_nor_a_command_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.table("[/red] \x1b[2J", ["[/x]", ":bug:"], [["[bold]a", "\x1b]0;t\x07 \ud800"]])
    shown = capsys.readouterr().out
    for text in ("[/red] \\x1b[2J", "[/x]", ":bug:", "[bold]a", "\\x1b]0;t\\x07 \\ud800"):
        assert text in shown
    assert "\x1b" not in shown
    assert "[/red]" in raising(OSError(errno.EIO, "[/red]"))[1]


def test_a_trace_with_hostile_names_is_shown_and_simulated(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(Trace(name="[/red]\x1b[31m", requests=(TraceRequest(0, 9, 2),), regime="[/x]\x1b]0;t\x07"), path)
    for arguments in (["trace", "show", str(path)], ["simulate", "ppas", "--trace", str(path)]):
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 0, found.output
        assert "\x1b" not in found.output


def test_an_encoding_without_the_characters_gets_escapes_and_json_stays_json(tmp_path: Path) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    write_trace(Trace(name="größe", requests=(TraceRequest(0, 9, 2),), regime="λ=1"), tmp_path / "ü.jsonl")
    for arguments, words in (
        (["trace", "show", "ü.jsonl"], b"gr\\xf6\\xdfe"),
        (["trace", "validate", "ü.jsonl"], b"ok: \\xfc.jsonl"),
        (["trace", "validate", "λ.jsonl"], b"\\u03bb.jsonl: there is no such file"),
        (["trace", "show", "ü.jsonl", "--json"], b'"gr\\u00f6\\u00dfe"'),
    ):
        out, err = start(*arguments, cwd=tmp_path, env=ascii_only).communicate()
        assert words in out + err, err
    assert json.loads(out)["name"] == "größe"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["tune", "--help"], ["trace", "show", "t.jsonl"], ["trace", "show", "t.jsonl", "--json"]]
)
def test_a_reader_that_left_is_no_failure(tmp_path: Path, arguments: list[str]) -> None:
    write_trace(Trace(name="t", requests=(TraceRequest(0, 9, 2),)), tmp_path / "t.jsonl")
    process = start(*arguments, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_study_goes_on_when_nobody_reads_its_progress(tmp_path: Path) -> None:
    process = start("tune", str(write_study(tmp_path, trials=2)), cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(120) == 0
    assert (tmp_path / "runs/small/report.html").exists()


IMPORTING = """
import importlib.abc, os, sys
from autotune import entry
class Tell(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "autotune.cli":
            os.write(1, b".")
sys.meta_path.insert(0, Tell())
entry.main()
"""
"""`ppas`, with a byte on its output when its imports begin."""


def test_an_interrupt_during_the_imports_leaves_quietly(tmp_path: Path) -> None:
    for wait_s in (0.0, 0.15, 0.3):
        process = subprocess.Popen(
            [sys.executable, "-c", IMPORTING, "--help"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (130, 0)  # 0: it was quicker
        assert b"Traceback" not in err


def test_a_study_that_is_told_to_end_again_and_again_still_ends_with_130(tmp_path: Path) -> None:
    process = start("tune", str(write_study(tmp_path, trials=5000)), cwd=tmp_path)
    assert process.stderr is not None
    while not process.stderr.readline().startswith(b"Searching"):
        assert process.poll() is None
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert (process.returncode, b"Interrupted" in process.stderr.read()) == (130, True)
    process.communicate()


def test_a_disk_that_fills_up_ends_the_study_with_1_and_the_same_command_finishes_it(tmp_path: Path) -> None:
    study = write_study(tmp_path, trials=2)
    make_plan(small())  # the simulator is compiled by now
    limit = 300_000  # bytes a file; the report is larger

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start("tune", str(study), "-q", cwd=tmp_path, preexec_fn=limited)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert b"give the same command again" in err
    assert b"Traceback" not in err
    assert not list((tmp_path / "runs/small").glob("**/*.tmp"))
    assert start("tune", str(study), "-q", cwd=tmp_path).wait() == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    tune(make_plan(small(trials=1)), path)
    with sqlite3.connect(path / "study.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def _garbage(database: Path) -> None:
    database.write_bytes(bytes(range(256)) * 16)


def _cut(database: Path) -> None:
    os.truncate(database, 20_000)


def _folder(database: Path) -> None:
    database.unlink()
    database.mkdir()


def _foreign(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE trial_user_attributes SET value_json = '7' WHERE key = 'measured'")


@pytest.mark.parametrize("damage", [_garbage, _cut, _folder, _foreign])
def test_a_damaged_database_is_bad_input(finished: Path, tmp_path: Path, damage: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for side in ("study.db-wal", "study.db-shm"):
        (run / side).unlink(missing_ok=True)
    damage(run / "study.db")
    found = CliRunner().invoke(app, ["tune", str(write_study(tmp_path, trials=2)), "--run", str(run), "-q"])
    assert (found.exit_code, "study.db: is damaged" in found.output) == (2, True), found.output
    assert "Traceback" not in found.output


def test_an_output_that_is_no_file_is_refused_and_stays(finished: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target, words in ((pipe, "is a device, pipe or socket"), (tmp_path, "is a folder; name a file in it")):
        found = CliRunner().invoke(app, ["report", str(finished), "-o", str(target)])
        assert (found.exit_code, words in found.output) == (2, True), found.output
    assert pipe.is_fifo()
