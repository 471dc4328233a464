"""Durations as users write them: what is taken, and that the message of a refusal tells the range that holds."""

import pytest

from autotune.durations import parse_duration_s
from ppas_core.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.001s", 0.001), ("0.5s", 0.5), ("90s", 90), ("45m", 2700), ("2h", 7200), ("1h30m", 5400), ("30d", 2_592_000),
        ("1d12h", 129_600), ("1.5h", 5400), ("720h", 2_592_000),
    ],
)  # fmt: skip
def test_durations_from_a_millisecond_to_thirty_days_are_read(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0s",
        "0.0009s",
        "31d",
        "30d1s",
        "90",
        "s",
        "-5s",
        "1h 30m",
        "1e3s",
        "1w",
        "٣s",
        ".5s",
        "9" * 5000 + "s",
        "5s\n",
    ],
    ids=lambda text: text[:8],
)
def test_other_durations_are_refused_with_the_range_that_holds(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"allowed: 0\.001s to 30d, written as .* or 2d$") as caught:
        parse_duration_s(text)
    assert len(str(caught.value)) < 250
