"""Lines at the end of a study: under which loads a gain is not clear, and what its number of settings counts."""

from pathlib import Path

import pytest

from autotune.by_load import by_load
from autotune.cli import study as command
from autotune.counts import measured_settings
from autotune.results import Effect, StudyResults

CLEAR = Effect(improvement_pct=21.7, low_pct=4.8, high_pct=36.2)
UNCLEAR = Effect(improvement_pct=11.2, low_pct=-14.4, high_pct=31.5)
WORSE = Effect(improvement_pct=-5.0, low_pct=-9.0, high_pct=-1.0)
MEAN = "mean_latency_s"


def with_regimes(run: Path, found: dict[str, Effect], verdict: str = "better") -> StudyResults:
    results = StudyResults.load(run / "results.json")
    regimes = {regime: {MEAN: effect} for regime, effect in found.items()}
    compared = results.comparisons[0].model_copy(update={"verdict": verdict, "regimes": regimes})
    return results.model_copy(update={"comparisons": [compared, *results.comparisons[1:]]})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"λ=8 p1500 o32": CLEAR, "λ=5 p1500 o32": UNCLEAR}, "+21.7 % at λ=8, not clear at λ=5"),
        ({"λ=10": CLEAR, "λ=2": WORSE, "λ=5": UNCLEAR}, "-5.0 % at λ=2, +21.7 % at λ=10, not clear at λ=5"),
        ({"day": CLEAR, "day late": UNCLEAR}, "+21.7 % at day, not clear at day late"),
        ({f"λ={load}": UNCLEAR if load < 3 else CLEAR for load in range(1, 6)}, "not clear in 2 of 5 load regimes"),
        ({"λ=5": UNCLEAR, "λ=8": UNCLEAR}, "not clear in any of 2 load regimes alone"),
    ],
)
def test_a_gain_that_is_not_clear_under_a_load_says_under_which(
    finished_run: Path, found: dict[str, Effect], said: str
) -> None:
    assert by_load(with_regimes(finished_run, found)) == f"mean end-to-end latency {said}"


def test_nothing_is_said_where_the_gain_is_clear_everywhere_or_there_is_none(finished_run: Path) -> None:
    assert by_load(with_regimes(finished_run, {"λ=5": CLEAR, "λ=8": WORSE})) is None
    assert by_load(with_regimes(finished_run, {"all": UNCLEAR})) is None
    assert by_load(with_regimes(finished_run, {"λ=5": CLEAR, "λ=8": UNCLEAR}, "inconclusive")) is None


def test_the_line_stands_under_the_table_at_the_end_of_a_study(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command._show(with_regimes(finished_run, {"λ=5": UNCLEAR, "λ=8": CLEAR}), finished_run)
    assert "\nby load: mean end-to-end latency +21.7 % at λ=8, not clear at λ=5\n" in capsys.readouterr().out


def test_the_number_of_settings_says_what_it_counts(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = StudyResults.load(finished_run / "results.json")
    command._show(results, finished_run)
    assert "\nsettings: 8 searched + the reference + 3 static budgets = 12 settings\n" in capsys.readouterr().out
    more = [
        trial.model_copy(update={"arm": arm, "dimensions": {}})
        for trial, arm in zip(results.trials[:2], ("random", "static"), strict=True)
    ]
    assert measured_settings(results.model_copy(update={"trials": [*results.trials, *more]})) == (
        "8 searched + the reference + 4 static budgets + 1 at random = 14 settings "
        "(2 outside the space, measured beside the search)"
    )
