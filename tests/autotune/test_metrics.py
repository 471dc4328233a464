"""Every metric against numbers worked out by hand."""

import numpy as np
import pytest
from hand_made import records

from autotune import metrics
from autotune.metrics import Limits
from ppas_core.errors import InvalidInput

# Planned at 0, 1, 2; sent late; one-token output in the middle.
THREE = records([0.0, 1.0, 2.0], [[1.0, 1.5, 2.0], [4.0], [3.0, 7.0]], sent=[0.0, 1.5, 2.5])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean_latency_s", (2 + 3 + 5) / 3),
        ("p50_latency_s", 3.0),
        ("p95_latency_s", 3 + (5 - 3) * 0.9),  # place 1.9 of 0..2
        ("mean_ttft_s", (1 + 3 + 1) / 3),  # the one-token output counts
        ("mean_tpot_s", (0.5 + 4.0) / 2),  # and has no TPOT
        ("mean_itl_s", (0.5 + 0.5 + 4.0) / 3),  # no gap across requests
        ("makespan_s", 7.0),
    ],
)
def test_a_metric_has_its_hand_computed_value(name: str, expected: float) -> None:
    assert metrics.value(name, THREE) == pytest.approx(expected)


def test_latency_counts_from_the_planned_arrival_and_from_sending_beside_it() -> None:
    assert metrics.latency_s(THREE).tolist() == [2, 3, 5]
    assert metrics.latency_from_sent_s(THREE).tolist() == [2, 2.5, 4.5]


def test_goodput_counts_requests_within_every_limit_and_a_one_token_output_passes_the_tpot_limit() -> None:
    limits = Limits(latency_s=4, tpot_s=0.5)
    assert metrics.meets_limits(THREE, limits).tolist() == [1, 1, 0]
    assert metrics.value("goodput_per_s", THREE, limits) == pytest.approx(2 / 7)
    assert metrics.summarize(THREE, limits)["attainment"] == pytest.approx(2 / 3)


def test_failed_requests_have_no_latency_but_count_in_attainment_and_in_the_adjusted_percentile() -> None:
    some = records([0.0, 0.0], [[1.0, 2.0], []], status=["ok", "timeout"])
    assert metrics.value("mean_latency_s", some) == 2.0
    assert metrics.summarize(some)["attainment"] == 0.5
    assert metrics.summarize(some)["p95_latency_failure_adjusted_s"] == float("inf")
    assert some.failures() == {"timeout": 1}


def test_gaps_of_failed_requests_are_left_out_of_itl() -> None:
    some = records([0.0, 0.0, 0.0], [[1.0, 2.0], [1.0, 9.0], [5.0, 5.5]], status=["ok", "cut_stream", "ok"])
    assert metrics.itl_s(some).tolist() == [1.0, 0.5]


def test_an_empty_set_has_no_value_never_zero() -> None:
    nothing = records([0.0], [[]], status=["timeout"])
    assert all(np.isnan(metrics.value(name, nothing)) for name in metrics.METRICS)
    one_token = records([0.0], [[1.0]])
    assert np.isnan(metrics.value("mean_tpot_s", one_token))


def test_the_adjusted_percentile_equals_the_plain_one_without_failures() -> None:
    assert metrics.summarize(THREE)["p95_latency_failure_adjusted_s"] == pytest.approx(3.0 + 2 * 0.9)


def test_reductions_work_along_the_last_axis_and_skip_undefined_values() -> None:
    rows = np.array([[1.0, 3.0, np.nan], [2.0, 2.0, 5.0], [np.nan] * 3])
    assert np.array_equal(metrics.mean(rows), [2.0, 3.0, np.nan], equal_nan=True)
    assert np.array_equal(metrics.percentile(rows, 50), [2.0, 2.0, np.nan], equal_nan=True)


def test_unknown_metrics_and_bad_limits_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no metric 'latency'; known: mean_latency_s"):
        metrics.metric("latency")
    with pytest.raises(InvalidInput, match="ttft_s is 0; allowed: a number of seconds above 0"):
        Limits(ttft_s=0)
