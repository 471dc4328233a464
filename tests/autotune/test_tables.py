"""Results as tables: the same numbers as in results.json, in Parquet and in CSV."""

import csv
import json
from pathlib import Path

import pandas as pd
import pytest
from test_export import TUNED, results_of
from typer.testing import CliRunner

from autotune import load_results
from autotune.cli import app
from autotune.export.tables import trials_table, write_tables
from autotune.results import Setting, Trial


def run_export(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["export", *arguments])
    return found.exit_code, found.output


@pytest.fixture(scope="module")
def tables(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    code, output = run_export(str(finished_run), "--results", "-o", str(folder), "--json")
    assert code == 0, output
    assert json.loads(output)["files"] == [
        str(folder / f"{name}.{kind}") for name in ("trials", "requests", "comparisons") for kind in ("parquet", "csv")
    ]
    return folder


def test_every_trial_is_a_row_with_its_knobs_ratios_and_reason(tables: Path, finished_run: Path) -> None:
    results = load_results(finished_run)
    found = pd.read_parquet(tables / "trials.parquet")
    assert list(found["number"]) == [trial.number for trial in results.trials]
    assert list(found["setting"]) == [trial.setting.label for trial in results.trials]
    assert list(found["setting.b_max"]) == [trial.setting.params["b_max"] for trial in results.trials]
    for metric in ("mean_latency_s", "p95_latency_s"):
        ratios = [trial.objectives[metric] for trial in results.trials]
        assert list(found[f"ratio.{metric}"]) == ratios
        assert list(found[f"gain_pct.{metric}"]) == pytest.approx([(1 - ratio) * 100 for ratio in ratios])
    assert list(found["number"][found["is_pick"]]) == [results.pick_trial]
    assert set(found["origin"]) == {"simulated"}


def test_requests_pair_up_between_roles(tables: Path, finished_run: Path) -> None:
    results = load_results(finished_run)
    found = pd.read_parquet(tables / "requests.parquet")
    wide = found.pivot(index="request", columns="role", values="latency_s")
    for held in results.held_out:
        assert list(wide[held.role]) == held.requests.latency_s
    lengths = found.groupby("request")["prompt_tokens"].nunique()
    assert set(lengths) == {1}


def test_comparisons_have_every_effect_with_its_interval(tables: Path, finished_run: Path) -> None:
    results = load_results(finished_run)
    found = pd.read_parquet(tables / "comparisons.parquet")
    first = results.comparisons[0]
    row = found[
        (found["candidate"] == first.candidate)
        & (found["reference"] == first.reference)
        & (found["regime"] == "overall")
        & found["preferred"]
    ].iloc[0]
    effect = first.overall[first.preferred_metric]
    assert (row["improvement_pct"], row["low_pct"], row["high_pct"]) == (
        effect.improvement_pct, effect.low_pct, effect.high_pct,
    )  # fmt: skip
    assert row["verdict"] == first.verdict


def test_csv_and_parquet_say_the_same(tables: Path) -> None:
    for name in ("trials", "requests", "comparisons"):
        left, right = pd.read_parquet(tables / f"{name}.parquet"), pd.read_csv(tables / f"{name}.csv")
        assert list(left.columns) == list(right.columns)
        numbers = left.select_dtypes("number").columns
        pd.testing.assert_frame_equal(left[numbers], right[numbers], check_dtype=False)


def test_a_text_that_a_spreadsheet_would_run_is_only_text_in_csv(tmp_path: Path) -> None:
    trial = Trial(
        number=0, arm="search", setting=Setting.of(TUNED), state="failed", reason='=HYPERLINK("http://evil")',
        objectives={}, regimes={}, branch_steps={}, dimensions={}, on_front=False, duration_s=1.0,
    )  # fmt: skip
    results = results_of(TUNED, trials=[trial], pick_trial=0)
    write_tables(results, tmp_path)
    with (tmp_path / "trials.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["reason"] == '\'=HYPERLINK("http://evil")'
    assert trials_table(results)["reason"][0].startswith("=")
    assert pd.read_parquet(tmp_path / "trials.parquet")["reason"][0].startswith("=")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--results", "--format", "xlsx"], "format is 'xlsx'; allowed: parquet, csv"),
        (["--results", "--trial", "1"], "--results writes all trials"),
        (["--format", "csv"], "--format belongs to --results"),
    ],
)
def test_options_that_do_not_go_together_are_refused(finished_run: Path, arguments: list[str], words: str) -> None:
    code, output = run_export(str(finished_run), *arguments)
    assert (code, words in output) == (2, True), output


def test_one_format_alone(finished_run: Path, tmp_path: Path) -> None:
    assert run_export(str(finished_run), "--results", "--format", "csv", "-o", str(tmp_path), "-q") == (0, "")
    assert {file.suffix for file in tmp_path.iterdir()} == {".csv"}
