"""Fit a quantity against the batch size: a straight line, or two that meet at a knee.

A step has costs that do not depend on its samples and costs that are proportional to them:
``y(b) = bias + slope b`` (Yu et al., "Skyline: Interactive in-editor computational performance
profiling for deep neural network training", UIST 2020). Where the working set outgrows a cache, or
another phase of the step becomes the memory peak, the slope changes: a knee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.measure.statistics import Interval

_LEVEL = 0.9
_Z90 = 1.645
# A knee adds two parameters: with fewer points than this, two lines would fit anything.
_MIN_FOR_KNEE = 4
_KNEE_GRID = 49
# Factor by which two lines must reduce the sum of squares.
_MIN_IMPROVEMENT = 4.0
_NOISE_FACTOR = 2.0
# Relative error of extrapolation, per factor of two outside the measured sizes.
_EXTRAPOLATION_ERROR = 0.03
_MIN_SPREAD = 1e-4


@dataclass(frozen=True)
class Point:
    """A measured value at one batch size; `spread` is its relative repeatability error."""

    samples: int
    value: float
    spread: float


@dataclass(frozen=True)
class Curve:
    """The result of `fit`.

    Attributes:
        bias: part that does not depend on the batch.
        slope: increase per sample, up to the knee.
        knee: number of samples at which the slope changes; None if it does not.
        bend: change of the slope at the knee.
        worst: maximum relative deviation of a measured value.
        error: relative error of a value within the measured sizes: the residual of the fit, or the
            points' own spread if that is larger.
        lowest, highest: range of measured sizes.
    """

    bias: float
    slope: float
    knee: float | None
    bend: float
    worst: float
    error: float
    lowest: int
    highest: int
    _covariance: NDArray[np.float64]

    def at(self, samples: float) -> Interval:
        """Return the value at `samples` with a 90 % interval, wider outside the measured sizes.

        Raises:
            InvalidArgumentError: less than one sample.
        """
        if not samples >= 1 or not math.isfinite(samples):
            raise InvalidArgumentError("samples", f"{samples} is less than 1")
        value = self._value(samples)
        row = _basis(np.array([float(samples)]), self.knee)[0]
        fitted = math.sqrt(max(float(row @ self._covariance @ row), 0.0))
        beyond = abs(value) * _EXTRAPOLATION_ERROR * self.beyond(samples)
        half = _Z90 * math.hypot(fitted, beyond)
        return Interval(value, max(value - half, 0.0), value + half, _LEVEL, "batch curve")

    def beyond(self, samples: float) -> float:
        """Return how many factors of two `samples` is outside the measured sizes; 0 within."""
        outside = max(samples / self.highest, self.lowest / samples, 1.0)
        return math.log2(outside)

    @property
    def last_slope(self) -> float:
        """Increase per sample beyond the knee."""
        return self.slope + self.bend

    @property
    def last_bias(self) -> float:
        """Intercept of the line beyond the knee."""
        return self.bias - self.bend * (self.knee or 0.0)

    def largest_within(self, value: float) -> float:
        """Return the largest number of samples whose value is at most `value`; 0, or infinity.

        Assumes values that grow with the samples, which `fit` does not guarantee.
        """
        if self.last_slope <= 0:
            return math.inf if self.last_bias <= value else 0.0
        samples = (value - self.last_bias) / self.last_slope
        if self.knee is not None and samples < self.knee:
            samples = (value - self.bias) / self.slope if self.slope > 0 else self.knee
            return max(min(samples, self.knee), 0.0)
        return max(samples, 0.0)

    def _value(self, samples: float) -> float:
        past = max(samples - self.knee, 0.0) if self.knee is not None else 0.0
        return self.bias + self.slope * samples + self.bend * past


def fit(points: Sequence[Point], tolerance: float) -> Curve:
    """Fit a line, or two lines, to `points` by relative least squares.

    The bias is never negative. Two lines are used if one line misses a point by more than
    `tolerance` and two reduce the sum of squares to a quarter or less.

    Args:
        points: of at least two sizes.
        tolerance: relative deviation.

    Raises:
        InvalidArgumentError: fewer than two sizes.
    """
    ordered = sorted(points, key=lambda point: point.samples)
    sizes = np.array([point.samples for point in ordered], np.float64)
    if len(set(sizes)) < 2:
        raise InvalidArgumentError("points", "a fit needs at least two different sizes")
    values = np.array([point.value for point in ordered], np.float64)
    spread = np.array([max(point.spread, _MIN_SPREAD) for point in ordered])
    line = _solve(sizes, values, spread, None)
    best = line
    # Repeatability errors are not a knee.
    noticed = max(tolerance, _NOISE_FACTOR * float(np.median(spread)))
    if len(sizes) >= _MIN_FOR_KNEE and line.worst > noticed:
        # At least two points on each side determine each line.
        for knee in np.geomspace(sizes[1], sizes[-2], _KNEE_GRID):
            bent = _solve(sizes, values, spread, float(knee))
            clearer = bent.squares * _MIN_IMPROVEMENT <= line.squares
            if clearer and bent.squares < best.squares and bent.grows:
                best = bent
    return best.curve(sizes, spread)


@dataclass(frozen=True)
class _Solution:
    knee: float | None
    coefficients: NDArray[np.float64]
    inverse: NDArray[np.float64]
    misses: NDArray[np.float64]

    @property
    def squares(self) -> float:
        return float(np.square(self.misses).sum())

    @property
    def grows(self) -> bool:
        """Whether the value grows on both sides of the knee; other fits are rejected."""
        return bool(self.coefficients[1] > 0 and self.coefficients[1:].sum() > 0)

    @property
    def worst(self) -> float:
        return float(np.abs(self.misses).max())

    def curve(self, sizes: NDArray[np.float64], spread: NDArray[np.float64]) -> Curve:
        """Convert to a `Curve`; the error is the residual per degree of freedom."""
        free = len(sizes) - len(self.coefficients) - (self.knee is not None)
        residual = math.sqrt(self.squares / free) if free > 0 else 0.0
        error = max(residual, float(np.median(spread)))
        bend = float(self.coefficients[2]) if self.knee is not None else 0.0
        bias, slope = map(float, self.coefficients[:2])
        return Curve(
            bias, slope, self.knee, bend, self.worst, error, int(sizes[0]), int(sizes[-1]),
            self.inverse * error**2,
        )  # fmt: skip


def _basis(sizes: NDArray[np.float64], knee: float | None) -> NDArray[np.float64]:
    columns = [np.ones_like(sizes), sizes]
    if knee is not None:
        columns.append(np.maximum(sizes - knee, 0.0))
    return np.stack(columns, axis=1)


def _solve(
    sizes: NDArray[np.float64],
    values: NDArray[np.float64],
    spread: NDArray[np.float64],
    knee: float | None,
) -> _Solution:
    # Relative errors weigh equally at all sizes; noisy points weigh less.
    trust = np.median(spread) / np.maximum(spread, np.median(spread))
    rows = _basis(sizes, knee) / values[:, None]
    weighted = rows * trust[:, None]
    coefficients, *_ = np.linalg.lstsq(weighted, trust, rcond=None)
    inverse = np.linalg.pinv(weighted.T @ weighted)
    if coefficients[0] < 0:
        slopes, *_ = np.linalg.lstsq(weighted[:, 1:], trust, rcond=None)
        coefficients = np.concatenate([[0.0], slopes])
        inverse = np.zeros_like(inverse)
        inverse[1:, 1:] = np.linalg.pinv(weighted[:, 1:].T @ weighted[:, 1:])
    return _Solution(
        knee,
        np.asarray(coefficients, np.float64),
        np.asarray(inverse, np.float64),
        rows @ coefficients - 1.0,
    )
