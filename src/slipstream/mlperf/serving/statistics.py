"""How many queries a percentile needs: MLPerf's early stopping, and the fixed counts before it.

A run supports "a share p of queries is within the bound" where seeing so few over it would be
unlikely otherwise. With t queries over and h within, that is I_p(h, t + 1) <= 1 - c, with I the
regularised incomplete beta function (a binomial tail); MLPerf takes c = 0.99.

Source: MLPerf Inference rules, appendix on early stopping; the paper (arXiv 1911.02549, section
III-D) has the fixed counts.
"""

from __future__ import annotations

import math
from functools import lru_cache

CONFIDENCE = 0.99
_MARGIN_SHARE = 20
_ROUNDED_TO = 1 << 13


@lru_cache(maxsize=1 << 16)
def least_within(over: int, percentile: float, confidence: float = CONFIDENCE) -> int:
    """Queries within the bound that `over` queries beyond it take, at least.

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
    """Whether `queries`, of which `over` took longer than the bound, hold the percentile."""
    return queries - over >= least_within(over, percentile)


def fewest_queries(percentile: float, over: int = 1) -> int:
    """Queries from which on an estimate can be made that `over` of them exceed."""
    return least_within(over, percentile) + over


def most_over(queries: int, percentile: float) -> int:
    """The largest t that `queries` allow; 0 where they are too few for any."""
    if queries < fewest_queries(percentile):
        return 0
    low, high = 1, queries + 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = fewest_queries(percentile, middle) <= queries
        low, high = (middle, high) if enough else (low, middle)
    return low


def discarded(queries: int, percentile: float) -> int | None:
    """Slowest queries that are set aside before the estimate is read; None for too few queries."""
    over = most_over(queries, percentile)
    return over - 1 if over else None


def estimate(latencies: list[float], percentile: float) -> float | None:
    """The percentile's early-stopping estimate; None for too few queries."""
    dropped = discarded(len(latencies), percentile)
    return None if dropped is None else sorted(latencies)[-1 - dropped]


def fixed_count(percentile: float) -> int:
    """Queries that the paper's rule asks for, before early stopping."""
    from scipy.special import ndtri

    margin = (1 - percentile) / _MARGIN_SHARE
    needed: float = ndtri(0.5 + CONFIDENCE / 2) ** 2 * percentile * (1 - percentile) / margin**2
    return math.ceil(needed / _ROUNDED_TO) * _ROUNDED_TO
