"""How numbers and names are written."""

from __future__ import annotations

import colorsys
import math

import pytest

from reports import numbers, theme


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (0.8451, "845 ms"), (0.0312, "31.2 ms"), (0.0, "0 s"), (1.0, "1.00 s"), (1234.5, "1,234 s")],
)
def test_a_duration_is_in_seconds_from_one_second_up_and_in_milliseconds_below(seconds, text):
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_missing_or_not_finite_is_a_dash(value):
    assert numbers.duration(value) == numbers.percent(value) == numbers.significant(value) == "–"


@pytest.mark.parametrize(
    ("value", "text"), [(8.53, "+8.5 %"), (-3.0, "−3.0 %"), (0.01, "0.0 %"), (-0.01, "0.0 %"), (0.0, "0.0 %")]
)
def test_a_percentage_has_its_sign_unless_it_rounds_to_nothing(value, text):
    assert numbers.percent(value) == text


def test_markup_in_a_name_is_escaped_for_plotly():
    assert (
        numbers.plotly_text("<b>x</b> & <a href='#'>y</a>")
        == "&lt;b&gt;x&lt;/b&gt; &amp; &lt;a href='#'&gt;y&lt;/a&gt;"
    )


def test_a_name_is_one_line_without_control_characters_and_of_bounded_length():
    assert numbers.cleaned("a\n\x00b\u2028c\ud800d") == "a b c d"
    assert len(numbers.plotly_text("x" * 10_000)) == 120


def test_a_knob_that_is_none_is_off_and_whole_numbers_have_separators():
    assert [numbers.tokens(v) for v in (None, 16384, True, "prefill", 0.5)] == [
        "off",
        "16,384",
        "yes",
        "prefill",
        "0.5000",
    ]


def test_times_below_one_second_get_a_millisecond_axis():
    assert numbers.time_scale([0.03, None, math.nan]) == (1000.0, "ms")
    assert numbers.time_scale([0.03, 2.0]) == (1.0, "s")


def test_a_time_stamp_is_written_for_people_and_kept_when_it_is_none():
    assert numbers.moment("2026-11-30T09:12:44Z") == "30 Nov 2026, 09:12 UTC"
    assert numbers.moment("last week") == "last week"


@pytest.mark.parametrize(
    ("metric", "improvement", "text"),
    [
        ("mean_latency_s", 1.67, "1.7 % lower"),
        ("mean_latency_s", -20.2, "20.2 % higher"),
        ("mean_latency_s", -0.04, "no difference"),
        ("goodput_per_s", 20.0, "20.0 % better"),
        ("goodput_per_s", -3.0, "3.0 % worse"),
        ("mean_latency_s", math.nan, "–"),
    ],
)
def test_an_improvement_is_told_as_what_happens_to_the_metric(metric, improvement, text):
    assert numbers.change(improvement, metric) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.0, 2.4, "1.0 to 2.4 % lower"),
        (-7.7, -3.8, "3.8 to 7.7 % higher"),
        (-0.3, 2.4, "0.3 % higher to 2.4 % lower"),
        (-0.01, 2.4, "0.0 to 2.4 % lower"),
        (-2.4, 0.0, "0.0 to 2.4 % higher"),
        (-0.04, 0.04, "less than 0.1 % either way"),
        (-150.0, 117.0, "150.0 % higher to 100.0 % lower"),
        (-math.inf, 5.0, "any amount higher to 5.0 % lower"),
        (math.nan, 5.0, "– to –"),
    ],
)
def test_an_interval_is_told_without_signs(low, high, text):
    assert numbers.change_between(low, high, "mean_latency_s") == text


def test_one_of_a_thing_has_no_plural():
    assert [numbers.counted(n, "trace") for n in (0, 1, 2000)] == ["0 traces", "1 trace", "2,000 traces"]


def test_values_beside_each_other_share_their_unit_and_a_difference_needs_no_sign():
    column = [0.704, 1.04]
    scale = numbers.time_scale(column)
    assert [numbers.metric_value("mean_ttft_s", value, scale) for value in column] == ["0.704 s", "1.04 s"]
    assert numbers.metric_value("mean_ttft_s", 0.704) == "704 ms"
    found = [numbers.better_or_worse(value) for value in (20.14, -47.5, 0.01, math.nan)]
    assert found == ["20.1 % better", "47.5 % worse", "no difference", numbers.NONE]


def test_a_regime_keeps_its_hue_on_a_dark_page():
    for token in (f"load_{i}" for i in range(6)):
        hues = [colorsys.rgb_to_hls(*(int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0] for c in theme.TOKENS[token]]
        assert abs(hues[0] - hues[1]) < 0.05, token
