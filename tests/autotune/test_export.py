"""Exports: what is written is what loads, what a patch cannot express is said, what was changed is refused."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from small_study import write_study

from autotune.export import (
    GENERATIONS,
    SCHEDULER_CLASS,
    Generation,
    environment,
    load_export,
    nearest_expressible,
    server_flags,
    settings_digest,
    write_export,
)
from autotune.predicted_cost import predicted_cost
from autotune.records import Origin
from autotune.results import (
    Comparison,
    Effect,
    HeldOut,
    HeldOutRequests,
    NoiseInfo,
    Objective,
    Prediction,
    Setting,
    StudyResults,
    TraceInfo,
    Trial,
)
from autotune.runfolder import RunFolder
from ppas_core.defaults import PUBLISHED
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams, Scope
from ppas_core.sim.profile import DEFAULT_PROFILE, load_profile
from ppas_core.vllm.settings import EngineLimits, params_from_environment

PPAS = PUBLISHED["ppas"]
PLUS = PUBLISHED["ppas-plus-qwen3.8-27b"]
TUNED = PolicyParams(b_max=12288, b_cap=1792, n_th=3, scope=Scope.PREFILL)
GUARDED = PolicyParams(b_max=4096, b_cap=64, t_large=9000, scope=Scope.GLOBAL, max_num_seqs=128, decode_guard=True)
STATIC = PolicyParams.static(2048, max_num_seqs=64)


def results_of(params: PolicyParams, **changes: Any) -> StudyResults:
    """A small finished study that exports `params`."""
    nothing = HeldOutRequests(
        trace=[], regime=[], latency_s=[], ttft_s=[], tpot_s=[], prompt_tokens=[], output_tokens=[]
    )
    setting = Setting.of(params)
    held = HeldOut(role="tuned", setting=setting, regimes={}, regime_spread={}, branch_steps={}, requests=nothing)
    comparison = Comparison(
        candidate="tuned",
        reference="paper default",
        preferred_metric="mean_latency_s",
        overall={"mean_latency_s": Effect(improvement_pct=4.0, low_pct=2.0, high_pct=6.0)},
        regimes={},
        share_faster=0.8,
        share_faster_interval=(0.7, 0.9),
        share_slower=0.1,
        tie_s=0.01,
        num_requests=100,
        num_traces=6,
        confidence=0.95,
        verdict="better",
        sentence="tuned is better than the paper default: 4.0 % (2.0 to 6.0).",
    )
    trace = TraceInfo(
        name="rag-1.0-s7", regime="1.0", purpose="held-out", seed=7, digest="sha256:ab", num_requests=22,
        duration_s=50.0, rate_per_s=0.44,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "name": "demo",
        "origin": Origin.SIMULATED,
        "created_at": "2026-11-30T09:00:00+00:00",
        "objectives": [],
        "prefer": "mean",
        "space": {},
        "traces": [trace],
        "trials": [],
        "reference_trial": 0,
        "pick_trial": 1,
        "choice": "the best mean latency",
        "exported": setting,
        "exported_role": "tuned",
        "best_static": Setting.of(STATIC),
        "held_out": [held],
        "comparisons": [comparison],
        "importance": {},
        "importance_method": "",
        "hypervolume": {},
        "landscape": None,
        "not_identified": {"t_large": "no large prefill in the traces"},
        "warnings": [],
        "provenance": {"measured_on": {"profile_digest": "sha256:cd"}, "versions": {"optuna": "5.0.0"}},
    }
    return StudyResults(**{**fields, **changes})


@st.composite
def any_settings(draw: st.DrawFn) -> PolicyParams:
    seqs = draw(st.integers(1, 600))
    b_max = draw(st.integers(seqs, 40_000) | st.sampled_from([2048, 4096, 16384]))
    b_max = max(b_max, seqs)
    scope = draw(st.sampled_from(Scope))
    guard = draw(st.booleans())
    low = seqs if scope is Scope.GLOBAL and not guard else 1
    b_cap = draw(st.integers(low, b_max) | st.just(min(max(2048, low), b_max)))
    n_th, t_large = draw(st.integers(1, 5)), draw(st.none() | st.integers(1, 200_000))
    return PolicyParams(b_max, b_cap, n_th, t_large, scope, seqs, guard)


def at_rest(params: PolicyParams) -> PolicyParams:
    return PolicyParams.static(params.b_max, max_num_seqs=params.max_num_seqs) if params.is_static else params


@pytest.mark.parametrize("params", [*PUBLISHED.values(), TUNED, GUARDED, STATIC], ids=PolicyParams.label)
def test_every_file_of_an_export_loads_to_the_settings_it_is_for(tmp_path: Path, params: PolicyParams) -> None:
    files = write_export(results_of(params), tmp_path / "export")
    assert [file.name for file in files] == [
        "vllm.yaml", "ppas.env", "vllm-0.22.1.env", "vllm-0.27.1.env", "settings.json", "compose.yaml",
        *([] if params.is_static else ["Dockerfile"]), "kubernetes.yaml", "helm-values.yaml", "vllm-sweep.json",
        "auto_tune.txt", "README.md",
    ]  # fmt: skip
    assert sorted(files) == sorted((tmp_path / "export").iterdir())
    assert load_export(files[0]) == load_export(files[1]) == load_export(files[4]) == params
    for generation, file in zip(GENERATIONS, files[2:4], strict=True):
        assert load_export(file) == nearest_expressible(params, generation)[0]


@given(params=any_settings())
@settings(max_examples=60, deadline=None)
def test_any_settings_come_back_from_the_files(tmp_path_factory: pytest.TempPathFactory, params: PolicyParams) -> None:
    files = write_export(results_of(params), tmp_path_factory.mktemp("export"))
    assert load_export(files[0]) == load_export(files[1]) == load_export(files[4]) == at_rest(params)


@given(params=any_settings(), generation=st.sampled_from(GENERATIONS))
@settings(max_examples=300, deadline=None)
def test_the_nearest_setting_is_expressible_and_without_a_reason_it_is_the_setting(
    params: PolicyParams, generation: Generation
) -> None:
    near, reasons = nearest_expressible(params, generation)
    again, left = nearest_expressible(near, generation)
    assert (again, left) == (near, ())
    assert (near.b_max, near.max_num_seqs) == (params.b_max, params.max_num_seqs)
    if not reasons and params.scope is Scope.GLOBAL:
        assert near == params
    if not near.is_static:
        assert near.n_th == 2
        assert near.scope is (Scope.PREFILL if generation == "0.22.1" else Scope.GLOBAL)
    if reasons:
        with pytest.raises(InvalidInput, match=f"the patched vLLM {generation} cannot express"):
            environment(params, generation)


@given(params=any_settings())
@settings(max_examples=300, deadline=None)
def test_our_plugin_reads_the_environment_of_an_export_as_the_settings_themselves(params: PolicyParams) -> None:
    limits = EngineLimits(params.b_max, params.max_num_seqs)
    assert params_from_environment(environment(params), limits) == (None if params.is_static else params)
    for generation in GENERATIONS:
        near, _ = nearest_expressible(params, generation)
        found = params_from_environment(environment(near, generation), limits)
        assert found == (None if near.is_static else near)


@pytest.mark.parametrize(
    ("params", "generation", "near", "reasons"),
    [
        (PPAS, "0.22.1", PPAS, []),
        (PPAS, "0.27.1", PolicyParams(16384, 2048, scope=Scope.GLOBAL), ["the scope is prefill"]),
        (PLUS, "0.27.1", PLUS, []),
        (PLUS, "0.22.1", PolicyParams.static(2048, max_num_seqs=20), ["P-PAS+", "scope is global", "768", "b_max"]),
        (TUNED, "0.22.1", PolicyParams(12288, 2048), ["n_th is 3, the patch fixes 2", "b_cap is 1792"]),
        (TUNED, "0.27.1", PolicyParams(12288, 1792, scope=Scope.GLOBAL), ["n_th is 3", "the scope is prefill"]),
        (
            GUARDED,
            "0.27.1",
            PolicyParams(4096, 128, t_large=9000, scope=Scope.GLOBAL, max_num_seqs=128),
            ["decode_guard is on", "b_cap is 64, .* starve decodes of 128 sequences: raised to 128"],
        ),
        (STATIC, "0.22.1", STATIC, []),
    ],
)
def test_what_a_patch_cannot_express_is_named(
    params: PolicyParams, generation: Generation, near: PolicyParams, reasons: list[str]
) -> None:
    found, why = nearest_expressible(params, generation)
    assert found == near
    assert len(why) == len(reasons)
    for text, pattern in zip(why, reasons, strict=True):
        assert re.search(pattern, text)


def test_another_generation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"'0\.27\.0'; did you mean '0\.27\.1'\? allowed: 0\.22\.1, 0\.27\.1"):
        nearest_expressible(PPAS, "0.27.0")  # type: ignore[arg-type]


def test_a_file_for_a_patch_says_what_it_cannot_do_and_what_that_costs(tmp_path: Path) -> None:
    asked: list[PolicyParams] = []

    def cost(params: PolicyParams) -> float:
        asked.append(params)
        return 1.0312

    files = write_export(results_of(TUNED), tmp_path, cost=cost)
    own, old, new = (file.read_text() for file in files[1:4])
    assert asked == [nearest_expressible(TUNED, generation)[0] for generation in GENERATIONS]
    assert "# NOT for the patched vLLM 0.22.1" in own
    assert "# NOT for the patched vLLM 0.27.1" in own
    assert "CANNOT express this setting: n_th is 3, the patch fixes 2; b_cap is 1792, the patch fixes 2048." in old
    assert "nearest setting that it can: 2/12288/2048 prefill." in old
    assert "Predicted (simulated): it costs 3.1 % on the preferred objective" in new
    patches = json.loads(files[4].read_text())["published_patches"]
    assert patches["0.22.1"]["exact"] is False
    assert patches["0.22.1"]["predicted_ratio"] == 1.0312


def test_a_file_for_a_patch_that_can_says_so_and_asks_for_no_cost(tmp_path: Path) -> None:
    def cost(params: PolicyParams) -> float:
        assert params.scope is Scope.GLOBAL, "the exact one needs no prediction"
        return 0.99

    files = write_export(results_of(PPAS), tmp_path, cost=cost)
    assert "# The patch expresses this setting exactly." in files[2].read_text()
    assert "Predicted (simulated): no cost; it is 1.0 % better" in files[3].read_text()
    assert "NOT for the patched vLLM 0.22.1" not in files[1].read_text()


def test_what_costs_nothing_is_not_said_to_cost_nothing_point_nothing_per_cent(tmp_path: Path) -> None:
    text = write_export(results_of(TUNED), tmp_path, cost=lambda params: 0.99996)[3].read_text()
    assert "Predicted (simulated): it costs nothing" in text
    assert "0.0 %" not in text


def trial_of(number: int, params: PolicyParams, ratio: float, **changes: Any) -> Trial:
    fields: dict[str, Any] = {
        "number": number, "arm": "search", "setting": Setting.of(params), "state": "ok", "regimes": {}, "branch_steps": {},
        "objectives": {"mean_latency_s": ratio}, "dimensions": {}, "on_front": False, "duration_s": 1.0,
    }  # fmt: skip
    return Trial(**{**fields, **changes})


MEAN = Objective(metric="mean_latency_s", label="mean end-to-end latency", better="lower")


@pytest.mark.parametrize("state", ["ok", "failed"])
def test_of_a_live_study_the_cost_of_a_patch_is_what_was_measured_and_a_prediction_only_where_nothing_was(
    state: str, tmp_path: Path
) -> None:
    small = PolicyParams(b_max=1280, b_cap=128)  # 0.22.1 would never act: a static budget is the nearest
    # As a study writes a static budget: with the reference's other knobs, none of which can act.
    static = trial_of(1, PolicyParams(b_max=1280, b_cap=1280, n_th=3), 0.9, state=state)
    results = results_of(
        small, origin=Origin.LIVE, objectives=[MEAN], trials=[trial_of(0, small, 0.6), static], held_out=[]
    )
    files = write_export(results, tmp_path, cost=lambda params: 1.2, cost_note="It was 3.4 % off.")
    old, new = (file.read_text() for file in files[2:4])
    measured = "Measured on the tuning traces, trial 1 against trial 0: it costs 50.0 %"
    predicted = "# The study did not measure that setting.\n# Predicted (simulated): it costs 20.0 % on mean end-to-end latency."
    assert (measured if state == "ok" else predicted) in old
    assert predicted in new
    assert "# It was 3.4 % off.\n" in new
    patches = json.loads(files[4].read_text())["published_patches"]
    assert (patches["0.22.1"]["measured"] is None) is (state != "ok")
    assert patches["0.27.1"] | {"measured": None, "predicted_ratio": 1.2} == patches["0.27.1"]
    why = write_export(results, tmp_path, cost_note="the study had no simulator")[3].read_text()
    assert "# What it costs was not predicted: the study had no simulator.\n" in why


def test_the_held_out_traces_say_what_a_patch_costs_where_both_settings_were_replayed_there(tmp_path: Path) -> None:
    tuned = results_of(TUNED).held_out[0].model_copy(update={"regimes": {"1.0": {"mean_latency_s": 1.0}}})
    near = Setting.of(PolicyParams(12288, 2048))
    reference = tuned.model_copy(update={"setting": near, "regimes": {"1.0": {"mean_latency_s": 1.25}}})
    results = results_of(TUNED, origin=Origin.LIVE, objectives=[MEAN], held_out=[tuned, reference])
    assert "Measured on the held-out traces: it costs 25.0 %" in write_export(results, tmp_path)[2].read_text()


def prediction_of(**changes: Any) -> Prediction:
    fields: dict[str, Any] = {
        "profile": "p", "source": "calibrated", "settings": 9, "sweep_s": 1.0, "num_trials": 11, "error_pct": 3.4,
        "concordance": 0.9, "rank_correlation": 0.9, "verdict": "trusted", "sentence": "Trusted.",
    }  # fmt: skip
    return Prediction(**{**fields, **changes})


def test_the_simulator_of_a_live_study_predicts_costs_while_the_study_trusts_it_and_else_it_is_said_why_not(
    tmp_path: Path,
) -> None:
    write_study(tmp_path, backend="vllm", server={"model": "org/model"}, space="ppas")
    load_profile(DEFAULT_PROFILE).save(tmp_path / "calibrated.json")
    results = results_of(PPAS, origin=Origin.LIVE, prediction=prediction_of())
    predict, note = predicted_cost(results, RunFolder(tmp_path), Setting.of(PPAS))
    assert predict is not None
    assert predict(PPAS) == pytest.approx(1.0)
    assert predict(PolicyParams.static(512)) != pytest.approx(1.0)
    assert "3.4 % off in the mean over 11 trials" in note
    for prediction, why in (
        (None, "had no simulator"),
        (prediction_of(verdict="dropped"), "was dropped"),
        (prediction_of(verdict="refitted"), "that fit is not kept"),
    ):
        results = results_of(PPAS, origin=Origin.LIVE, prediction=prediction)
        found, note = predicted_cost(results, RunFolder(tmp_path), Setting.of(PPAS))
        assert found is None
        assert why in note
    (tmp_path / "calibrated.json").unlink()
    results = results_of(PPAS, origin=Origin.LIVE, prediction=prediction_of())
    assert predicted_cost(results, RunFolder(tmp_path), Setting.of(PPAS))[0] is None


def test_every_file_names_the_study_and_that_it_is_simulated(tmp_path: Path) -> None:
    files = write_export(results_of(TUNED, name="nightly\nPPAS_ENABLED=1"), tmp_path)
    for file in files[:4]:
        text = file.read_text()
        assert "# Made by ppas-autotune" in text
        assert "nightly?PPAS_ENABLED=1, 2026-11-30" in text
        assert "its measurements are simulated" in text
    assert json.loads(files[4].read_text())["origin"] == "simulated"


def test_the_settings_file_holds_the_digest_chain_and_the_verdict(tmp_path: Path) -> None:
    results = results_of(TUNED)
    results.save(tmp_path / "results.json")
    data = json.loads(write_export(results, tmp_path / "export")[4].read_text())
    on_disk = hashlib.sha256((tmp_path / "results.json").read_bytes()).hexdigest()
    assert data["study"]["digest"] == f"sha256:{on_disk}"
    assert data["params_digest"] == settings_digest(TUNED)
    assert data["measured_on"] == {"profile_digest": "sha256:cd"}
    assert data["traces"] == [{"name": "rag-1.0-s7", "purpose": "held-out", "digest": "sha256:ab"}]
    assert data["versions"] == {"optuna": "5.0.0"}
    assert data["study"]["role"] == "tuned"
    assert [v["verdict"] for v in data["study"]["verdicts"]] == ["better"]
    assert data["study"]["not_identified"] == {"t_large": "no large prefill in the traces"}


def test_the_readme_says_what_the_study_found_to_whoever_has_the_export_alone(tmp_path: Path) -> None:
    costs = ["mean TTFT 46.0 % worse\n# not a heading"]
    noise = NoiseInfo(
        metric="mean_latency_s", replay_pct=3.31, objective_pct=2.3, visible_pct=9.7, visible_held_out_pct=5.62,
        repeats=95, num_traces=2,
    )  # fmt: skip
    compared = results_of(TUNED).comparisons[0].model_copy(update={"costs": costs})
    results = results_of(TUNED, origin=Origin.LIVE, comparisons=[compared], noise=[noise])
    text = (write_export(results, tmp_path)[-1]).read_text()
    assert text.startswith("# An exported setting\n")
    for line in (
        compared.sentence,
        "Cost against paper default: mean TTFT 46.0 % worse?# not a heading",
        "Noise: mean end-to-end latency of one replay varies by 3.3 %; on the held-out traces, differences below 5.6 % are",
        "Measured on a live server; 2026-11-30T09:00:00+00:00.",
    ):
        assert f"    {line}" in text
    assert json.loads((tmp_path / "settings.json").read_text())["study"]["verdicts"][0]["costs"] == costs


def test_of_a_setting_that_was_not_compared_the_readme_gives_no_verdict_and_of_a_kept_reference_the_reason(
    tmp_path: Path,
) -> None:
    other = (write_export(results_of(TUNED), tmp_path, setting=Setting.of(PPAS))[-1]).read_text()
    assert "was not compared with others" in other
    assert "tuned is better" not in other
    assert "Simulated, not measured on a server" in other
    kept = results_of(TUNED, exported=Setting.of(PPAS), exported_role="paper default")
    text = (write_export(kept, tmp_path)[-1]).read_text()
    assert (
        "The study exports it, since it found no other setting to be clearly better:\n    tuned is better than the"
        in text
    )
    assert "Here tuned is 3/12288/1792 prefill." in text


def test_another_setting_of_the_study_is_exported_without_a_verdict_that_is_not_its_own(tmp_path: Path) -> None:
    files = write_export(results_of(TUNED), tmp_path, setting=Setting.of(PPAS))
    assert all(load_export(file) == PPAS for file in (files[0], files[1], files[4]))
    study = json.loads(files[4].read_text())["study"]
    assert (study["role"], study["verdicts"]) == (None, [])


def test_the_yaml_has_the_keys_of_the_server_and_a_static_budget_needs_no_scheduler(tmp_path: Path) -> None:
    tuned = yaml.safe_load(write_export(results_of(TUNED), tmp_path / "a")[0].read_text())
    assert tuned == {
        "max-num-batched-tokens": 12288,
        "max-num-seqs": 256,
        "scheduler-cls": SCHEDULER_CLASS,
        "additional-config": {"ppas": TUNED.to_dict()},
    }
    static = yaml.safe_load(write_export(results_of(STATIC), tmp_path / "b")[0].read_text())
    assert static == {"max-num-batched-tokens": 2048, "max-num-seqs": 64}


def test_a_shell_that_sources_the_environment_exports_exactly_the_variables(tmp_path: Path) -> None:
    file = write_export(results_of(GUARDED), tmp_path)[1]
    script = f"set -a; . {file}; set +a; env"
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {name: value for name, value in seen.items() if name.startswith("PPAS_")} == environment(GUARDED)
    assert f"# flags {' '.join(server_flags(GUARDED))}\n" in file.read_text()


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("vllm.yaml", "b_cap: 1792", "b_cap: 1024", "do not match their digest"),
        ("vllm.yaml", "max-num-seqs: 256", "max-num-seqs: 128", "max-num-seqs is 128, the settings say 256"),
        ("vllm.yaml", "b_cap: 1792", "b_kap: 1792", "unknown setting 'b_kap'"),
        ("vllm.yaml", "PpasScheduler", "OtherScheduler", "scheduler-cls is .*OtherScheduler'; allowed: ppas_core"),
        ("vllm.yaml", "# settings ", "# Settings ", "is no export of ppas-autotune"),
        ("vllm.yaml", "  ppas:", "  ppas: [", "is damaged"),
        ("vllm.yaml", "max-num-batched-tokens: 12288\n", "", "must both be there"),
        ("ppas.env", "PPAS_N_TH=3", "PPAS_N_TH=2", "do not match their digest"),
        ("ppas.env", "PPAS_N_TH=3\n", "", "do not match their digest"),
        ("ppas.env", "PPAS_N_TH=3", "PPAS_NTH=3", "unknown variable 'PPAS_NTH'; did you mean 'PPAS_N_TH'"),
        ("ppas.env", "PPAS_N_TH=3", "PPAS_N_TH=$(id)", "is no NAME=VALUE with a plain value"),
        ("ppas.env", "PPAS_N_TH=3", "PPAS_N_TH=3\nPPAS_N_TH=3", "stands there twice"),
        ("ppas.env", "PPAS_ENABLED=1", "PPAS_ENABLED=0", "neither PPAS_ENABLED nor PPAS_PLUS_ENABLED"),
        ("ppas.env", "PPAS_SCOPE=prefill", "PPAS_SCOPE=both", "scope is 'both'"),
        ("ppas.env", "--max-num-batched-tokens 12288", "--max-num-batched-tokens 8192", "do not match their digest"),
        ("ppas.env", "# flags ", "# Flags ", "line '# flags .* is missing"),
        ("settings.json", '"b_cap": 1792', '"b_cap": 1024', "do not match their digest"),
        ("settings.json", '"b_cap": 1792', '"b_cap": 99999', "it must not exceed b_max"),
        ("settings.json", '"version": 1', '"version": 2', "export version 2; this release reads version 1; a newer"),
        ("settings.json", '"kind"', '"sort"', "is no export of ppas-autotune"),
        ("settings.json", "{", "", "is damaged"),
    ],
)
def test_a_changed_or_foreign_file_is_refused(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    write_export(results_of(TUNED), tmp_path)
    file = tmp_path / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidInput, match=rf"(?s){name}: .*{message}"):
        load_export(file)


def test_a_missing_file_and_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"settings\.json: cannot be read"):
        load_export(tmp_path / "settings.json")
    with pytest.raises(InvalidInput, match=r"notes\.txt: is no export; allowed: vllm\.yaml"):
        load_export(tmp_path / "notes.txt")


def test_flags_that_a_person_added_to_the_yaml_do_not_matter(tmp_path: Path) -> None:
    file = write_export(results_of(TUNED), tmp_path)[0]
    file.write_text(file.read_text() + "  ppas_runtime: {step_log: steps.csv}\nmax-model-len: 32768\n")
    assert load_export(file) == TUNED


@pytest.mark.live
def test_the_parser_of_vllm_itself_takes_the_yaml(tmp_path: Path) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    tried = (TUNED, GUARDED, STATIC)
    files = [write_export(results_of(params), tmp_path / params.label().replace("/", "-"))[0] for params in tried]
    # In its own process: importing vLLM changes logging and the environment.
    script = (
        "import json, sys\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser\n"
        "parser = Parser()\n"
        "for name in ('max-num-batched-tokens', 'max-num-seqs'): parser.add_argument('--' + name, type=int)\n"
        "parser.add_argument('--scheduler-cls'); parser.add_argument('--additional-config', type=json.loads)\n"
        "for file in sys.argv[1:]: print(json.dumps(vars(parser.parse_args(['--config', file]))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for params, line in zip(tried, done.stdout.splitlines()[-len(tried) :], strict=True):
        found = json.loads(line)
        assert (found["max_num_batched_tokens"], found["max_num_seqs"]) == (params.b_max, params.max_num_seqs)
        assert found["scheduler_cls"] == (None if params.is_static else SCHEDULER_CLASS)
        assert found["additional_config"] == (None if params.is_static else {"ppas": params.to_dict()})
