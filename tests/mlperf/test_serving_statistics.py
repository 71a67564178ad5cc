"""Early stopping agrees with the rules' numbers and SciPy's binomial distribution."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import binom

from slipstream.mlperf.serving import statistics


@pytest.mark.parametrize(
    ("percentile", "over", "queries"),
    [(0.9, 1, 64), (0.95, 1, 130), (0.97, 1, 219), (0.99, 1, 662), (0.999, 1, 6636),
     (0.99, 10, 2010), (0.99, 100, 12571)],
)  # fmt: skip
def test_min_queries_equal_the_rules(percentile: float, over: int, queries: int) -> None:
    assert statistics.min_queries(percentile, over) == queries


@given(st.integers(0, 300), st.floats(0.5, 0.999))
def test_one_query_fewer_does_not_support_the_percentile(over: int, percentile: float) -> None:
    """P(at most `over` of n exceed the bound) <= 1 % if each does with probability 1 - p."""
    queries = statistics.min_within(over, percentile) + over
    limit = 1 - statistics.CONFIDENCE
    assert binom.cdf(over, queries, 1 - percentile) <= limit * (1 + 1e-9)
    assert binom.cdf(over, queries - 1, 1 - percentile) > limit * (1 - 1e-9)


@given(st.integers(1, 20_000), st.sampled_from([0.9, 0.95, 0.97, 0.99]))
@example(10, 0.001)
def test_estimate_drops_as_many_queries_as_supported(queries: int, percentile: float) -> None:
    over = statistics.max_over(queries, percentile)
    assert statistics.min_queries(percentile, over + 1) > queries
    assert over == 0 or statistics.min_queries(percentile, over) <= queries
    dropped = statistics.discarded(queries, percentile)
    assert dropped == (over - 1 if over else None)
    if dropped is not None:
        latencies = [float(n) for n in range(queries)]
        assert statistics.estimate(latencies, percentile) == queries - 1 - dropped
