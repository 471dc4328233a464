"""Every command in docs/terminal.md and docs/ecosystem.md works as it stands there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from small_study import write_study
from terminal import ROOT, on_a_terminal
from test_export import TUNED, results_of
from typer.testing import CliRunner

from autotune.cli import app
from autotune.export import write_export

PAGES = ("docs/terminal.md", "docs/ecosystem.md")
NOT_RUN = {"ppas --install-completion": "it changes the user's shell"}
COMMANDS = [
    command
    for page in PAGES
    for command in re.findall(r"^ {4,}(ppas .+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    if command not in NOT_RUN
]


@pytest.fixture(scope="module")
def folder(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `ppas tune my-study.yaml` has run."""
    path = tmp_path_factory.mktemp("docs")
    write_study(path, name="my-study", trials=1).rename(path / "my-study.yaml")
    shutil.copytree(finished_run, path / "runs/my-study")
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_docs_ends_well(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = shlex.split(command)[1:]
    if words[0] in ("init", "tune"):  # what makes something starts from nothing
        folder = shutil.copytree(folder, tmp_path / "fresh", ignore=shutil.ignore_patterns("runs"))
        if words[0] == "init":
            (folder / "my-study.yaml").unlink()
    monkeypatch.chdir(folder)
    if words[0] == "top":
        assert on_a_terminal(words, [("q to leave", b"q")], cwd=folder)[0] == 0
    else:
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 0, found.output


def test_the_docs_name_every_file_of_an_export(tmp_path: Path) -> None:
    page = (ROOT / "docs/ecosystem.md").read_text(encoding="utf-8")
    for file in write_export(results_of(TUNED), tmp_path):
        assert f"`{file.name}`" in page, file.name
