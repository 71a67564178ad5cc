"""Standard tests of the independence of dropped elements, as p-values.

Each is asymptotic: use at least ten thousand elements.

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
"""Distances of neighbours, and of elements at the same position of later blocks and batches."""
_PATTERN = 8
_MIN_EXPECTED = 5.0


def keep_rate_deviation(mask: Mask, p: float) -> float:
    """Return the deviation of the number of retained elements, in standard deviations."""
    expected = mask.size * (1 - p)
    return float((mask.sum() - expected) / np.sqrt(expected * p))


def runs_test(mask: Mask, p: float) -> float:
    """Wald-Wolfowitz test of the number of runs of equal elements, given their counts."""
    n = float(mask.size)
    retained = float(mask.sum())
    runs = 1 + np.count_nonzero(mask[1:] != mask[:-1])
    mean = 1 + 2 * retained * (n - retained) / n
    deviation = np.sqrt((mean - 1) * (mean - 2) / (n - 1))
    return float(2 * norm.sf(abs(runs - mean) / deviation))


def serial_correlation_test(mask: Mask, p: float) -> float:
    """Ljung-Box test of the autocorrelations at many distances together."""
    n = mask.size
    centred = mask.astype(np.float64) - mask.mean()
    variance = float(centred @ centred)
    terms = [float(centred[lag:] @ centred[:-lag] / variance) ** 2 / (n - lag) for lag in _LAGS]
    return float(chi2.sf(n * (n + 2) * sum(terms), len(_LAGS)))


def pattern_test(mask: Mask, p: float) -> float:
    """Knuth's serial test: the frequency of each of the 256 patterns of eight elements."""
    whole = mask[: mask.size // _PATTERN * _PATTERN].reshape(-1, _PATTERN)
    seen = np.bincount(np.packbits(whole, axis=1)[:, 0], minlength=2**_PATTERN)
    retained = np.array([number.bit_count() for number in range(2**_PATTERN)])
    expected = len(whole) * (1 - p) ** retained * p ** (_PATTERN - retained)
    return _chi_square(seen, expected)


def gap_test(mask: Mask, p: float) -> float:
    """Knuth's gap test: the number of retained elements between two dropped ones."""
    gaps = np.diff(np.flatnonzero(~mask)) - 1
    seen = np.bincount(gaps)
    expected = len(gaps) * p * (1 - p) ** np.arange(len(seen))
    rest = len(gaps) - expected.sum()
    return _chi_square(np.append(seen, 0), np.append(expected, rest))


def correlation_test(first: Mask, second: Mask) -> float:
    """Test the correlation of two masks of the same elements."""
    centred = [part.astype(np.float64) - part.mean() for part in (first, second)]
    correlation = (
        centred[0] @ centred[1] / np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
    )
    return float(2 * norm.sf(abs(correlation) * np.sqrt(first.size)))


TESTS: dict[str, Callable[[Mask, float], float]] = {
    "runs": runs_test,
    "serial correlation": serial_correlation_test,
    "patterns of eight": pattern_test,
    "gaps": gap_test,
}


def _chi_square(seen: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Return Pearson's p-value, with rare cases merged."""
    common = expected >= _MIN_EXPECTED
    pairs = list(zip(seen[common].tolist(), expected[common].tolist(), strict=True))
    pairs.append((int(seen[~common].sum()), float(expected[~common].sum())))
    pairs = [(count, mean) for count, mean in pairs if mean > 0]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    return float(chi2.sf(statistic, len(pairs) - 1))
