"""Are the elements dropped independently of each other? Standard tests of a mask, as p-values.

Each is asymptotic: give it at least some ten thousand elements.

Source: Wald and Wolfowitz, "On a test whether two samples are from the same population", 1940;
Ljung and Box, "On a measure of lack of fit in time series models", 1978; Knuth, "The Art of
Computer Programming", volume 2, section 3.3.2 (serial test, gap test).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, norm

Mask = NDArray[np.bool_]

_LAGS = (*range(1, 33), 63, 64, 65, 128, 256, 1024)
"""Neighbours, and elements in the same place of the next blocks and batches."""
_PATTERN = 8
_LEAST_EXPECTED = 5.0


def keep_rate_deviation(mask: Mask, p: float) -> float:
    """How many standard deviations the number of kept elements is from its expectation."""
    expected = mask.size * (1 - p)
    return float((mask.sum() - expected) / np.sqrt(expected * p))


def runs_test(mask: Mask, p: float) -> float:
    """Wald and Wolfowitz: the number of runs of equal elements, given how many there are."""
    n = float(mask.size)
    kept = float(mask.sum())
    runs = 1 + np.count_nonzero(mask[1:] != mask[:-1])
    mean = 1 + 2 * kept * (n - kept) / n
    deviation = np.sqrt((mean - 1) * (mean - 2) / (n - 1))
    return float(2 * norm.sf(abs(runs - mean) / deviation))


def serial_correlation_test(mask: Mask, p: float) -> float:
    """Ljung and Box: the autocorrelations at many distances, together."""
    n = mask.size
    centred = mask.astype(np.float64) - mask.mean()
    variance = float(centred @ centred)
    terms = [float(centred[lag:] @ centred[:-lag] / variance) ** 2 / (n - lag) for lag in _LAGS]
    return float(chi2.sf(n * (n + 2) * sum(terms), len(_LAGS)))


def pattern_test(mask: Mask, p: float) -> float:
    """Knuth's serial test: how often each of the 256 patterns of eight elements occurs."""
    whole = mask[: mask.size // _PATTERN * _PATTERN].reshape(-1, _PATTERN)
    seen = np.bincount(np.packbits(whole, axis=1)[:, 0], minlength=2**_PATTERN)
    kept = np.array([number.bit_count() for number in range(2**_PATTERN)])
    expected = len(whole) * (1 - p) ** kept * p ** (_PATTERN - kept)
    return _chi_square(seen, expected)


def gap_test(mask: Mask, p: float) -> float:
    """Knuth's gap test: how many elements are kept between two that are dropped."""
    gaps = np.diff(np.flatnonzero(~mask)) - 1
    seen = np.bincount(gaps)
    expected = len(gaps) * p * (1 - p) ** np.arange(len(seen))
    rest = len(gaps) - expected.sum()
    return _chi_square(np.append(seen, 0), np.append(expected, rest))


def correlation_test(one: Mask, other: Mask) -> float:
    """The correlation of two masks of the same elements."""
    rest = [part.astype(np.float64) - part.mean() for part in (one, other)]
    correlation = rest[0] @ rest[1] / np.sqrt((rest[0] @ rest[0]) * (rest[1] @ rest[1]))
    return float(2 * norm.sf(abs(correlation) * np.sqrt(one.size)))


TESTS: dict[str, Callable[[Mask, float], float]] = {
    "runs": runs_test,
    "serial correlation": serial_correlation_test,
    "patterns of eight": pattern_test,
    "gaps": gap_test,
}


def _chi_square(seen: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Pearson's, with what is too rare taken together."""
    common = expected >= _LEAST_EXPECTED
    pairs = list(zip(seen[common].tolist(), expected[common].tolist(), strict=True))
    pairs.append((int(seen[~common].sum()), float(expected[~common].sum())))
    pairs = [(count, mean) for count, mean in pairs if mean > 0]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    return float(chi2.sf(statistic, len(pairs) - 1))
