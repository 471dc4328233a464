"""A run folder is whole, belongs to one study and one process, and says clearly when it is not what it was."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_study import small

from autotune import runfolder
from autotune.cli.pipeline import run_study
from autotune.plan import Plan, make_plan
from autotune.progress import Silent
from autotune.results import StudyResults
from autotune.runfolder import RunFolder, existing_run, open_run
from autotune.spec import load_spec
from autotune.status import Watch
from autotune.study import Outcome
from autotune.tune import tune
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams

SETTING = PolicyParams(16384, 2048)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(small(trials=1))


@pytest.fixture(scope="module")
def finished(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    tune(plan, path)
    return path


def _strict(file: Path) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{file.name} holds {word}")

    return json.loads(file.read_text(), parse_constant=refuse)


def test_every_json_file_of_a_study_is_strict_json(finished: Path) -> None:
    files = list(finished.rglob("*.json"))
    assert len(files) > 10
    for file in files:
        _strict(file)


def test_a_new_run_folder_is_never_seen_without_the_process_that_works_in_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename, seen = tmp_path / "run", Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        seen.append((target, Watch(target).status().state))
        return moved

    monkeypatch.setattr(Path, "rename", watched)
    with open_run(path, plan):
        seen.append((path, Watch(path).status().state))
    assert seen == [(path, "starting")] * 2


def test_the_lock_follows_no_link_and_changes_nothing(plan: Plan, tmp_path: Path) -> None:
    with open_run(tmp_path / "run", plan):
        pass
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    lock = tmp_path / "run/.lock"
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(InvalidInput, match=r"\.lock: cannot be opened as a lock"), open_run(tmp_path / "run", plan):
        pass
    assert precious.read_text() == "keep me"
    lock.unlink()
    lock.write_text("notes")
    with open_run(tmp_path / "run", plan):
        assert lock.read_text() == "notes"
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(InvalidInput, match=r"\.lock: is no regular file"), open_run(tmp_path / "run", plan):
        pass


def test_a_run_of_an_earlier_release_that_knew_fewer_keys_goes_on(plan: Plan, tmp_path: Path) -> None:
    with open_run(tmp_path / "run", plan) as run:
        run.save_trial("references/x", SETTING, Outcome({"mean_latency_s": 1.0}, {}, {}, 1.0), [])
        (run.path / "references/x/requests.parquet").touch()  # else the run has measured nothing, and gives way
    file = tmp_path / "run/identity.json"
    identity = json.loads(file.read_text())
    for key in ("more_workloads", "prefix_caching"):
        del identity["spec"][key]
    identity["spec"]["profile"] = "rtx5090-qwen2.5-3b"
    file.write_text(json.dumps(identity))
    with open_run(tmp_path / "run", plan) as run:
        assert run.load_trial("references/x", SETTING) is not None
    identity["spec"]["tuning_seeds"] = [7]
    file.write_text(json.dumps(identity))
    with pytest.raises(InvalidInput, match="holds another study"), open_run(tmp_path / "run", plan):
        pass


@pytest.mark.parametrize(
    "content",
    ["[]", "7", "null", "[" * 100_000, '{"spec":', '{"spec": [], "traces": 1}', "{}", "1" * 5000],
    ids=["list", "number", "null", "deep", "cut", "other types", "empty", "long number"],
)
def test_an_identity_that_ppas_did_not_write_is_refused(plan: Plan, tmp_path: Path, content: str) -> None:
    with open_run(tmp_path / "run", plan):
        pass
    (tmp_path / "run/identity.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"run.*name another folder with --run"), open_run(tmp_path / "run", plan):
        pass


def test_a_folder_with_anything_else_in_it_never_gives_way(plan: Plan, tmp_path: Path) -> None:
    run, other = tmp_path / "run", make_plan(small(seed=1))
    with open_run(run, plan):
        pass
    (run / "thesis.tex").touch()
    with pytest.raises(InvalidInput, match="holds another study"), open_run(run, other):
        pass
    assert (run / "thesis.tex").exists()
    (run / "thesis.tex").unlink()
    with open_run(run, other):  # of ours alone, and nothing was measured
        assert existing_run(run).spec().seed == 1
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "identity.json").write_text('{"name": "of another program"}')
    with pytest.raises(InvalidInput, match="name another folder"), open_run(foreign, other):
        pass
    assert (foreign / "identity.json").exists()


def test_a_live_study_is_refused_its_folder_before_it_tells_its_plan(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    (tmp_path / "thesis.tex").touch()
    told: list[str] = []
    spec = load_spec(examples / "live-cpu-smoke.yaml")
    with pytest.raises(InvalidInput, match="exists and is not a run folder"):
        run_study(spec, tmp_path, base=examples, progress=Silent(), say=told.append)
    assert told == []


def test_a_folder_in_place_of_a_file_is_refused(plan: Plan, tmp_path: Path) -> None:
    with open_run(tmp_path / "run", plan):
        pass
    (tmp_path / "run/identity.json").unlink()
    (tmp_path / "run/identity.json").mkdir()
    with pytest.raises(InvalidInput, match="is not a run folder"), open_run(tmp_path / "run", plan):
        pass
    with pytest.raises(InvalidInput, match="is not a run folder"):
        existing_run(tmp_path / "run")
    (tmp_path / "results.json").mkdir()
    with pytest.raises(InvalidInput, match=r"results\.json: cannot be read"):
        StudyResults.load(tmp_path / "results.json")


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, "1" * 5000, '{"version": 1', "null", ""])
def test_results_that_ppas_did_not_write_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"results\.json: "):
        StudyResults.load(tmp_path / "results.json")


def test_results_whose_pick_does_not_exist_are_refused(finished: Path, tmp_path: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**results, "pick_trial": 99}))
    with pytest.raises(InvalidInput, match="pick_trial is 99"):
        StudyResults.load(tmp_path / "results.json")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device"), SystemExit])
def test_a_run_folder_whose_making_is_cut_short_leaves_nothing(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    def cut(*_: object) -> None:
        raise stop

    monkeypatch.setattr(runfolder, "write_trace", cut)
    with pytest.raises((KeyboardInterrupt, InvalidInput, SystemExit)), open_run(tmp_path / "run", plan):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_of_a_killed_process_is_left_alone(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / ".run.tmp").mkdir()
    (tmp_path / ".run.tmp/thesis.tex").touch()
    with open_run(tmp_path / "run", plan):
        pass
    assert (tmp_path / ".run.tmp/thesis.tex").exists()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/run"])
def test_a_run_folder_that_cannot_be_made_is_refused(plan: Plan, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput), open_run(tmp_path / name, plan):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


OUTCOMES = st.builds(
    Outcome,
    st.dictionaries(st.text(max_size=5), st.floats(0.1, 10), max_size=3),
    st.dictionaries(st.text(max_size=5), st.dictionaries(st.text(max_size=5), st.floats(0) | st.just(math.nan))),
    st.dictionaries(st.text(max_size=5), st.integers(0, 10**9), max_size=3),
    st.floats(0, 1e6),
    st.none() | st.text(),
).filter(lambda outcome: outcome.objectives or outcome.reason is not None)


@given(OUTCOMES)
def test_an_outcome_survives_its_file_and_undefined_metrics_stay_undefined(
    tmp_path_factory: pytest.TempPathFactory, outcome: Outcome
) -> None:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    run.save_trial("trials/1", SETTING, outcome, [])
    _strict(run.path / "trials/1/metrics.json")
    found = run.load_trial("trials/1", SETTING)
    assert found is not None

    def plain(one: Outcome) -> Any:
        infinite = {regime: [n for n, v in m.items() if not math.isfinite(v)] for regime, m in one.regimes.items()}
        finite = {regime: {n: v for n, v in m.items() if math.isfinite(v)} for regime, m in one.regimes.items()}
        return one.objectives, finite, infinite, one.branch_steps, one.duration_s, one.reason

    assert plain(found) == plain(outcome)


@pytest.mark.parametrize("content", ["[]", "{}", '{"regimes": 7}', '{"regimes": {"r": [1]}}', "[" * 100_000, "nul"])
def test_a_damaged_record_of_a_trial_counts_as_none(tmp_path: Path, content: str) -> None:
    run = RunFolder(tmp_path)
    run.save_trial("t", SETTING, Outcome({}, {}, {}, 1.0), [])
    (tmp_path / "t/metrics.json").write_text(content)
    assert run.load_trial("t", SETTING) is None


def test_results_with_undefined_numbers_survive_their_file_as_strict_json(finished: Path, tmp_path: Path) -> None:
    results = StudyResults.load(finished / "results.json")
    first = results.trials[0]
    undefined = {regime: dict.fromkeys(means, math.nan) for regime, means in first.regimes.items()}
    changed = results.model_copy(
        update={"trials": [first.model_copy(update={"regimes": undefined}), *results.trials[1:]]}
    )
    changed.save(tmp_path / "results.json")
    _strict(tmp_path / "results.json")
    found = StudyResults.load(tmp_path / "results.json").trials[0].regimes
    assert all(math.isnan(value) for means in found.values() for value in means.values())
    assert found.keys() == undefined.keys()
