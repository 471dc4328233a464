"""What a study does beyond searching: it races, measures its best again, and judges the pick at other rates."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hand_made import records
from small_study import small

from autotune import provenance, stages
from autotune.metrics import NO_LIMITS, Limits
from autotune.plan import make_plan
from autotune.progress import Silent
from autotune.records import Origin, Replay
from autotune.results import StudyResults
from autotune.robustness import regimes_at, saturated_regimes, still_growing
from autotune.runfolder import RunFolder
from autotune.study import Outcome
from autotune.tune import tune
from ppas_core.defaults import published
from ppas_core.policy import PolicyParams


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResults, Path]:
    path = tmp_path_factory.mktemp("runs") / "noisy"
    spec = small(
        trials=16,
        sampler="random",
        noise_sigma=0.1,
        tuning_seeds=[0, 1, 2, 3],
        workload={"family": "rag-bursts", "rates_per_s": [4.0, 8.0], "prompt_tokens": 4000},
        space={"preset": "ppas", "b_max": {"low": 512, "high": 16384}, "b_cap": {"low": 64, "high": 16384, "step": 64}},
    )
    return tune(make_plan(spec), path), path


FEW = small(noise_sigma=0.1, trials=1)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "few"
    tune(make_plan(FEW), path)
    assert list(path.glob("confirmed/*"))
    return path


def test_a_setting_with_a_certain_deficit_is_stopped_before_its_last_trace(noisy: tuple[StudyResults, Path]) -> None:
    results, path = noisy
    stopped = [trial for trial in results.trials if trial.state == "stopped"]
    assert stopped, [(trial.setting.label, trial.objectives) for trial in results.trials]
    best = min(trial.objectives["mean_latency_s"] for trial in results.trials if trial.state == "ok")
    for trial in stopped:
        assert trial.reason is not None
        assert 2 <= len(trial.by_trace) < 8
        assert trial.reason.startswith(f"stopped after {len(trial.by_trace)} of 8 traces")
        assert trial.objectives["mean_latency_s"] > best
        assert not trial.on_front
        assert trial.number != results.pick_trial
    kept = RunFolder(path).load_trial(f"trials/{stopped[0].number}", stopped[0].setting.to_params())
    assert kept is not None
    assert kept.stopped == stopped[0].reason


def test_known_settings_are_always_measured_whole(noisy: tuple[StudyResults, Path]) -> None:
    results, _ = noisy
    assert {trial.state for trial in results.trials if trial.arm in ("reference", "static")} == {"ok"}


def test_a_stopped_settings_ratio_compares_the_traces_that_it_saw(noisy: tuple[StudyResults, Path]) -> None:
    results, _ = noisy
    reference = results.trials[results.reference_trial].by_trace
    stopped = next(trial for trial in results.trials if trial.state == "stopped")
    ratios = [
        values["mean_latency_s"] / reference[trace]["mean_latency_s"] for trace, values in stopped.by_trace.items()
    ]
    assert min(ratios) <= stopped.objectives["mean_latency_s"] <= max(ratios)


def test_the_best_settings_are_measured_again_and_averaged(noisy: tuple[StudyResults, Path]) -> None:
    results, path = noisy
    again = sorted((path / "confirmed").iterdir())
    assert again
    run = RunFolder(path)
    for folder in again:
        number = int(folder.name.split("-")[0])
        trial = results.trials[number]
        params = trial.setting.to_params()
        first = run.load_trial(f"trials/{number}", params)
        others = [
            run.load_trial(f"confirmed/{other.name}", params) for other in again if other.name.startswith(f"{number}-")
        ]
        assert all(outcome != first for outcome in others), "a repeat sees noise of its own"
        regime = next(iter(trial.regimes))
        means = [outcome.regimes[regime]["mean_latency_s"] for outcome in [first, *others] if outcome is not None]
        assert trial.regimes[regime]["mean_latency_s"] == pytest.approx(np.mean(means))
        assert trial.measurements == len(means)
    picked = results.trials[results.pick_trial]
    assert picked.measurements > 1 or picked.arm == "reference"


def test_without_noise_nothing_is_raced_or_repeated(tmp_path: Path) -> None:
    results = tune(make_plan(small()), tmp_path / "run")
    assert {trial.state for trial in results.trials} == {"ok"}
    assert not (tmp_path / "run" / "confirmed").exists()
    assert all(len(trial.by_trace) == 4 for trial in results.trials)


def test_racing_can_be_switched_off(tmp_path: Path) -> None:
    results = tune(make_plan(small(race=False, noise_sigma=0.1, trials=8)), tmp_path / "run")
    assert {trial.state for trial in results.trials} == {"ok"}


def test_the_pick_is_judged_at_other_rates_than_its_own(tmp_path: Path) -> None:
    results = tune(make_plan(small()), tmp_path / "run")
    assert [point.rate_factor for point in results.robustness] == [0.7, 1.0, 1.3]
    assert {point.origin for point in results.robustness} == {Origin.SIMULATED}
    pick = results.trials[results.pick_trial].setting
    if pick != results.trials[results.reference_trial].setting:
        assert any(point.overall["mean_latency_s"] != 0 for point in results.robustness)
    as_given = results.robustness[1].overall["mean_latency_s"]
    held_out = {setting.role: setting for setting in results.held_out}
    ratios = [
        held_out["tuned"].regimes[regime]["mean_latency_s"] / means["mean_latency_s"]
        for regime, means in held_out["paper default"].regimes.items()
    ]
    assert as_given == pytest.approx(100 * (1 - np.exp(np.mean(np.log(ratios)))))
    assert tune(make_plan(small(robustness_rates=[])), tmp_path / "none").robustness == []


def test_a_pick_that_is_protected_everywhere_harms_no_regime_at_any_rate(tmp_path: Path) -> None:
    spec = small(protect="everywhere", trials=12, robustness_rates=[0.5, 2.0])
    plan = make_plan(spec)
    results = tune(plan, tmp_path / "run")
    pick = results.trials[results.pick_trial]
    reference = results.trials[results.reference_trial]
    for name in results.trials[0].regimes:
        assert pick.regimes[name]["mean_latency_s"] <= reference.regimes[name]["mean_latency_s"] * 1.005
    other = [
        regimes_at(plan.evaluator, plan.tuning, (0.5, 2.0), trial.setting.to_params(), ("mean_latency_s",), NO_LIMITS)
        for trial in (pick, reference)
    ]
    assert sorted(other[0]) == [f"{regime} at {factor}x" for regime in reference.regimes for factor in ("0.5", "2")]
    for regime, means in other[0].items():
        assert means["mean_latency_s"] <= other[1][regime]["mean_latency_s"] * 1.005


def test_two_workloads_are_told_apart_by_their_regimes_and_both_are_judged(tmp_path: Path) -> None:
    second = {"family": "rag-bursts", "rates_per_s": [0.4], "prompt_tokens": 4000, "idle_rate_per_s": 0.4}
    results = tune(make_plan(small(more_workloads=[second])), tmp_path / "run")
    regimes = ["λ=0.4 p4000 o32", "λ=1 p4000 o32", "λ=0.4 p4000 o32, workload 2"]
    assert list(results.trials[0].regimes) == regimes
    assert all(list(comparison.regimes) == regimes for comparison in results.comparisons)
    assert len({trace.name for trace in results.traces}) == len(results.traces)
    again = tune(make_plan(small(more_workloads=[second])), tmp_path / "run")
    assert again.trials == results.trials


def test_a_queue_that_only_grows_is_called_saturated_and_a_burst_that_drains_is_not() -> None:
    def replay(rate: float, served_s: float, regime: str) -> Replay:
        arrival = [number / rate for number in range(60)]
        done, free = [], 0.0
        for time in arrival:
            free = max(free, time) + served_s
            done.append([free - 0.01, free])
        return Replay(published("ppas"), regime, regime, regime, Origin.SIMULATED, records(arrival, done))

    overloaded, relaxed = replay(2.0, 1.0, "over"), replay(2.0, 0.3, "under")
    assert still_growing(overloaded.requests)
    assert not still_growing(relaxed.requests)
    assert saturated_regimes([overloaded, relaxed]) == ["over"]
    assert PolicyParams.static(2048).is_static


def test_goodput_at_other_rates_knows_the_limits(tmp_path: Path) -> None:
    plan = make_plan(small())
    params = PolicyParams.static(16384)
    free, bound = (
        regimes_at(plan.evaluator, plan.tuning, (1.5,), params, ("goodput_per_s",), limits)
        for limits in (Limits(latency_s=1e6), Limits(latency_s=0.5))
    )
    assert all(bound[regime]["goodput_per_s"] < means["goodput_per_s"] for regime, means in free.items())


def test_a_setting_no_worse_than_the_noise_tells_is_not_left_out_for_harming_a_regime(tmp_path: Path) -> None:
    results = tune(make_plan(small(protect="all", noise_sigma=0.3, trials=3, published=["ppas"])), tmp_path / "run")
    visible = results.noise[0].visible_pct
    reference = results.trials[results.reference_trial]
    for trial in results.trials:
        worst = max(
            trial.regimes[name]["mean_latency_s"] / means["mean_latency_s"] for name, means in reference.regimes.items()
        ) if trial.state == "ok" else 0  # fmt: skip
        if worst <= 1 + visible / 100 and "left out" in results.choice:
            left_out = int(results.choice.split("; ")[-1].split(" ")[0])
            harmful = [
                other
                for other in results.trials
                if other.state == "ok"
                and any(
                    other.regimes[name]["mean_latency_s"] > means["mean_latency_s"] * (1 + visible / 100 * 2**0.5)
                    for name, means in reference.regimes.items()
                )
            ]
            assert left_out <= len(harmful)


@pytest.mark.parametrize("damage", ["x", "[{}]", "[]", "{}", '[{"metric": "other"}]'])
def test_a_damaged_noise_file_is_measured_again(tmp_path: Path, damage: str) -> None:
    spec = small(noise_sigma=0.1, trials=1)
    first = tune(make_plan(spec), tmp_path / "run")
    (tmp_path / "run/references/noise.json").write_text(damage)
    assert tune(make_plan(spec), tmp_path / "run").noise == first.noise


@pytest.mark.parametrize("damage", ["x", "short", "null in it", "0 in it"])
def test_a_study_goes_on_where_the_values_of_the_noise_measurement_are_damaged(
    tmp_path: Path, few: Path, damage: str
) -> None:
    shutil.copytree(few, tmp_path / "run")
    file = tmp_path / "run/references/noise-runs.json"
    runs = json.loads(file.read_text())
    if damage == "short":
        runs = {metric: rows[:1] for metric, rows in runs.items()}
    elif damage.endswith(" in it"):
        runs["mean_latency_s"][0][0] = json.loads(damage.split()[0])
    file.write_text("x" if damage == "x" else json.dumps(runs))
    (noise,) = tune(make_plan(FEW), tmp_path / "run").noise
    assert 0.1 < noise.visible_pct < 50


def test_what_is_preferred_and_what_is_worth_having_change_without_another_measurement_of_the_noise(
    tmp_path: Path, few: Path
) -> None:
    class Stages(Silent):
        def begin(self, stage: str, total: int, done: int = 0) -> None:
            seen.append(stage)

    seen: list[str] = []
    shutil.copytree(few, tmp_path / "run")
    before = StudyResults.load(tmp_path / "run/results.json")
    for changed in ({"min_gain_pct": 0.1}, {"prefer": "p95"}):
        after = tune(make_plan(FEW.model_copy(update=changed)), tmp_path / "run", Stages())
        assert stages.SEARCH in seen
        assert stages.NOISE not in seen
        if "prefer" in changed:
            assert [entry.metric for entry in after.noise] == ["p95_latency_s"]
        else:
            assert after.noise[0].repeats > before.noise[0].repeats


@pytest.mark.parametrize("damage", [{"regimes": {}}, {"by_trace": {"a": {}}}, {"duration_s": 10**400}])
@pytest.mark.parametrize("which", ["confirmed/*", "references/reference"])
def test_a_damaged_measurement_is_measured_again(
    tmp_path: Path, few: Path, which: str, damage: dict[str, object]
) -> None:
    shutil.copytree(few, tmp_path / "run")
    file = min((tmp_path / "run").glob(f"{which}/metrics.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    before = StudyResults.load(tmp_path / "run/results.json")
    again = tune(make_plan(FEW), tmp_path / "run")
    assert [trial.objectives for trial in again.trials] == [trial.objectives for trial in before.trials]


@pytest.mark.parametrize(
    "damage",
    [
        {"objectives": {"mean_latency_s": 0.0}}, {"duration_s": "x"}, {"starting_s": float("inf")}, {"measurements": 0},
        {"client": {"a": 1}}, {"reason": 1}, {"cached_share": "x"}, {"by_trace": {"a": {"mean_latency_s": 10**400}}},
    ],
)  # fmt: skip
def test_an_outcome_with_a_value_of_another_kind_is_refused(damage: dict[str, object]) -> None:
    good = Outcome({"mean_latency_s": 1.0}, {}, {}, 1.0).to_dict()
    assert Outcome.from_dict(good).to_dict() == good
    with pytest.raises(ValueError, match=r"no outcome of a trial|validation error"):
        Outcome.from_dict({**good, **damage})


def test_secrets_among_the_servers_flags_stay_out_of_the_results() -> None:
    study = {"server": {"model": "m", "flags": ["--api-key", "SECRET-1", "--dtype", "float32"]}, "prompt_tokens": 7}
    found = provenance.collect({"flags": ["--hf_token=SECRET-2"], "kv_blocks": 9}, study, "tpe")
    assert "SECRET" not in str(found)
    assert (found["measured_on"]["kv_blocks"], found["study"]["prompt_tokens"]) == (9, 7)
    assert found["study"]["server"]["flags"][2:] == ["--dtype", "float32"]


def test_a_good_setting_outside_the_space_is_measured_again_too(tmp_path: Path) -> None:
    plan = make_plan(small(space={"preset": "ppas", "b_cap": {"low": 512, "high": 1024, "step": 512}}, noise_sigma=0.1))
    assert plan.outside, "settings that the space does not hold"
    results = tune(plan, tmp_path / "run")
    outside = {params for _, params in plan.outside}
    near = [trial for trial in results.trials if trial.measurements > 1]
    assert any(trial.setting.to_params() in outside for trial in near), [t.setting for t in near]
