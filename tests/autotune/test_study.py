"""A study from its file to its results: nothing lost, nothing repeated, nothing half-made."""

import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from optuna.storages._cached_storage import _CachedStorage
from small_study import SMALL, small

from autotune import choose
from autotune.choose import exported_role
from autotune.compare import compare_settings
from autotune.evaluate import SimulatedEvaluator
from autotune.plan import Plan, make_plan
from autotune.records import Replay
from autotune.remarks import remarks
from autotune.results import ColdCheck, Effect, NoiseInfo, Setting, StudyResults
from autotune.runfolder import RunFolder
from autotune.study import Outcome, Search
from autotune.tune import tune
from ppas_core.defaults import published
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile
from search_spaces.space import load_space
from traces.format import Trace, write_trace
from traces.generate import rag_bursts


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResults, Path]:
    path = tmp_path_factory.mktemp("runs") / "small"
    return tune(make_plan(small(random_arm=True)), path), path


def test_trial_0_is_the_reference_and_the_static_sweep_is_part_of_the_study(
    finished: tuple[StudyResults, Path],
) -> None:
    results, _ = finished
    assert (results.trials[0].arm, results.trials[0].setting.to_params()) == ("reference", published("ppas"))
    assert set(results.trials[0].objectives.values()) == {1.0}
    assert Counter(trial.arm for trial in results.trials) == {"reference": 1, "static": 3, "search": 6, "random": 6}
    assert [t.setting.label for t in results.trials if t.arm == "static"] == ["mbt-512", "mbt-2048", "mbt-16384"]


def test_results_are_quoted_on_traces_that_the_search_never_saw(finished: tuple[StudyResults, Path]) -> None:
    results, _ = finished
    by_purpose: dict[str, set[str]] = {"tuning": set(), "held-out": set()}
    for trace in results.traces:
        by_purpose[trace.purpose].add(trace.digest)
    assert not by_purpose["tuning"] & by_purpose["held-out"]
    held_out = {trace.name for trace in results.traces if trace.purpose == "held-out"}
    assert all(set(setting.requests.trace) == held_out for setting in results.held_out)
    assert [(c.candidate, c.reference) for c in results.comparisons] == [
        ("tuned", "paper default"),
        ("tuned", "best static"),
        ("paper default", "best static"),
    ]


def test_the_export_is_the_finalist_that_the_verdicts_name(finished: tuple[StudyResults, Path]) -> None:
    results, _ = finished
    role = exported_role(*(comparison.verdict for comparison in results.comparisons))
    assert results.exported_role == ("paper default" if role == "reference" else role)
    assert results.exported == next(s for s in results.held_out if s.role == results.exported_role).setting


def test_the_front_holds_every_setting_that_no_other_beats_in_both_objectives(
    finished: tuple[StudyResults, Path],
) -> None:
    results, _ = finished
    own = [trial for trial in results.trials if trial.arm != "random"]
    for trial in own:
        beaten = any(
            all(other.objectives[name] <= value for name, value in trial.objectives.items())
            and other.objectives != trial.objectives
            for other in own
        )
        assert trial.on_front == (not beaten)
    for history in results.hypervolume.values():
        assert history == sorted(history)
        assert len(history) == 7


