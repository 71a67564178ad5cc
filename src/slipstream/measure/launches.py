"""Launches: the same sides in fresh processes, several times within one experiment.

Paired blocks cancel what the machine does. They cannot cancel what a process has drawn at its
start and keeps: where its heap lies, above all. So arms that live in processes of their own are
closed and opened anew after a share of the blocks, in another order, and a claim's interval holds
how far these launches lie apart (`statistics.launches_interval`).

How many launches there are is settled before the first block, by what opening costs, and by
nothing that was measured. All follow the same rule, so that their ratios are draws of one kind, and
no error has to be saved for looks.
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

MOST_LAUNCHES = 6
"""By default. The sixth narrows an interval at no spread by 6 %, a seventh would by 4 %."""
FEWEST_LAUNCHES = 3
"""Two say nothing of a spread: Student's t of one degree of freedom reaches 12.7 of them."""

LAUNCH = "launch"
"""The kind of the event at a launch's first block: which it is, of how many."""

# Of the time that is left, what opening anew may take.
_OPENING_SHARE = 0.5
# A launch has so many blocks at least: fewer have no 95 % interval of their own.
_FEWEST_BLOCKS = 6


@dataclass(frozen=True)
class LaunchCost:
    """What decides about the number of launches, in seconds.

    Attributes:
        left_s: of the budget.
        opening_s: to close all arms and open them anew.
        warming_s: their warm-up, as long as the first time.
        longest_warming_s: of which a launch takes its share at most.
        block_s: one block.
    """

    left_s: float
    opening_s: float
    warming_s: float
    longest_warming_s: float
    block_s: float

    def launch_s(self, launches: int) -> float:
        """To begin one more launch, where there are so many."""
        return self.opening_s + min(self.warming_s, self.longest_warming_s / launches)

    def needed_s(self, launches: int) -> float:
        """What would have to be left for so many."""
        anew = (launches - 1) * self.launch_s(launches)
        return max(anew / _OPENING_SHARE, anew + launches * _FEWEST_BLOCKS * self.block_s)


def launches_that_fit(most: int, cost: LaunchCost, blocks: int | None = None) -> int:
    """How many launches to make; 1 where not even `FEWEST_LAUNCHES` fit.

    Args:
        most: that are wanted.
        blocks: that are measured at most.
    """
    possible = range(FEWEST_LAUNCHES, most + 1)
    if blocks is not None:
        possible = range(FEWEST_LAUNCHES, min(most, blocks // _FEWEST_BLOCKS) + 1)
    return max((n for n in possible if cost.needed_s(n) <= cost.left_s), default=1)


def why_one_process(cost: LaunchCost) -> str:
    """What a person is told where several launches were wanted and one was made."""
    opening, left, needed = (
        format_duration(1e9 * seconds)
        for seconds in (cost.launch_s(1), cost.left_s, math.ceil(cost.needed_s(FEWEST_LAUNCHES)))
    )
    return (
        f"every side ran in one process (opening all takes {opening}, {left} were left): what "
        f"another process would cost is in no interval; from {needed} on there are "
        f"{FEWEST_LAUNCHES} a side"
    )


IN_THIS_PROCESS = "all arms ran in this process: what another would cost is in no interval"

# What a record says.


def launch_starts(events: Sequence[Event]) -> tuple[int, ...]:
    """The first block of every launch, ascending; () for a record without launches."""
    return tuple(sorted({event.block for event in events if event.kind == LAUNCH}))


def launch_of(blocks: NDArray[np.int32], starts: Sequence[int]) -> NDArray[np.int64]:
    """int64 [n]: which launch each of `blocks` [n] was measured in; 0 where there were none."""
    launch: NDArray[np.int64] = np.searchsorted(np.asarray(starts[1:], np.int64), blocks, "right")
    return launch


def by_launch(values: Floats, launches: NDArray[np.int64]) -> list[Floats]:
    """`values` [n], one array a launch that has some."""
    return [values[launches == one] for one in np.unique(launches)]


def last_launch(experiment: Experiment) -> Experiment:
    """What was measured since the newest launch began, as an experiment of its own."""
    starts = launch_starts(experiment.events)
    return _one_launch(experiment, starts[-1], math.inf) if len(starts) > 1 else experiment


def first_launch(experiment: Experiment) -> Experiment:
    """What was measured before the second launch, as an experiment of its own."""
    starts = launch_starts(experiment.events)
    return _one_launch(experiment, 0, starts[1]) if len(starts) > 1 else experiment


def _one_launch(experiment: Experiment, begin: float, end: float) -> Experiment:
    series = {}
    for key, one in experiment.series.items():
        inside = (one.blocks >= begin) & (one.blocks < end)
        if key[2] is not Phase.MEASURE:
            series[key] = one
        elif inside.any():
            series[key] = Series(one.values[inside], one.blocks[inside])
    events = tuple(event for event in experiment.events if event.kind != LAUNCH)
    return replace(experiment, series=series, events=events)


@dataclass(frozen=True)
class LaunchSpread:
    """How far the launches of one side lie apart.

    Attributes:
        medians: one a launch, in the metric's unit.
        within: width of the interval inside one launch, as a share of its median; the median
            launch's. Infinite where launches have too few blocks to say.
    """

    arm: str
    metric: Metric
    medians: tuple[float, ...]
    within: float

    @property
    def range(self) -> float:
        """The largest median beyond the smallest, as a share of it."""
        return max(self.medians) / min(self.medians) - 1

    @property
    def differs(self) -> bool:
        """Whether launches lie further apart than the interval within one is wide."""
        return self.range > self.within


def launch_spreads(experiment: Experiment, metric: Metric) -> tuple[LaunchSpread, ...]:
    """Of every side that was measured in several launches, in the order of the arms."""
    starts = launch_starts(experiment.events)
    spreads = []
    for arm in experiment.arms:
        series = experiment.series.get((arm.name, metric, Phase.MEASURE))
        if series is None or not bool(np.all(series.values > 0)):
            continue
        launches = by_launch(np.log(series.values), launch_of(series.blocks, starts))
        if len(launches) < 2:
            continue
        inside = [median_interval(one, experiment.settings.level) for one in launches]
        width = float(np.median([one.high - one.low for one in inside]))
        medians = tuple(math.exp(one.estimate) for one in inside)
        within = math.expm1(width) if width < 1 else math.inf
        spreads.append(LaunchSpread(arm.name, metric, medians, within))
    return tuple(spreads)


def spread_sentence(experiment: Experiment, metric: Metric) -> str:
    """The side whose launches differ most, if by more than its interval in one; else empty."""
    differing = [one for one in launch_spreads(experiment, metric) if one.differs]
    if not differing:
        return ""
    most = max(differing, key=lambda one: one.range)
    low, high = (format_duration(value) for value in (min(most.medians), max(most.medians)))
    others = f" ({len(differing) - 1} more like it)" if len(differing) > 1 else ""
    return (
        f"{most.arm} took {low} to {high} from launch to launch{others}, while one launch alone is "
        f"sure to {format_percent(most.within / 2)}: the intervals hold both."
    )
