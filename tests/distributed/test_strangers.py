"""Who and what a shared study does not take: other releases, unlike GPUs, other programs' studies, other tables."""

import sqlite3
from pathlib import Path

import optuna
import pytest
from shared_study import Trials, spec
from test_sharing import measured, sqlite, take_part

from autotune.distributed import agreement, shared
from autotune.distributed.agreement import apart, fingerprint, require_alike
from autotune.distributed.storage import Patience, open_storage
from autotune.distributed.work import Shared
from autotune.measure import Measurement
from autotune.plan import make_plan
from autotune.progress import Silent
from autotune.runfolder import open_run
from autotune.spec import parse_spec
from autotune.study import Outcome
from ppas_core.errors import InvalidInput

LIVE = {"name": "live", "backend": "vllm", "tuning_seeds": [0], "held_out_seeds": [1]}
TWO_UNLIKE_GPUS = """#!/bin/sh
echo "0, GPU-8f0c1111-aaaa, NVIDIA H200"
echo "1, GPU-1a2b2222-bbbb, NVIDIA L4"
"""


def test_another_release_of_the_package_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_part(sqlite(tmp_path), tmp_path / "one", trials=1)
    monkeypatch.setattr(agreement, "__version__", "9.9")
    with pytest.raises(InvalidInput, match=r"ppas is '.*' there, '9.9' here; install the same release everywhere"):
        take_part(sqlite(tmp_path), tmp_path / "two", trials=1)


def test_a_worker_that_joins_a_finished_study_measures_the_reference_and_no_trial(tmp_path: Path) -> None:
    where = sqlite(tmp_path)
    done = take_part(where, tmp_path / "one", trials=1)
    assert measured(take_part(where, tmp_path / "late", trials=1)) == measured(done)
    late = (tmp_path / "late" / "worker.txt").read_text().strip()
    assert Trials(where.full).by(late) == []
    assert len(Trials(where.full).all()) == len(done)


def outcome(mean: float) -> Outcome:
    return Outcome({}, {"busy": {"mean_ttft_s": mean}, "calm": {"mean_ttft_s": mean / 2}}, {}, 1.0)


def test_a_machine_whose_reference_measures_far_apart_is_refused_though_it_says_the_same_of_itself() -> None:
    ratio = apart(outcome(1.0), outcome(2.2), ["mean_ttft_s"])
    assert ratio == pytest.approx(2.2)
    with pytest.raises(InvalidInput, match=r"the reference measures 2\.2 times here .*allowed: 0\.5 to 2 times"):
        require_alike(ratio, "the study 'x' in db")
    with pytest.raises(InvalidInput, match=r"measures 0\.45 times"):
        require_alike(1 / ratio, "the study 'x' in db")
    require_alike(1.9, "the study 'x' in db")


def test_a_worker_whose_reference_is_a_little_apart_is_told_and_one_far_apart_takes_no_trial(tmp_path: Path) -> None:
    where, plan = sqlite(tmp_path), make_plan(spec(trials=1))
    take_part(where, tmp_path / "one", trials=1)
    said: list[str] = []
    with open_run(tmp_path / "two", plan) as run:
        study = Measurement(plan, run, Silent())
        regimes = study.base.regimes
        for factor in (1.25, 3.0):
            scaled = {regime: {name: factor * value for name, value in row.items()} for regime, row in regimes.items()}
            study.base = Outcome(study.base.objectives, scaled, study.base.branch_steps, 1.0)
            shared = Shared(where, say=said.append)
            if factor > agreement.MOST_APART:
                (run.path / "worker.txt").unlink()
                with pytest.raises(InvalidInput, match=r"the reference measures 3 times here"):
                    shared.search(study)
            else:
                shared.search(study)
    assert [line for line in said if "the reference measures +25.0 % here" in line] == said
    assert len(Trials(where.full, "shared.workers").all()) == 2


@pytest.mark.parametrize(
    ("visible", "named"),
    [(None, "1 x NVIDIA H200, 1 x NVIDIA L4"), ("0", "NVIDIA H200"), ("1", "NVIDIA L4"), ("GPU-1a2b", "NVIDIA L4")],
)
def test_a_worker_on_a_host_with_unlike_gpus_names_the_one_that_it_measures_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, named: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(TWO_UNLIKE_GPUS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert agreement.device_name() == named


@pytest.mark.parametrize("directions", [["minimize"], ["maximize", "maximize"], ["minimize", "minimize"]])
def test_a_study_of_that_name_by_another_program_is_refused_and_left_as_it_is(
    tmp_path: Path, directions: list[str]
) -> None:
    where = sqlite(tmp_path)
    theirs = optuna.create_study(study_name="shared", storage=where.full, directions=directions)
    theirs.add_trial(optuna.create_trial(values=[1.0] * len(directions)))
    with pytest.raises(InvalidInput, match=r"holds what another program put there; give the study another name"):
        take_part(where, tmp_path / "run", trials=1)
    assert [trial.values for trial in Trials(where.full).all()] == [[1.0] * len(directions)]


def test_a_list_of_workers_that_another_program_wrote_is_refused(tmp_path: Path) -> None:
    where = sqlite(tmp_path)
    theirs = optuna.create_study(study_name="shared.workers", storage=where.full)
    theirs.add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(InvalidInput, match="holds what another program put there"):
        take_part(where, tmp_path / "run", trials=1)


def test_a_worker_that_looks_a_moment_before_another_one_registers_and_begins_takes_part_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, look = sqlite(tmp_path), shared._workers
    looks: list[int] = []

    def overtaken(study: optuna.Study, said: str = "") -> dict[str, shared.Worker]:
        found = look(study, said)
        looks.append(len(found))
        if len(looks) == 1:
            take_part(where, tmp_path / "quicker", trials=1)
        return found

    monkeypatch.setattr(shared, "_workers", overtaken)
    done = take_part(where, tmp_path / "slower", trials=1)
    assert looks[0] == 0, "it saw nobody"
    monkeypatch.undo()
    assert measured(done) == measured(take_part(where, tmp_path / "quicker", trials=1))


@pytest.mark.parametrize(
    ("theirs", "ours", "alike"),
    [
        (["--tokenizer-mode", "slow"], ["--tokenizer-mode", "auto"], False),
        (["--long-prefill-token-threshold=512"], ["--long-prefill-token-threshold=1024"], False),
        (["--api-key", "s3cret"], ["--api-key", "another"], True),
    ],
)
def test_servers_with_other_flags_are_unlike_whatever_they_are_called_and_secrets_are_not_compared(
    theirs: list[str], ours: list[str], alike: bool
) -> None:
    told = [
        fingerprint(make_plan(parse_spec({**LIVE, "server": {"model": "m", "flags": flags}}, "a test")))
        for flags in (theirs, ours)
    ]
    assert (told[0] == told[1]) == alike
    assert "s3cret" not in str(told)


@pytest.mark.parametrize(
    ("revision", "remedy"),
    [("v3.0.0.d", "optuna storage upgrade --storage URL"), ("v99.0.0.a", "install that version")],
)
def test_tables_of_another_optuna_are_refused_with_the_remedy(tmp_path: Path, revision: str, remedy: str) -> None:
    where = sqlite(tmp_path)
    take_part(where, tmp_path / "one", trials=1)
    with sqlite3.connect(tmp_path / "shared.db") as database:
        database.execute("update alembic_version set version_num = ?", (revision,))
    database.close()
    with pytest.raises(InvalidInput, match=remedy):
        open_storage(where, Patience(where, print))
