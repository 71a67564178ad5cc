"""Intervals against scipy, brute force, and simulation with known truth."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from slipstream.errors import InvalidArgumentError
from slipstream.measure import statistics
from slipstream_bench.systems.measure import streams as bench_streams


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_the_interval_of_the_median_contains_it_and_has_observed_bounds(values, level):
    array = np.array(values)
    found = statistics.median_interval(array, level)
    assert found.low <= found.estimate <= found.high
    assert found.estimate == np.median(array)
    assert found.low in values or found.low == -math.inf


@pytest.mark.parametrize("n", [6, 10, 25, 80, 333, 1200, 2500])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_independent_blocks_get_the_binomial_interval(n, level):
    # An alternating stream has no positive autocorrelation; its values are their own ranks.
    values = np.empty(n)
    values[::2] = np.arange((n + 1) // 2)
    values[1::2] = np.arange(n - 1, (n + 1) // 2 - 1, -1)
    found = statistics.median_interval(values, level)
    if found.low == -math.inf:
        assert 2 * stats.binom.cdf(0, n, 0.5) > 1 - level
        return
    # Excluding `low` values at each end misses the median this often; one more, too often.
    assert 2 * stats.binom.cdf(found.low, n, 0.5) <= 1 - level
    assert 2 * stats.binom.cdf(found.low + 1, n, 0.5) > 1 - level
    assert found.high == n - 1 - found.low


def test_five_blocks_cannot_have_a_95_percent_interval_and_six_can():
    assert statistics.median_interval(np.arange(5.0), 0.95).high == math.inf
    assert statistics.median_interval(np.array([1.0, 5, 2, 4, 3, 6]), 0.95).high == 6.0
    assert statistics.minimum_blocks(0.95) == 6
    assert statistics.minimum_blocks(0.99) == 8


@pytest.mark.parametrize("kind", bench_streams.KINDS)
@pytest.mark.parametrize("n", [40, 160])
def test_95_percent_intervals_cover_the_known_ratio_in_93_to_97_percent(kind, n):
    streams, truth = bench_streams.log_ratios(kind, n, 600, seed=3)
    covered = sum(
        not statistics.median_interval(stream, 0.95).excludes(truth) for stream in streams
    )
    # 600 streams of a true 95 %: three standard errors are 2.7 %.
    assert 0.925 <= covered / 600 <= 0.98


def test_autocorrelated_streams_get_wider_intervals():
    streams, _ = bench_streams.log_ratios("autocorrelated", 200, 30, seed=1)
    rng = np.random.default_rng(0)
    wider = []
    for stream in streams:
        dependent = statistics.median_interval(stream, 0.95)
        independent = statistics.median_interval(rng.permutation(stream), 0.95)
        assert dependent.estimator == "median_dependent"
        wider.append((dependent.high - dependent.low) / (independent.high - independent.low))
    # The long-run variance at autocorrelation 0.5 is about twice the median's own.
    assert 1.3 < np.mean(wider) < 2


def test_lag1_autocorrelation_agrees_with_the_truth_of_an_ar1_stream():
    streams, _ = bench_streams.log_ratios("autocorrelated", 4000, 1, seed=2)
    assert statistics.lag1_autocorrelation(streams[0]) == pytest.approx(
        bench_streams.CORRELATION, abs=0.05
    )
    assert statistics.lag1_autocorrelation(np.ones(50)) == 0.0


def test_the_tail_needs_the_number_of_samples_of_the_textbook():
    assert statistics.tail_samples_needed(0.99, 0.99) == 459
    with pytest.raises(InvalidArgumentError, match=r"^quantile: .*\bp99\b.*\b50\b") as caught:
        statistics.quantile_ratio(np.ones(50), np.ones(50), 0.99, 0.95)
    needed = statistics.tail_samples_needed(0.99, 0.95)
    assert re.search(rf"\b{needed}\b", caught.value.remedy or "")
    with pytest.raises(InvalidArgumentError):
        statistics.tail_samples_needed(1.0, 0.95)


def test_a_p90_ratio_covers_the_known_ratio():
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(30):
        base = rng.lognormal(0, 0.1, 200)
        found = statistics.quantile_ratio(1.1 * rng.lognormal(0, 0.1, 200), base, 0.9, 0.95)
        covered += not found.excludes(1.1)
    assert covered >= 24  # a true 95 % gives fewer once in 1,000 times


def test_throughput_agrees_with_scipys_bootstrap_of_the_same_blocks():
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(0, 0.2, 60), rng.lognormal(0.1, 0.2, 60)
    found = statistics.throughput_ratio(a, b, 0.95)
    expected = stats.bootstrap(
        (a, b), lambda x, y, axis: y.sum(axis) / x.sum(axis), paired=True, method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=0.01)
    assert found.estimator == "bca_bootstrap"


def test_the_same_seed_gives_the_same_digits():
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(size=300), rng.lognormal(size=300)
    first = statistics.throughput_ratio(a, b, 0.95, seed=4)
    assert first == statistics.throughput_ratio(a, b, 0.95, seed=4)


def test_autocorrelated_blocks_are_resampled_in_runs():
    streams, _ = bench_streams.log_ratios("autocorrelated", 300, 1, seed=1)
    a, b = np.exp(streams[0]), np.ones(300)
    found = statistics.throughput_ratio(a, b, 0.95)
    assert found.estimator == "stationary_bootstrap"
    shuffled = np.random.default_rng(0).permutation(a)
    narrow = statistics.throughput_ratio(shuffled, b, 0.95)
    assert found.high - found.low > 1.2 * (narrow.high - narrow.low)


def test_constant_blocks_have_an_interval_of_no_width():
    found = statistics.throughput_ratio(np.full(30, 2.0), np.full(30, 4.0), 0.95)
    assert (found.low, found.estimate, found.high) == (2.0, 2.0, 2.0)


def test_rank_intervals_contain_every_order_that_the_comparisons_allow():
    nothing_known = [[False] * 3 for _ in range(3)]
    assert statistics.rank_intervals(nothing_known) == [(1, 3)] * 3
    first_best = [[False, True, True], [False] * 3, [False] * 3]
    assert statistics.rank_intervals(first_best) == [(1, 1), (2, 3), (2, 3)]


def test_the_detectable_difference_is_found_80_percent_of_the_time():
    # Normal blocks of deviation 1 %: the interval's half width is 1.96 x 1.2533 x 1 % / sqrt(n).
    n, deviation = 100, 0.01
    half = 1.96 * 1.2533 * deviation / math.sqrt(n)
    effect = math.log1p(statistics.detectable_difference(half, 0.95))
    rng = np.random.default_rng(1)
    found = sum(
        statistics.median_interval(rng.normal(effect, deviation, n), 0.95).excludes(0.0)
        for _ in range(400)
    )
    assert 0.70 <= found / 400 <= 0.88


def test_more_blocks_are_suggested_only_if_they_would_help():
    assert statistics.blocks_to_settle(10, 0.0, 0.04, 0.95, 0.02) == pytest.approx(31, abs=2)
    assert statistics.blocks_to_settle(10, 0.5, 0.6, 0.95, 0.02) > 0
    assert statistics.blocks_to_settle(10, 0.0, math.inf, 0.95, 0.02) is None


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5])
def test_an_impossible_level_is_refused(level):
    with pytest.raises(InvalidArgumentError, match="level"):
        statistics.median_interval(np.arange(9.0), level)


def test_an_empty_series_is_refused():
    with pytest.raises(InvalidArgumentError, match="no values"):
        statistics.median_interval(np.array([]), 0.95)


def test_an_interval_at_exactly_its_level_is_accepted():
    # Two values are on one side of the median half the time, which a level of 50 % allows.
    found = statistics.median_interval(np.array([1.0, 2.0]), 0.5)
    assert (found.low, found.high) == (1.0, 2.0)
    assert statistics.median_interval(np.array([1.0, 2.0]), 0.51).high == math.inf


def test_common_disturbances_do_not_make_the_ratio_dependent():
    streams, _ = bench_streams.log_ratios("autocorrelated", 300, 1, seed=1)
    rng = np.random.default_rng(0)
    a, b = (np.exp(streams[0]) * rng.lognormal(0, 0.01, 300) for _ in range(2))
    assert statistics.lag1_autocorrelation(a) > statistics.DEPENDENT
    assert statistics.throughput_ratio(a, b, 0.95).estimator == "bca_bootstrap"


def test_the_percentile_is_the_requested_one():
    low, high = np.split(np.sort(np.random.default_rng(0).lognormal(0, 0.2, 60)), 2)
    values = np.column_stack([low, high]).ravel()  # without positive autocorrelation
    found = statistics.block_bootstrap(np.median, [values], 0.9, method="percentile")
    assert found.estimator == "percentile_bootstrap"
    assert found.low < found.estimate < found.high


@pytest.mark.parametrize(
    ("n", "correlation", "length"),
    [
        # Carlstein (1986): (sqrt(6) rho / (1 - rho^2))^(2/3) n^(1/3).
        (1000, 0.5, 13.867), (8000, 0.2, 12.772), (1000, 0.01, 2.0), (20, 0.9, 5.0),
    ],
)  # fmt: skip
def test_runs_have_the_optimal_length_for_their_correlation(n, correlation, length):
    assert statistics._block_length(n, correlation) == pytest.approx(length, abs=1e-3)
