"""Properties of trials that schedulers use: work, scaling, utilisation and memory.

A trial of width w >= 1 is data-parallel over w devices; a packed trial shares one device. All
members of a shared device run at the rate min(1, 1 / sum of their utilisations).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TrialSet:
    """Trials, one per row.

    Attributes:
        work_s: seconds on one device alone, float64 [m].
        rates: speed-up at width 1, 2, ..., float64 [m, max_width]; the first column is 1.
        utilisation: utilisation of one device alone, float64 [m] in (0, 1].
        memory: share of a device's memory, float64 [m].
        names: names for errors and plots.
    """

    work_s: Floats
    rates: Floats
    utilisation: Floats
    memory: Floats
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, valid, column in (
            ("work", self.work_s >= 0, self.work_s),
            ("rate", (self.rates > 0).all(axis=1), self.rates.min(axis=1, initial=np.inf)),
            ("utilisation", (self.utilisation > 0) & (self.utilisation <= 1), self.utilisation),
            ("memory", (self.memory >= 0) & (self.memory <= 1), self.memory),
        ):
            invalid = np.flatnonzero(~(valid & np.isfinite(column)))
            if len(invalid):
                at = int(invalid[0])
                label = self.names[at] if at < len(self.names) else str(at)
                unit = " of one device" if name == "memory" else ""
                raise InvalidArgumentError("trials", f"trial {label} has {name} {column[at]}{unit}")
        if self.rates.shape[1] < 1:
            raise InvalidArgumentError("trials", "the maximum width is 0, not at least 1")

    @classmethod
    def of(
        cls, work_s: Floats, gamma: Floats, utilisation: Floats, memory: Floats | None = None,
        *, max_width: int = 8, names: Sequence[str] = (),
    ) -> TrialSet:  # fmt: skip
        """Build trials with the speed-up w / (1 + gamma (w - 1)) at width w."""
        if max_width < 1:
            raise InvalidArgumentError("max_width", f"{max_width} is less than 1")
        widths = np.arange(1, max_width + 1, dtype=np.float64)
        rates = widths / (1.0 + np.asarray(gamma, dtype=np.float64)[:, None] * (widths - 1.0))
        work = np.asarray(work_s, dtype=np.float64)
        shares = np.zeros(len(work)) if memory is None else np.asarray(memory, dtype=np.float64)
        return cls(work, rates, np.asarray(utilisation, dtype=np.float64), shares, names)

    def __len__(self) -> int:
        return len(self.work_s)

    def rows(self, at: NDArray[np.int64]) -> TrialSet:
        """Return the trials at these rows."""
        return TrialSet(
            self.work_s[at], self.rates[at], self.utilisation[at], self.memory[at],
            [self.names[i] for i in at] if len(self.names) else (),
        )  # fmt: skip


def bound_s(trials: TrialSet, devices: int) -> float:
    """Return T*, a lower bound on the makespan of all schedules, also preemptive or fractional.

    A schedule of length T gives trial i a mean rate of work / T. By Jensen's inequality this needs
    at least the mean width at which the concave hull of its (width, rate) points has that rate. The
    smallest T for which these widths sum to at most `devices` is found by bisection.

    Raises:
        InvalidArgumentError: no devices.
    """
    if devices < 1:
        raise InvalidArgumentError("devices", f"{devices} is less than 1")
    if not len(trials) or not trials.work_s.any():
        return 0.0
    slopes, offsets, fastest = _hull_segments(trials)

    def width(total_s: float) -> float:
        rate = trials.work_s / total_s
        return float((slopes * rate[:, None] + offsets).max(axis=1).sum())

    low = float((trials.work_s / fastest).max())
    if width(low) <= devices:
        return low
    high = max(low, float(trials.work_s.sum()))
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if width(middle) <= devices else (middle, high)
    return low


def _hull_segments(trials: TrialSet) -> tuple[Floats, Floats, Floats]:
    """Return slopes and offsets [m, d + 1] of each hull's width as a maximum of lines in the rate,
    and the largest rates [m]."""
    m, d = trials.rates.shape
    slopes, offsets = np.zeros((m, d + 1)), np.full((m, d + 1), -np.inf)
    fastest = trials.rates.max(axis=1)
    for i in range(m):
        points = [(0.0, 0.0), (float(trials.utilisation[i]), 1.0)]
        points += [(k + 1.0, float(trials.rates[i, k])) for k in range(1, d)]
        hull: list[tuple[float, float]] = []
        for x, y in points:
            if hull and y <= hull[-1][1]:
                continue
            while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-1][0]) <= (
                y - hull[-1][1]
            ) * (hull[-1][0] - hull[-2][0]):
                hull.pop()
            hull.append((x, y))
        for at, ((x, y), (x2, y2)) in enumerate(itertools.pairwise(hull)):
            slopes[i, at] = (x2 - x) / (y2 - y)
            offsets[i, at] = x - slopes[i, at] * y
    return slopes, offsets, fastest
