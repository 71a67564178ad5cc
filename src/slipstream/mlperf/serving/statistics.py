"""Numbers of queries that a percentile needs, by MLPerf's early stopping.

A run supports the hypothesis that a share p of queries is within the bound if so few queries over
it are unlikely otherwise. With t queries over and h within the bound, that is
I_p(h, t + 1) <= 1 - c, with I the regularised incomplete beta function; MLPerf sets c = 0.99.

Source: MLPerf Inference rules, appendix on early stopping.
"""

from __future__ import annotations

from functools import lru_cache

CONFIDENCE = 0.99


@lru_cache(maxsize=1 << 16)
def min_within(over: int, percentile: float, confidence: float = CONFIDENCE) -> int:
    """Return the minimum number of queries within the bound for `over` queries over it.

    Args:
        over: t, 0 or more.
        percentile: p, above 0 and below 1.
    """
    from scipy.special import betainc

    def supported(within: int) -> bool:
        return bool(betainc(within, over + 1, percentile) <= 1 - confidence)

    high = 1
    while not supported(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if supported(middle) else (middle, high)
    return high


def supports(queries: int, over: int, percentile: float) -> bool:
    """Whether `queries`, of which `over` exceeded the bound, support the percentile."""
    return queries - over >= min_within(over, percentile)


def min_queries(percentile: float, over: int = 1) -> int:
    """Return the minimum number of queries for an estimate that `over` of them exceed."""
    return min_within(over, percentile) + over


def max_over(queries: int, percentile: float) -> int:
    """Return the largest t that `queries` allow; 0 if there are too few queries."""
    if queries < min_queries(percentile):
        return 0
    low, high = 1, queries + 1
    while high - low > 1:
        middle = (low + high) // 2
        supported = min_queries(percentile, middle) <= queries
        low, high = (middle, high) if supported else (low, middle)
    return low


def discarded(queries: int, percentile: float) -> int | None:
    """Return how many of the slowest queries the estimate drops; None for too few queries."""
    over = max_over(queries, percentile)
    return over - 1 if over else None


def estimate(latencies: list[float], percentile: float) -> float | None:
    """Return the percentile's early-stopping estimate; None for too few queries."""
    dropped = discarded(len(latencies), percentile)
    return None if dropped is None else sorted(latencies)[-1 - dropped]
