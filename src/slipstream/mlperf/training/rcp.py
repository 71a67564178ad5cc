"""Reference convergence points (RCPs): a submission may not need fewer epochs than the reference.

A reference gives epochs to the target of at least 2 N runs at several batch sizes. A one-sided
two-sample t-test at 5 % decides whether the olympic mean of N runs is too low to be the same
training. The test pools equal deviations, so the smallest acceptable mean has a closed form:

    mean - t(0.95; a + b - 2) * deviation * sqrt(1 / a + 1 / b),   a = 2 N - 2,  b = N - 2

Source: mlcommons/training_policies, "Reference convergence points". The official checker takes the
deviation of all runs (`as_checker`), the text of the rules that of the runs that count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.mlperf.training.score import olympic_mean

_ALPHA = 0.05


class Outcome(StrEnum):
    """Which reference point a check used, or why it used none."""

    FOUND = "RCP found"
    INTERPOLATED = "RCP interpolated"
    SMALLER = "smaller than any RCP, compared with the smallest"
    MISSING = "larger than any RCP: run the reference at this batch size"
    FAILED = "two runs or more did not converge"


@dataclass(frozen=True)
class Point:
    """Convergence of the reference at one batch size.

    Attributes:
        mean, deviation: epochs (or samples) to the target, without the fastest and slowest run.
        runs: number of runs that count.
    """

    batch: int
    mean: float
    deviation: float
    runs: int

    @classmethod
    def of(cls, batch: int, epochs: Iterable[float], *, as_checker: bool = False) -> Point:
        """Summarize the runs of the reference.

        Raises:
            InvalidArgumentError: fewer than 3 runs.
        """
        values = sorted(map(float, epochs))
        counted = values[1:-1]
        deviation = float(np.std(values if as_checker else counted))
        return cls(batch, olympic_mean(values), deviation, len(counted))

    def smallest(self, runs: int) -> float:
        """Return the smallest acceptable mean of `runs` runs, of which all but two count.

        Raises:
            InvalidArgumentError: fewer than 3 runs.
        """
        from scipy.stats import t

        if runs < 3:
            raise InvalidArgumentError("runs", f"an olympic mean needs at least 3 runs, got {runs}")
        counted = runs - 2
        critical = float(t.ppf(1 - _ALPHA, self.runs + counted - 2))
        return self.mean - critical * self.deviation * math.sqrt(1 / self.runs + 1 / counted)


@dataclass(frozen=True)
class Check:
    """The result of a convergence check.

    Attributes:
        mean: olympic mean of the runs.
        smallest: smallest acceptable mean.
        scale: multiplier of the score; above 1 if the mean is acceptable but below the reference's.
    """

    passed: bool
    outcome: Outcome
    mean: float = math.nan
    smallest: float = math.nan
    scale: float = 1.0

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if math.isnan(self.mean):
            return f"convergence: {self.outcome}"
        word = "acceptable" if self.passed else "too fast to be the same training"
        return (
            f"convergence: {self.outcome}; {self.mean:.4g} to the target, at least "
            f"{self.smallest:.4g}: {word}"
        )


@dataclass(frozen=True)
class Reference:
    """The points of a reference after pruning, by ascending batch size."""

    points: tuple[Point, ...]

    @classmethod
    def of(
        cls, runs: Mapping[int, Sequence[float]], *, as_checker: bool = False, pruned: bool = True
    ) -> Reference:
        """Build the points from epochs to the target by batch size.

        Pruning removes batch sizes below the one with the lowest mean, and points above the line
        between their neighbours.
        """
        points = [
            Point.of(batch, epochs, as_checker=as_checker) for batch, epochs in sorted(runs.items())
        ]
        if pruned and points:
            fastest = min(points, key=lambda point: point.mean)
            points = [point for point in points if point.batch >= fastest.batch]
            at = 1
            while at < len(points) - 1:
                before, here, after = points[at - 1 : at + 2]
                if here.mean > _between(before, after, here.batch).mean:
                    del points[at]
                else:
                    at += 1
        return cls(tuple(points))

    def at(self, batch: int) -> tuple[Point | None, Outcome]:
        """Return the point for a batch size, and how it was found."""
        for point in self.points:
            if point.batch == batch:
                return point, Outcome.FOUND
        below = [point for point in self.points if point.batch < batch]
        above = [point for point in self.points if point.batch > batch]
        if below and above:
            return _between(below[-1], above[0], batch), Outcome.INTERPOLATED
        if above:
            return above[0], Outcome.SMALLER
        return None, Outcome.MISSING

    def check(self, batch: int, epochs: Sequence[float]) -> Check:
        """Check the convergence of a submission's runs.

        Args:
            epochs: epochs to the target per run; infinite for a failed run.
        """
        mean = olympic_mean(epochs)
        if math.isinf(mean):
            return Check(False, Outcome.FAILED)
        point, outcome = self.at(batch)
        if point is None:
            return Check(False, outcome)
        smallest = point.smallest(len(epochs))
        scale = max(1.0, point.mean / mean)
        return Check(mean >= smallest, outcome, mean, smallest, scale)

    @property
    def critical_batch(self) -> float:
        """Batch size at which a run takes twice the samples of one with small batches.

        Samples grow as ``minimum * (1 + batch / critical)``, fitted by least squares; NaN for fewer
        than two points.
        Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
        """
        if len(self.points) < 2:
            return math.nan
        slope, minimum = np.polyfit(
            [point.batch for point in self.points], [point.mean for point in self.points], 1
        )
        return float(minimum / slope) if slope > 0 else math.inf


def _between(lower: Point, upper: Point, batch: int) -> Point:
    """Interpolate two points linearly; the result has the smaller number of runs."""
    share = (batch - lower.batch) / (upper.batch - lower.batch)
    return Point(
        batch, lower.mean + share * (upper.mean - lower.mean),
        lower.deviation + share * (upper.deviation - lower.deviation), min(lower.runs, upper.runs),
    )  # fmt: skip