def test_the_run_folder_keeps_every_request_of_every_trial(finished: tuple[StudyResults, Path]) -> None:
    results, path = finished
    requests = sum(trace.num_requests for trace in results.traces if trace.purpose == "tuning")
    for trial in range(10):
        table = pd.read_parquet(path / "trials" / str(trial) / "requests.parquet")
        assert len(table) == requests
        assert set(table["origin"]) == {"simulated"}
        metrics = json.loads((path / "trials" / str(trial) / "metrics.json").read_text())
        assert metrics["objectives"] == results.trials[trial].objectives
        settings = json.loads((path / "trials" / str(trial) / "settings.json").read_text())
        assert settings == results.trials[trial].setting.params
    assert StudyResults.load(path / "results.json") == results


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("held_out", 0, "requests", "regime"), ["one"], "columns have different lengths"),
        (("trials", 1, "setting", "params", "scope"), {"a": 1}, "scope"),
        (("exported", "params", "b_max"), "many", "b_max"),
    ],
)
def test_results_that_hold_no_settings_or_uneven_columns_are_refused(
    finished: tuple[StudyResults, Path], tmp_path: Path, place: tuple[str | int, ...], value: object, words: str
) -> None:
    data = json.loads((finished[1] / "results.json").read_text())
    part = data
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (tmp_path / "results.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match=words):
        StudyResults.load(tmp_path / "results.json")


def test_a_confidence_that_no_interval_can_have_is_refused() -> None:
    assert small(confidence=0.9999).confidence == 0.9999
    with pytest.raises(InvalidInput, match=r"confidence.*0\.9999"):
        small(confidence=0.9999999999999999)


def test_the_same_seed_gives_the_same_study(finished: tuple[StudyResults, Path], tmp_path: Path) -> None:
    again = tune(make_plan(small(random_arm=True)), tmp_path / "again")
    timing = {"trials": {"__all__": {"duration_s"}}, "created_at": True, "provenance": True}
    assert again.model_dump(exclude=timing) == finished[0].model_dump(exclude=timing)


def test_a_finished_study_is_extended_by_more_trials_and_repeats_none(tmp_path: Path) -> None:
    first = tune(make_plan(small(trials=2)), tmp_path / "run")
    second = tune(make_plan(small(trials=4)), tmp_path / "run")
    assert [t.setting for t in second.trials[: len(first.trials)]] == [t.setting for t in first.trials]
    assert [t.duration_s for t in second.trials[: len(first.trials)]] == [t.duration_s for t in first.trials]
    assert Counter(t.arm for t in second.trials)["search"] == 4


class Killed(BaseException):
    """Stands for the end of the process: nothing in the product catches it."""


def test_a_trial_that_was_begun_is_finished_under_its_own_number(tmp_path: Path) -> None:
    """The process ends in the middle of the third trial; the next one ends that same trial with the same setting."""
    tried: list[tuple[int, PolicyParams]] = []

    def evaluate(number: int, params: PolicyParams) -> Outcome:
        tried.append((number, params))
        if len(tried) == 3:
            raise Killed
        return Outcome({"mean_latency_s": 1.0 + number}, {}, {}, 0.1)

    def open_search() -> Search:
        return Search(
            tmp_path / "study.db", "s", space=load_space("ppas"), objectives=["mean_latency_s"], sampler="tpe", seed=0,
            deterministic=True, first=[("reference", published("ppas"))],
        )  # fmt: skip

    search = open_search()
    search.step(evaluate)
    search.step(evaluate)
    with pytest.raises(Killed):
        search.step(evaluate)
    search = open_search()
    assert [trial.number for trial in search.trials()] == [0, 1]
    search.step(evaluate)
    assert tried[3] == tried[2]
    assert [trial.number for trial in search.trials()] == [0, 1, 2]


def test_a_trial_costs_one_look_at_all_trials_before_it_unless_one_was_left_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes time that grows with the study."""
    search = Search(
        tmp_path / "study.db", "s", space=load_space("ppas"), objectives=["mean_latency_s"], sampler="random", seed=0,
        deterministic=True,
    )  # fmt: skip
    looks: list[object] = []
    look = _CachedStorage.get_all_trials
    monkeypatch.setattr(_CachedStorage, "get_all_trials", lambda *args, **kw: looks.append(args) or look(*args, **kw))

    def evaluate(number: int, params: PolicyParams) -> Outcome:
        if number == 2 and len(looks) < 5:
            raise Killed
        return Outcome({"mean_latency_s": 1.0 + number}, {}, {}, 0.1)

    search.step(evaluate)
    assert len(looks) == 2
    search.step(evaluate)
    assert len(looks) == 3
    with pytest.raises(Killed):
        search.step(evaluate)
    assert len(looks) == 4
    assert search.step(evaluate).number == 2  # it looks, and finds what was left
    assert len(looks) == 5


def test_a_measurement_that_was_stored_before_the_kill_is_not_repeated(tmp_path: Path) -> None:
    def open_search() -> Search:
        return Search(
            tmp_path / "study.db", "s", space=load_space("ppas"), objectives=["mean_latency_s"], sampler="tpe", seed=0,
            deterministic=True, first=[("reference", published("ppas"))],
        )  # fmt: skip

    open_search().step(lambda number, params: Outcome({"mean_latency_s": 0.5}, {}, {}, 0.1))
    with sqlite3.connect(tmp_path / "study.db") as database:  # as if killed just before the trial was told
        database.execute("UPDATE trials SET state = 'RUNNING'")

    def must_not_run(number: int, params: PolicyParams) -> Outcome:
        raise AssertionError("measured twice")

    search = open_search()
    assert search.step(must_not_run).outcome.objectives == {"mean_latency_s": 0.5}


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random"])
def test_a_failing_setting_is_a_record_with_its_reason_and_the_study_goes_on(tmp_path: Path, sampler: str) -> None:
    if sampler == "gp":
        pytest.importorskip("torch", reason="the GP sampler needs torch")

    def evaluate(number: int, params: PolicyParams) -> Outcome:
        if params.b_max > 8192:
            return Outcome({}, {}, {}, 0.1, reason="out of memory")
        return Outcome({"mean_latency_s": params.b_max / 8192, "p95_latency_s": 1.0}, {}, {}, 0.1)

    search = Search(
        tmp_path / "study.db", "s", space=load_space("ppas"), objectives=["mean_latency_s", "p95_latency_s"],
        sampler=sampler, seed=1, deterministic=True,
    )  # fmt: skip
    for _ in range(16):
        search.step(evaluate)
    trials = search.trials()
    assert len(trials) == 16
    failed = [trial for trial in trials if trial.params.b_max > 8192]
    assert failed
    assert {trial.outcome.reason for trial in failed} == {"out of memory"}
    assert not any(trial.outcome.objectives for trial in failed)


def test_a_study_with_failing_settings_never_picks_one_and_says_how_many_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(small())

    class Fragile:
        """The simulator, on a server that dies above a budget."""

        def __getattr__(self, name: str) -> object:
            return getattr(plan.evaluator, name)

        def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
            if params.b_cap > 2048:
                raise NoResult("the server died: out of memory")
            return plan.evaluator.replay(params, trace)

    fragile = Plan(**{**{name: getattr(plan, name) for name in plan.__dataclass_fields__}, "evaluator": Fragile()})
    results = tune(fragile, tmp_path / "run")
    failed = [trial for trial in results.trials if trial.state == "failed"]
    assert failed
    assert all(trial.reason == "the server died: out of memory" and not trial.on_front for trial in failed)
    assert results.trials[results.pick_trial].state == "ok"
    assert results.warnings[0].startswith(f"{len(failed)} of {len(results.trials)} trials failed")


def test_a_pick_at_an_end_of_the_space_that_the_search_moved_to_is_said(tmp_path: Path) -> None:
    changes = {"static_budgets": [4096, 16384], "workload": {**SMALL["workload"], "rates_per_s": [6.0]}}
    space = {"preset": "ppas", "b_max": {"low": 4096, "high": 16384, "step": 4096}, "b_cap": 4096}
    said = {}
    for start in (8192, 16384):
        reference = {"b_max": start, "b_cap": 2048, "n_th": 2, "scope": "prefill"}
        results = tune(make_plan(small(**changes, space=space, reference=reference)), tmp_path / str(start))
        assert results.trials[results.pick_trial].setting.to_params().b_max == 16384
        said[start] = [note for note in results.warnings if "of the search space" in note]
    assert said == {
        8192: ["the pick has the highest b_max of the search space, 16384: what lies beyond may be better still"],
        16384: [],
    }


def said_of(results: StudyResults, words: str) -> list[str]:
    found = remarks(
        results, make_plan(small()), results.pick.to_params(), "mean_latency_s", None, simulated=True
    )  # fmt: skip
    return [note for note in found if words in note]


def test_a_gain_on_tuning_traces_beyond_the_held_out_interval_is_said_with_the_reason(
    finished: tuple[StudyResults, Path],
) -> None:
    results, gain_pct = finished[0], 32.2
    trials = list(results.trials)
    trials[results.pick_trial] = trials[results.pick_trial].model_copy(update={"objectives": {"mean_latency_s": 0.678}})

    def held_out(value: float) -> StudyResults:
        effect = Effect(improvement_pct=value, low_pct=value - 1, high_pct=value + 1)
        changed = {"overall": {"mean_latency_s": effect}, "verdict": "better", "did_the_same": False}
        first = results.comparisons[0].model_copy(update=changed)
        return results.model_copy(update={"trials": trials, "comparisons": [first, *results.comparisons[1:]]})

    words = "mean end-to-end latency was 32.2 % better on the tuning traces and is "
    assert said_of(held_out(gain_pct + 0.5), words) == []
    (shrunk,) = said_of(held_out(gain_pct - 2), words)
    assert "is 30.2 % better (95% interval 29.2 to 31.2 %) on the held-out ones: the best of 10 settings on 4" in shrunk
    assert "tuning traces is flattered" in shrunk
    noise = NoiseInfo(metric="mean_latency_s", replay_pct=4, objective_pct=2, visible_pct=8, visible_held_out_pct=8,
                      repeats=9, num_traces=4)  # fmt: skip
    (noisy,) = said_of(held_out(gain_pct - 2).model_copy(update={"noise": [noise]}), words)
    assert "the best of 10 noisy measurements on 4 tuning traces is flattered" in noisy
    (grown,) = said_of(held_out(gain_pct + 2), words)
    assert "flattered" not in grown


def test_a_best_static_budget_at_an_end_of_those_tried_is_said(finished: tuple[StudyResults, Path]) -> None:
    results, _ = finished
    notes = {
        budget: said_of(
            results.model_copy(update={"best_static": Setting.of(PolicyParams.static(budget))}), "best static budget, "
        )
        for budget in (512, 2048, 16384)
    }
    assert notes == {
        512: [
            "the best static budget, 512, is the smallest of the 3 that were tried: a smaller one may be better still; add "
            "one to static_budgets"
        ],
        2048: [],
        16384: [
            "the best static budget, 16384, is the largest of the 3 that were tried: a larger one may be better still; add "
            "one to static_budgets"
        ],
    }


def test_a_reference_that_cannot_be_measured_ends_the_study_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: object) -> Replay:
        raise NoResult("the server died")

    monkeypatch.setattr(SimulatedEvaluator, "replay", dead)
    with pytest.raises(NoResult, match="the reference 2/16384/2048 prefill cannot be measured: the server died"):
        tune(make_plan(small()), tmp_path / "run")


def test_a_time_budget_ends_the_search_after_the_known_settings(tmp_path: Path) -> None:
    results = tune(make_plan(small(trials=100_000, time_budget="0.2s")), tmp_path / "run")
    arms = Counter(trial.arm for trial in results.trials)
    assert arms["static"] == 3
    assert arms["search"] < 100_000


def test_the_plan_can_be_made_again_from_the_run_folder_alone(tmp_path: Path) -> None:
    """Trace, space, reference and profile files are looked for beside the study; the run folder keeps what they said."""
    home = tmp_path / "home"
    for seed in (0, 1, 10, 11):
        write_trace(rag_bursts(1.0, seed, prompt_tokens=4000), home / f"t{seed}.jsonl")
    (home / "space.yaml").write_text("b_max: {low: 2048, high: 16384, step: 2048}\nb_cap: 2048\n")
    (home / "reference.yaml").write_text("b_max: 8192\nb_cap: 2048\n")
    profile = json.dumps(load_profile("rtx5090-qwen2.5-3b").to_dict())
    (home / "profile.json").write_text(profile)
    changes = {
        "workload": {"family": "files", "tuning": ["t0.jsonl", "t1.jsonl"], "held_out": ["t10.jsonl", "t11.jsonl"]},
        "space": "space.yaml", "reference": "reference.yaml", "profile": "profile.json", "static_budgets": [2048],
    }  # fmt: skip
    plan = make_plan(small(**changes), home)
    results = tune(plan, tmp_path / "run")
    shutil.rmtree(home)
    again = make_plan(RunFolder(tmp_path / "run").spec(), tmp_path / "run")
    assert (again.tuning, again.held_out, again.reference) == (plan.tuning, plan.held_out, plan.reference)
    assert again.space == plan.space
    assert again.evaluator.identity() == plan.evaluator.identity()
    assert results.trials[0].setting.label == "2/8192/2048 prefill"


def test_a_changed_reference_or_space_file_is_another_study(tmp_path: Path) -> None:
    (tmp_path / "reference.yaml").write_text("b_max: 8192\nb_cap: 2048\n")
    study = small(reference="reference.yaml", trials=1, static_budgets=[2048])
    tune(make_plan(study, tmp_path), tmp_path / "run")
    (tmp_path / "reference.yaml").write_text("b_max: 4096\nb_cap: 2048\n")
    with pytest.raises(InvalidInput, match=r"b_max is 8192 there, 4096 here"):
        tune(make_plan(study, tmp_path), tmp_path / "run")


def test_idle_knobs_keep_the_picks_values_where_the_references_would_act(tmp_path: Path) -> None:
    """With n_th out of reach nothing is ever capped, which is best for TTFT; the reference's n_th would cap."""
    study = small(
        objectives=["mean_ttft_s"], trials=8, static_budgets=[2048],
        space={"b_max": 16384, "b_cap": 2048, "n_th": {"low": 99, "high": 120}},
        workload={"family": "rag-bursts", "rates_per_s": [2.0], "prompt_tokens": 12000},
    )  # fmt: skip
    results = tune(make_plan(study), tmp_path / "run")
    tuned = next(setting for setting in results.held_out if setting.role == "tuned").setting.to_params()
    assert tuned.n_th >= 99
    assert "kept" in results.not_identified["n_th"]
    assert results.comparisons[0].overall["mean_ttft_s"].improvement_pct > 0


def test_a_goodput_of_zero_somewhere_is_inconclusive_and_never_a_crash() -> None:
    study = small(objectives=["goodput_per_s"], limits={"latency_s": 0.001}, prefer="goodput_per_s")
    plan = make_plan(study)
    sides = [
        (name, [plan.evaluator.replay(params, trace) for trace in plan.held_out])
        for name, params in (("tuned", PolicyParams.static(2048)), ("reference", plan.reference))
    ]
    found = compare_settings(sides[0], sides[1], study, ["goodput_per_s"])
    assert found.verdict == "inconclusive"
    assert "goodput is zero or undefined" in found.sentence


def test_a_finished_study_whose_trials_are_gone_is_not_silently_searched_again(tmp_path: Path) -> None:
    plan = make_plan(small(trials=1))
    tune(plan, tmp_path / "run")
    (tmp_path / "run/study.db").unlink()
    with pytest.raises(InvalidInput, match="the trials of this finished study are gone"):
        tune(plan, tmp_path / "run")


def test_a_cold_server_that_does_other_than_the_hot_one_is_said_by_which_of_them_is_faster(
    finished: tuple[StudyResults, Path],
) -> None:
    def notes(change_pct: float) -> list[str]:
        cold = ColdCheck(metric="mean_latency_s", num_traces=8, change_pct=change_pct, reason="as seen", noise_pct=5.9)
        return said_of(finished[0].model_copy(update={"cold": cold}), "as seen")

    (slower,), (faster,) = notes(8.7), notes(-8.7)
    assert "does not do cold what was measured hot" in slower
    assert "does better on a new server than it was measured" in faster
    assert notes(5.0) == notes(-5.0) == []


def test_a_settled_pick_that_fails_on_a_held_out_trace_is_not_settled_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(small(trials=2, noise_sigma=0.3))
    known = PolicyParams.static(2048)  # settled for, it is a trial as well
    held_out = {trace.digest for trace in plan.held_out}
    replay = SimulatedEvaluator.replay

    def fails(evaluator: SimulatedEvaluator, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        if params == known and trace.digest in held_out:
            raise NoResult("the server died")
        return replay(evaluator, params, trace, repeat)

    monkeypatch.setattr(SimulatedEvaluator, "replay", fails)
    monkeypatch.setattr(choose, "settle", lambda pick, steps, reference: (known, {"b_cap": "nothing was capped"}))
    results = tune(plan, tmp_path / "run")
    tuned = next(entry.setting for entry in results.held_out if entry.role == "tuned")
    assert tuned.to_params() == results.trials[results.pick_trial].setting.to_params() != known
    assert results.not_identified["b_cap"].endswith("since with the reference's a held-out trace failed")
    failed = [trial.setting.to_params() for trial in results.trials if trial.state == "failed"]
    assert failed == [known]
