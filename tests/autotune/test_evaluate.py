"""`ppas evaluate`: the paper's aggregates come out of raw logs, honestly paired, and say what was left out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from small_study import write_study
from sweep_log import row, simulated_log, write_rows
from typer.testing import CliRunner

from autotune.cli import app
from autotune.runlogs.improvement import improvement
from autotune.runlogs.read import read_runs
from ppas_core.defaults import published
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import load_profile
from traces.generate import rag_bursts

SHOWN = ("mean_latency_s", "p95_latency_s", "mean_ttft_s", "mean_tpot_s", "makespan_s")


def evaluated(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def comparisons(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["baseline"]: one for one in found["results"][0]["comparisons"]}


@pytest.mark.shared
def test_the_paper_s_aggregates_come_out_of_its_raw_log(shared: Path) -> None:
    found = evaluated(shared / "paper/RTX5090_qwen_3b.txt")
    assert found["runs"] == 210
    assert found["lost_requests"] == []
    by_baseline = comparisons(found)
    for baseline, expected in {
        "mbt_2048_s256": (8.5, 3.0, 11.8, 3.4, 1.0),
        "mbt_16384_s256": (11.3, 10.0, -18.5, 36.3, -3.9),
    }.items():
        percent = by_baseline[baseline]["improvement_pct"]
        assert tuple(round(percent[name], 1) for name in SHOWN) == expected
        assert by_baseline[baseline]["num_traces"] == 30


def test_regimes_count_alike_and_seeds_of_a_regime_count_by_their_means(tmp_path: Path) -> None:
    # λ=0.4: means 3 against 6 s, half; λ=0.8: 8 against 4 s, double. The geometric mean of 1/2 and 2 is no change.
    latencies = {
        ("ppas_", 0.4): (1.0, 5.0),
        ("mbt_2048_s256", 0.4): (4.0, 8.0),
        ("ppas_", 0.8): (8.0, 8.0),
        ("mbt_2048_s256", 0.8): (4.0, 4.0),
    }
    rows = [
        row(config, seed, rate, (value, 2 * value, 1.0, 1.0, 0.1, 0.1, 50.0))
        for (config, rate), values in latencies.items()
        for seed, value in enumerate(values)
    ]
    one = comparisons(evaluated(write_rows(tmp_path / "log.txt", rows)))["mbt_2048_s256"]
    assert one["improvement_pct"]["mean_latency_s"] == pytest.approx(0.0)
    assert one["regimes"]["λ=0.4"]["mean_latency_s"] == pytest.approx(50.0)
    assert one["regimes"]["λ=0.8"]["mean_latency_s"] == pytest.approx(-100.0)
    assert one["improvement_pct"]["makespan_s"] == pytest.approx(0.0)


def test_a_run_that_lost_requests_is_left_out_with_its_partner_and_named(tmp_path: Path) -> None:
    rows = [row("ppas_", seed, figures=(2.0, 2, 2, 2, 0.1, 0.1, 2)) for seed in (0, 1)]
    rows += [row("mbt_2048_s256", 0, figures=(4.0, 4, 4, 4, 0.2, 0.2, 4)), row("mbt_2048_s256", 1, failed=3)]
    log = write_rows(tmp_path / "log.txt", rows)
    found = evaluated(log)
    one = comparisons(found)["mbt_2048_s256"]
    assert (one["num_traces"], one["unpaired_traces"]) == (1, 1)
    assert one["improvement_pct"]["mean_latency_s"] == pytest.approx(50.0)
    assert found["left_out"] == 1
    assert "3 of 15 requests failed" in found["lost_requests"][0]
    assert comparisons(evaluated(log, "--with-failed"))["mbt_2048_s256"]["num_traces"] == 2
    shown = CliRunner().invoke(app, ["evaluate", str(log)])
    assert "1 of 4 runs lost requests and are left out" in shown.stderr


def test_where_every_run_lost_requests_there_is_no_result(tmp_path: Path) -> None:
    log = write_rows(tmp_path / "log.txt", [row("ppas_", failed=1), row("mbt_2048_s256", failed=1)])
    result = CliRunner().invoke(app, ["evaluate", str(log)])
    assert result.exit_code == 1
    assert "nothing can be compared" in result.stderr


def test_a_figure_that_no_run_has_is_said_and_the_others_stand(tmp_path: Path) -> None:
    rows = [row("ppas_"), row("mbt_2048_s256")]
    for one in rows:
        del one["avg_tpot"]
    log = write_rows(tmp_path / "log.txt", rows)
    assert comparisons(evaluated(log))["mbt_2048_s256"]["improvement_pct"]["mean_tpot_s"] is None
    assert "mean_tpot_s: not in every run" in CliRunner().invoke(app, ["evaluate", str(log)]).stdout


@pytest.mark.parametrize("named", ["2048", "mbt-2048", "mbt_2048", "MBT 2048", "mbt_2048_s256"])
def test_a_baseline_may_be_named_as_people_do(tmp_path: Path, named: str) -> None:
    log = write_rows(tmp_path / "log.txt", [row("ppas_"), row("mbt_2048_s256"), row("mbt_16384_s256")])
    assert list(comparisons(evaluated(log, "--baseline", named, "--candidate", "ppas"))) == ["mbt_2048_s256"]


def test_an_unknown_baseline_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    log = write_rows(tmp_path / "log.txt", [row("ppas_"), row("mbt_2048_s256")])
    result = CliRunner().invoke(app, ["evaluate", str(log), "--baseline", "mbt-4096"])
    assert result.exit_code == 2
    assert "mbt_2048_s256" in result.stderr


def test_matched_requests_are_counted_by_who_is_faster(tmp_path: Path) -> None:
    log = simulated_log(
        tmp_path / "log.txt",
        load_profile("rtx5090-qwen2.5-3b"),
        {"mbt_2048_s256": PolicyParams.static(2048), "ppas_": published("ppas")},
        [rag_bursts(1.0, seed) for seed in (0, 1)],
        with_requests=True,
    )
    one = comparisons(evaluated(log))["mbt_2048_s256"]
    found = read_runs([log]).runs
    sides = []
    for config in ("ppas_", "mbt_2048_s256"):
        by_request = {}
        for run in found:
            if run.config == config and run.requests is not None:
                by_request |= {
                    (run.workload.seed, i): s for i, s in zip(run.requests.ids, run.requests.latency_s, strict=True)
                }
        sides.append(by_request)
    faster = [sides[0][key] < sides[1][key] for key in sides[1]]
    assert one["matched_requests"]["requests"] == len(faster) == sum(run.num_requests for run in found) / 2
    assert one["matched_requests"]["share_faster"] == pytest.approx(sum(faster) / len(faster))
    assert 0 < sum(faster) < len(faster)
    assert one["matched_requests"]["unmatched"] == 0


def test_a_request_that_failed_on_one_side_is_matched_with_nothing(tmp_path: Path) -> None:
    log = simulated_log(
        tmp_path / "log.txt",
        load_profile("rtx5090-qwen2.5-3b"),
        {"mbt_2048_s256": PolicyParams.static(2048), "ppas_": published("ppas")},
        [rag_bursts(0.6, 0)],
        with_requests=True,
    )
    text = log.read_text()
    log.write_text(text.replace("'error': ''}", "'error': 'timed out'}", 1))
    matched = comparisons(evaluated(log))["mbt_2048_s256"]["matched_requests"]
    assert (matched["requests"], matched["unmatched"]) == (14, 1)


def test_requests_without_ids_are_matched_by_their_turn_to_arrive(tmp_path: Path) -> None:
    log = simulated_log(
        tmp_path / "log.txt",
        load_profile("rtx5090-qwen2.5-3b"),
        {"mbt_2048_s256": PolicyParams.static(2048), "ppas_": published("ppas")},
        [rag_bursts(1.0, 0)],
        with_requests=True,
    )
    with_ids = comparisons(evaluated(log))["mbt_2048_s256"]["matched_requests"]
    log.write_text(re.sub(r"'request_id': \d+, ", "", log.read_text()))
    assert comparisons(evaluated(log))["mbt_2048_s256"]["matched_requests"] == with_ids
    # One of them is not listed: who is who cannot be told any more.
    lines = log.read_text().splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if line.startswith("REQUEST_RESULT"))
    log.write_text("".join(lines[:first] + lines[first + 1 :]))
    assert comparisons(evaluated(log))["mbt_2048_s256"]["matched_requests"] is None


def test_our_own_run_folder_is_evaluated_as_a_log_is(tmp_path: Path) -> None:
    study = write_study(tmp_path, trials=3)
    result = CliRunner().invoke(app, ["tune", str(study), "--run", str(tmp_path / "run"), "--quiet"])
    assert result.exit_code == 0, result.output
    found = read_runs([tmp_path / "run"])
    reference = published("ppas").label()
    assert {run.config for run in found.runs} >= {reference, "mbt-2048"}
    one = improvement(found.runs, reference, "mbt-2048")
    assert one.matched is not None
    shown = evaluated(tmp_path / "run", "--candidate", reference, "--baseline", "mbt-2048", "--all-trials")
    assert shown["results"][0]["origin"] == ["simulated"]
    held_out = evaluated(tmp_path / "run", "--candidate", reference, "--baseline", "mbt-2048")
    traces = {run.workload.label for run in found.runs if run.held_out}
    assert len(traces) == 4
    assert held_out["runs"] == sum(run.held_out for run in found.runs) < len(found.runs)
    assert comparisons(shown)["mbt-2048"]["improvement_pct"]["mean_latency_s"] == one.overall["mean_latency_s"]


@pytest.mark.parametrize("json_output", [[], ["--json"]], ids=["table", "json"])
@pytest.mark.parametrize("zero_side", [("ppas_",), ("mbt_2048_s256",), ("ppas_", "mbt_2048_s256")], ids=str)
def test_figures_that_are_all_zero_are_no_result(
    zero_side: tuple[str, ...], json_output: list[str], tmp_path: Path
) -> None:
    figures = {name: (0.0,) * 7 if name in zero_side else (1.0,) * 7 for name in ("ppas_", "mbt_2048_s256")}
    log = write_rows(tmp_path / "log.txt", [row(name, figures=values) for name, values in figures.items()])
    result = CliRunner().invoke(app, ["evaluate", str(log), *json_output])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no figure can be compared" in result.stderr


def test_one_figure_that_says_something_is_enough(tmp_path: Path) -> None:
    rows = [row(name, figures=(value, 0, 0, 0, 0, 0, 0)) for name, value in (("ppas_", 1.0), ("mbt_2048_s256", 2.0))]
    one = comparisons(evaluated(write_rows(tmp_path / "log.txt", rows)))["mbt_2048_s256"]
    assert one["improvement_pct"]["mean_latency_s"] == pytest.approx(50.0)
    assert one["improvement_pct"]["makespan_s"] is None
