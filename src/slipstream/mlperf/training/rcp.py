"""Reference convergence points: training may be faster by the second, not by the sample.

A reference gives epochs to the target of at least 2 N runs at several batch sizes. A one-sided
two-sample t-test at 5 % says which olympic mean of N runs is too good to be the same training.
The test pools equal deviations, so that the smallest mean has a closed form:

    mean - t(0.95; a + b - 2) * deviation * sqrt(1 / a + 1 / b),   a = 2 N - 2,  b = N - 2

Source: mlcommons/training_policies, "Reference convergence points". The checker that the official
package ships takes the deviation of all runs, the rules' text that of the runs that count:
`as_checker` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.mlperf.training.score import olympic

_ALPHA = 0.05


class Outcome(StrEnum):
    """What became of a check."""

    FOUND = "RCP found"
    INTERPOLATED = "RCP interpolated"
    SMALLER = "smaller than any RCP, held against the smallest"
    MISSING = "larger than any RCP: the reference has to be run at this batch size"
    FAILED = "two runs or more did not converge"


@dataclass(frozen=True)
class Point:
    """What a reference takes at a batch size.

    Attributes:
        mean, deviation: of epochs (or samples) to the target, fastest and slowest left out.
        runs: that count.
    """

    batch: int
    mean: float
    deviation: float
    runs: int

    @classmethod
    def of(cls, batch: int, epochs: Iterable[float], *, as_checker: bool = False) -> Point:
        """From the runs of the reference.

        Raises:
            InvalidArgumentError: fewer than 3.
        """
        every = sorted(map(float, epochs))
        counted = every[1:-1]
        deviation = float(np.std(every if as_checker else counted))
        return cls(batch, olympic(every), deviation, len(counted))

    def smallest(self, runs: int) -> float:
        """The smallest acceptable mean of `runs` runs, of which all but two count.

        Raises:
            InvalidArgumentError: fewer than 3 runs.
        """
        from scipy.stats import t

        if runs < 3:
            raise InvalidArgumentError("runs", f"{runs} runs have no olympic mean")
        counted = runs - 2
        critical = float(t.ppf(1 - _ALPHA, self.runs + counted - 2))
        reach = critical * self.deviation * math.sqrt(1 / self.runs + 1 / counted)
        return self.mean - reach


@dataclass(frozen=True)
class Check:
    """Whether convergence was as slow as it has to be.

    Attributes:
        mean, smallest: olympic mean of the runs, and the smallest acceptable one.
        scale: what the score is multiplied with, where the mean is faster than the reference's but
            acceptable.
    """

    passed: bool
    outcome: Outcome
    mean: float = math.nan
    smallest: float = math.nan
    scale: float = 1.0

    @property
    def sentence(self) -> str:
        """In words."""
        if math.isnan(self.mean):
            return f"convergence: {self.outcome}"
        word = "acceptable" if self.passed else "too fast to be the same training"
        return (
            f"convergence: {self.outcome}; {self.mean:.4g} to the target, at least "
            f"{self.smallest:.4g}: {word}"
        )


@dataclass(frozen=True)
class Reference:
    """The points of a reference, by ascending batch size, without those that were pruned."""

    points: tuple[Point, ...]

    @classmethod
    def of(
        cls, runs: Mapping[int, Sequence[float]], *, as_checker: bool = False, pruned: bool = True
    ) -> Reference:
        """From epochs to the target by batch size.

        Pruned are batch sizes below the one with the fastest mean, and points that are slower than
        the line between their neighbours.
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
        """What runs at a batch size are held against."""
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
        """Hold the runs of a submission against the reference.

        Args:
            epochs: of each run; infinite where it failed.
        """
        mean = olympic(epochs)
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
        """The batch size at which a run takes twice the samples of a small one; NaN if unknown.

        Samples grow as ``least * (1 + batch / critical)``, fitted by least squares.
        Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
        """
        if len(self.points) < 2:
            return math.nan
        slope, least = np.polyfit(
            [point.batch for point in self.points], [point.mean for point in self.points], 1
        )
        return float(least / slope) if slope > 0 else math.inf


def _between(one: Point, other: Point, batch: int) -> Point:
    """The point on the line between two; it has the runs of the one with fewer."""
    share = (batch - one.batch) / (other.batch - one.batch)

    def mixed(a: float, b: float) -> float:
        return a + share * (b - a)

    return Point(
        batch, mixed(one.mean, other.mean), mixed(one.deviation, other.deviation),
        min(one.runs, other.runs),
    )  # fmt: skip


def official_json(task: str, runs: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The points as the official package reads them."""
    return {
        f"{task}_{batch}": {
            "Benchmark": task, "BS": batch, "Hyperparams": {}, "Epochs to converge": list(epochs),
        }
        for batch, epochs in runs.items()
    }  # fmt: skip
