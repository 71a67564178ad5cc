"""Launches: repeated starts of the same sides in fresh processes within one experiment.

Paired blocks cancel effects of the machine. They cannot cancel effects that are fixed at the start
of a process, above all its heap layout. Arms in separate processes are therefore closed and
reopened, in another order, after a share of the blocks, and a claim's interval includes the
variation between launches (`statistics.launches_interval`).

The number of launches is determined before the first block, from the cost of opening and not from
samples. All launches follow the same rule, so that their ratios are identically distributed and no
error has to be reserved for looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.measure.records import Event, Experiment, Metric, Phase, Series
from slipstream.measure.statistics import Floats, median_interval
from slipstream.units import format_duration, format_percent

MAX_LAUNCHES = 6
"""Default. Without variation, the sixth narrows an interval by 6 %, a seventh would by 4 %."""
MIN_LAUNCHES = 3
"""Two cannot estimate a spread: Student's t with one degree of freedom is 12.7 at 95 %."""

LAUNCH = "launch"
"""Kind of the event at a launch's first block, which has its number and the total."""

# Share of the remaining time that reopening may take.
_OPENING_SHARE = 0.5
# Minimum number of blocks of a launch: fewer have no 95 % interval.
_MIN_BLOCKS = 6


@dataclass(frozen=True)
class LaunchCost:
    """Times that determine the number of launches, in seconds.

    Attributes:
        left_s: Remaining budget.
        opening_s: Time to close and reopen all arms.
        warming_s: Warm-up time, as for the first launch.
        longest_warming_s: Maximum total warm-up time, shared by the launches.
        block_s: Time of one block.
    """

    left_s: float
    opening_s: float
    warming_s: float
    longest_warming_s: float
    block_s: float

    def launch_s(self, launches: int) -> float:
        """Return the time to begin another launch, if there are `launches`."""
        return self.opening_s + min(self.warming_s, self.longest_warming_s / launches)

    def needed_s(self, launches: int) -> float:
        """Return the remaining budget that this many launches require."""
        opening = (launches - 1) * self.launch_s(launches)
        return max(opening / _OPENING_SHARE, opening + launches * _MIN_BLOCKS * self.block_s)


def launches_that_fit(most: int, cost: LaunchCost, blocks: int | None = None) -> int:
    """Return the number of launches to make; 1 if fewer than `MIN_LAUNCHES` fit.

    Args:
        most: Maximum number of launches.
        blocks: Maximum number of blocks.
    """
    possible = range(MIN_LAUNCHES, most + 1)
    if blocks is not None:
        possible = range(MIN_LAUNCHES, min(most, blocks // _MIN_BLOCKS) + 1)
    return max((n for n in possible if cost.needed_s(n) <= cost.left_s), default=1)


def why_one_process(cost: LaunchCost) -> str:
    """Explain why only one launch was made although several were requested."""
    opening, remaining, needed = (
        format_duration(1e9 * seconds)
        for seconds in (cost.launch_s(1), cost.left_s, math.ceil(cost.needed_s(MIN_LAUNCHES)))
    )
    return (
        f"every side ran in one process (opening all takes {opening}, {remaining} remained), so "
        f"intervals exclude variation between processes; {needed} or more allow "
        f"{MIN_LAUNCHES} launches per side"
    )


IN_THIS_PROCESS = "all arms ran in this process, so intervals exclude variation between processes"

# Launches of a recorded experiment.


def launch_starts(events: Sequence[Event]) -> tuple[int, ...]:
    """Return the first block of every launch, ascending; () if there are no launches."""
    return tuple(sorted({event.block for event in events if event.kind == LAUNCH}))


def launch_of(blocks: NDArray[np.int32], starts: Sequence[int]) -> NDArray[np.int64]:
    """Return the launch of each of `blocks` [n], int64 [n]; 0 if there are no launches."""
    launch: NDArray[np.int64] = np.searchsorted(np.asarray(starts[1:], np.int64), blocks, "right")
    return launch


def by_launch(values: Floats, launches: NDArray[np.int64]) -> list[Floats]:
    """Split `values` [n] into one array per launch."""
    return [values[launches == launch] for launch in np.unique(launches)]


def last_launch(experiment: Experiment) -> Experiment:
    """Return the blocks of the last launch as a separate experiment."""
    starts = launch_starts(experiment.events)
    return _one_launch(experiment, starts[-1], math.inf) if len(starts) > 1 else experiment


def first_launch(experiment: Experiment) -> Experiment:
    """Return the blocks before the second launch as a separate experiment."""
    starts = launch_starts(experiment.events)
    return _one_launch(experiment, 0, starts[1]) if len(starts) > 1 else experiment


def _one_launch(experiment: Experiment, begin: float, end: float) -> Experiment:
    series = {}
    for key, column in experiment.series.items():
        inside = (column.blocks >= begin) & (column.blocks < end)
        if key[2] is not Phase.MEASURE:
            series[key] = column
        elif inside.any():
            series[key] = Series(column.values[inside], column.blocks[inside])
    events = tuple(event for event in experiment.events if event.kind != LAUNCH)
    return replace(experiment, series=series, events=events)


@dataclass(frozen=True)
class LaunchSpread:
    """Variation between the launches of one side.

    Attributes:
        medians: Median of each launch, in the metric's unit.
        within: Width of the interval within a launch, as a share of its median; the median over
            launches. Infinite if launches have too few blocks.
    """

    arm: str
    metric: Metric
    medians: tuple[float, ...]
    within: float

    @property
    def range(self) -> float:
        """Largest minus smallest median, as a share of the smallest."""
        return max(self.medians) / min(self.medians) - 1

    @property
    def differs(self) -> bool:
        """Whether the variation between launches exceeds the interval within a launch."""
        return self.range > self.within


def launch_spreads(experiment: Experiment, metric: Metric) -> tuple[LaunchSpread, ...]:
    """Return the spread of every side with several launches, in the order of the arms."""
    starts = launch_starts(experiment.events)
    spreads = []
    for arm in experiment.arms:
        series = experiment.series.get((arm.name, metric, Phase.MEASURE))
        if series is None or not bool(np.all(series.values > 0)):
            continue
        launches = by_launch(np.log(series.values), launch_of(series.blocks, starts))
        if len(launches) < 2:
            continue
        inside = [median_interval(launch, experiment.settings.level) for launch in launches]
        width = float(np.median([interval.high - interval.low for interval in inside]))
        medians = tuple(math.exp(interval.estimate) for interval in inside)
        within = math.expm1(width) if width < 1 else math.inf
        spreads.append(LaunchSpread(arm.name, metric, medians, within))
    return tuple(spreads)


def spread_sentence(experiment: Experiment, metric: Metric) -> str:
    """Describe the side whose launches differ most; empty if no side's launches differ."""
    differing = [spread for spread in launch_spreads(experiment, metric) if spread.differs]
    if not differing:
        return ""
    most = max(differing, key=lambda spread: spread.range)
    low, high = (format_duration(value) for value in (min(most.medians), max(most.medians)))
    count = len(differing) - 1
    varying = "sides also vary" if count > 1 else "side also varies"
    others = f" ({count} other {varying})" if count else ""
    return (
        f"{most.arm} took {low} to {high} across launches{others}, while its interval within a "
        f"launch is ±{format_percent(most.within / 2)}; the intervals include both."
    )
