"""The command line answers at once: what only a study needs is not loaded to show help or where a run stands."""

import subprocess
import sys

HEAVY = {"numpy", "scipy", "pandas", "pyarrow", "pydantic", "optuna", "plotly", "numba", "yaml", "aiohttp", "jinja2"}


def loaded(code: str) -> set[str]:
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return HEAVY & set(found.stdout.split())


def test_the_command_line_itself_loads_none_of_the_packages_that_a_study_needs() -> None:
    assert loaded("import autotune.cli") == set()


def test_where_a_run_stands_is_told_without_the_packages_that_measure_and_draw() -> None:
    assert loaded("import autotune.status") <= {"numpy", "pydantic", "yaml"}
