"""The soak's judge finds a leak, and a study of a few hundred trials has none."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import soak
from flatness import Bound, Verdict, judge

TRIALS, LEAKING_TRIALS, EVERY = 200, 160, 8
LEAK = """
from autotune.entry import main
from autotune.runfolder import RunFolder

kept, save = [], RunFolder.save_trial

def leaking(self, folder, *args):
    save(self, folder, *args)
    kept.append((self.path / folder / "metrics.json").open())

RunFolder.save_trial = leaking
main()
"""


def watched(folder: Path, trials: int, *python: str) -> tuple[soak.Run, dict[str, Verdict]]:
    """A simulated study with its verdicts by name; `python` are arguments in place of `-m autotune.entry`."""
    folder.mkdir()
    study = folder / "study.yaml"
    study.write_text(yaml.safe_dump(soak.simulated_study(trials)))
    command = soak.tune_command(study, folder / "run")
    if python:
        command[1:3] = python
    run = soak.watch(command, folder, lambda done, _: done / EVERY, poll_s=0.05)
    return run, {verdict.name: verdict for verdict in soak.verdicts(run.samples)}


Watched = tuple[soak.Run, dict[str, Verdict]]


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Watched]:
    """A study as it is, and one that keeps a file open for every trial; at the same time."""
    folder = tmp_path_factory.mktemp("soak")
    with ThreadPoolExecutor() as pool:
        sound = pool.submit(watched, folder / "sound", TRIALS)
        leaking = pool.submit(watched, folder / "leaking", LEAKING_TRIALS, "-c", LEAK)
        return sound.result(), leaking.result()


def test_a_study_of_some_hundred_trials_keeps_files_processes_and_memory_flat(studies: tuple[Watched, Watched]) -> None:
    run, verdicts = studies[0]
    assert run.exit_code == 0
    assert run.left == []
    assert len(run.samples) > 10
    for name in ("tuner: open files", "tuner: threads", "all processes below it", "files in its temporary folder"):
        assert verdicts[name].flat, verdicts[name]
        assert verdicts[name].growth == 0
    assert verdicts["tuner: memory of its own"].growth < 20, verdicts["tuner: memory of its own"]


def test_a_file_left_open_by_every_trial_is_found(studies: tuple[Watched, Watched]) -> None:
    run, verdicts = studies[1]
    assert run.exit_code == 0
    files = verdicts["tuner: open files"]
    assert not files.flat
    assert files.low > files.bound
    assert files.growth == pytest.approx(files.steps, rel=0.3)  # one a trial
    assert verdicts["all processes below it"].flat


def test_growth_below_the_bound_is_flat_and_neither_warm_up_nor_outliers_count() -> None:
    rng = np.random.default_rng(0)
    trials = np.arange(0, 1000, 10)
    values = 500 + rng.normal(0, 0.3, 100)
    values[:40] -= np.linspace(300, 0, 40)
    values[[60, 80, 95]] += 200
    assert judge("memory", "MiB", trials, values, Bound(percent=2)).flat


def test_growth_above_the_bound_is_not_flat_however_it_is_stated() -> None:
    trials = np.arange(0, 1000, 10)
    values = 500 + 0.1 * trials + np.random.default_rng(0).normal(0, 0.3, 100)
    for bound in (Bound(percent=5), Bound(absolute=40), Bound(per_step=0.09)):
        found = judge("memory", "MiB", trials, values, bound)
        assert not found.flat
        assert found.low > found.bound
        assert found.low < 0.1 * found.steps < found.high
    for bound in (Bound(percent=15), Bound(absolute=60), Bound(per_step=0.11)):
        assert judge("memory", "MiB", trials, values, bound).flat


def test_what_is_too_noisy_or_too_short_to_tell_is_not_called_flat() -> None:
    noisy = judge("memory", "MiB", range(20), np.random.default_rng(0).normal(500, 100, 20), Bound(percent=2))
    assert noisy.low < noisy.bound < noisy.high
    assert not noisy.flat
    assert not judge("memory", "MiB", range(6), [500.0] * 6, Bound(percent=2)).flat
    assert not judge("memory", "MiB", range(20), [float("nan")] * 20, Bound(percent=2)).flat
