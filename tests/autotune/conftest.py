"""One finished study that tests may read, and copy where they change it."""

import gc
from pathlib import Path

import pytest
from small_study import small

from autotune.cli.pipeline import run_study
from autotune.progress import Silent


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a small simulated study with all that `ppas tune` leaves."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run_study(small(trials=8), path, base=Path(), progress=Silent())
    gc.collect()  # Optuna's connection to the database ends with its last reference
    return path
