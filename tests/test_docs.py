"""What is written about the product is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.plan import make_plan
from autotune.spec import load_spec

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_the_study_reference_is_what_the_code_checks() -> None:
    script = ROOT / "scripts/write_study_reference.py"
    found = subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT, check=False)
    assert found.returncode == 0, "run scripts/write_study_reference.py"


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_is_a_study_that_could_start(path: Path) -> None:
    assert make_plan(load_spec(path), path.parent).tuning


def test_the_readme_opens_with_the_two_commands_and_names_only_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.split("#")[0].strip() for line in readme.splitlines() if line.startswith("    make ")]
    assert commands[:2] == ["make demo", "make test"]
    for target in commands:
        assert re.search(rf"^{target.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"`((?:docs|examples|benchmarks|scripts)/[\w./-]*)`", readme):
        assert (ROOT / name).exists(), name
