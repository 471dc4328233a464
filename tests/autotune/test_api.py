"""The Python API: light to import, typed, and the same study as the command's."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_study import SMALL, small, write_study
from terminal import ENVIRONMENT, ROOT

import autotune
from autotune import StudyResults, StudySpec, load_results, tune
from ppas_core.errors import InvalidInput


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_but_it() -> None:
    code = (
        "import sys; before = set(sys.modules); import autotune; from autotune import tune, load_results\n"
        "print(*sorted(m for m in set(sys.modules) - before if '.' not in m and m not in sys.stdlib_module_names))"
    )
    assert python(code).split() == ["autotune"]


def test_tune_stays_the_function_whatever_was_imported_before() -> None:
    code = (
        "import autotune.tune, autotune\nfrom autotune.tune import tune as inner\nfrom autotune import tune\n"
        "print(callable(tune), tune is autotune.tune, tune.__module__, inner.__module__)"
    )
    assert python(code).split() == ["True", "True", "autotune", "autotune.tune"]


def test_every_public_name_is_there_and_others_are_refused() -> None:
    module = importlib.import_module("autotune")
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        autotune.nothing  # noqa: B018


@pytest.mark.parametrize("kind", ["file", "text", "dictionary", "spec"])
def test_a_study_is_given_as_file_dictionary_or_spec_and_its_result_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    study = {
        "file": write_study(tmp_path, trials=1), "text": str(write_study(tmp_path, trials=1)),
        "dictionary": {**SMALL, "trials": 1}, "spec": small(trials=1),
    }[kind]  # fmt: skip
    results = tune(study)  # type: ignore[arg-type]
    assert isinstance(results, StudyResults)
    assert results == load_results("runs/small") == load_results(Path("runs/small/results.json"))
    for name in ("report.html", "export/vllm.yaml", "study.db", "manifest.json"):
        assert (tmp_path / "runs/small" / name).exists(), name
    assert json.loads(Path("runs/small/progress.json").read_text())["state"] == "finished"


def test_bad_input_raises_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="did you mean 'trials'"):
        tune({**SMALL, "trails": 1})
    with pytest.raises(InvalidInput, match="no such file"):
        load_results("nowhere")
    assert list(tmp_path.iterdir()) == []
    assert StudySpec(name="a").name == "a"


def test_the_example_runs_and_prints_its_result(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/python_api.py"],
        capture_output=True, text=True, cwd=tmp_path, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exported: ")
    assert done.stdout.endswith("drawn: True\n")
    assert "tuned against paper default: " in done.stdout
