"""The latency histogram: percentiles against the sorted values, and that merging loses nothing."""

from __future__ import annotations

import math

import pytest
from cachesvc_lab.replay_report import BUCKETS_PER_DECADE, DECADES, LOWEST_MS, LatencyHistogram
from hypothesis import given, settings
from hypothesis import strategies as st

HIGHEST_MS = LOWEST_MS * 10**DECADES
HALF_BUCKET = 10 ** (0.5 / BUCKETS_PER_DECADE) * (1 + 1e-9)

latencies = st.lists(st.floats(LOWEST_MS, HIGHEST_MS), min_size=1, max_size=60)


def filled(values: list[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.record(value)
    return histogram


@settings(deadline=None)
@given(latencies, st.floats(0.01, 100))
def test_a_percentile_is_the_sorted_value_to_half_a_bucket(values: list[float], percent: float) -> None:
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    told = filled(values).percentile_ms(percent)
    assert exact / HALF_BUCKET <= told <= exact * HALF_BUCKET


@settings(deadline=None)
@given(latencies, latencies)
def test_merging_is_recording_both(first: list[float], second: list[float]) -> None:
    merged, other, both = filled(first), filled(second), filled(first + second)
    merged.merge(other)
    assert other.counts == filled(second).counts
    assert (merged.counts, merged.min_ms, merged.max_ms) == (both.counts, both.min_ms, both.max_ms)
    assert merged.total == pytest.approx(both.total)


def test_an_empty_one_merges_as_nothing() -> None:
    empty = LatencyHistogram()
    empty.merge(filled([2.0, 4.0]))
    empty.merge(LatencyHistogram())
    assert (empty.count, empty.min_ms, empty.max_ms, empty.total) == (2, 2.0, 4.0, 6.0)


def test_a_single_value_is_every_percentile() -> None:
    histogram = filled([3.217])
    assert [histogram.percentile_ms(percent) for percent in (0.1, 50, 99, 100)] == [3.217] * 4


def test_the_median_of_two_camps_and_its_tail() -> None:
    histogram = filled([1.0] * 98 + [250.0] * 2)
    assert histogram.percentile_ms(50) == pytest.approx(1.0, rel=0.024)
    assert histogram.percentile_ms(98) == pytest.approx(1.0, rel=0.024)
    assert histogram.percentile_ms(99) == pytest.approx(250.0, rel=0.024)


def test_values_beyond_the_buckets_are_counted_and_their_extremes_kept() -> None:
    histogram = filled([0.0, 1e-9, 1e12])
    assert histogram.count == 3
    assert (histogram.min_ms, histogram.max_ms) == (0.0, 1e12)
    assert histogram.percentile_ms(50) <= LOWEST_MS * HALF_BUCKET
    assert histogram.cumulative()[-1] == (1e12, 1.0)
    assert histogram.percentile_ms(100) == pytest.approx(HIGHEST_MS, rel=0.024)


@settings(deadline=None)
@given(latencies)
def test_the_cumulative_shares_ascend_to_one(values: list[float]) -> None:
    points = filled(values).cumulative()
    edges = [edge_ms for edge_ms, _ in points]
    shares = [share for _, share in points]
    assert edges == sorted(edges)
    assert shares == sorted(set(shares))
    assert shares[-1] == 1.0
    for edge_ms, share in points:
        below = sum(value <= edge_ms * (1 + 1e-9) for value in values) / len(values)
        strictly_below = sum(value < edge_ms / (1 + 1e-9) for value in values) / len(values)
        assert strictly_below <= share <= below


@pytest.mark.parametrize("value", [-0.001, math.nan, math.inf])
def test_what_is_no_latency_is_refused_and_not_counted(value: float) -> None:
    histogram = LatencyHistogram()
    with pytest.raises(ValueError, match="latency"):
        histogram.record(value)
    assert histogram.count == 0
    assert histogram.cumulative() == []


@pytest.mark.parametrize("percent", [0, -1, 100.1, math.nan])
def test_a_percent_out_of_range_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        filled([1.0]).percentile_ms(percent)


def test_an_empty_one_has_no_percentiles() -> None:
    with pytest.raises(ValueError, match="empty"):
        LatencyHistogram().percentile_ms(50)
