"""Take the profiler's own cost off the tasks, event by event.

Each recorded event costs its parent some time. The cost c per event is fitted so that the sum of
what remains equals the quiet step measured without a profiler in the same run; a single factor
for the whole step would misplace it, since small operators suffer most. What c cannot explain
(the sum of per-task minima lies below the minimum of whole steps) is a common factor.

The profiler costs an update of many small operators less for each event than a backward pass, where
autograd writes records of its own. One cost for both would take too much off the one and too little
off the other, by a tenth of an update's time in a step that only dispatches; so the update is
calibrated by itself.

What passes in a ``DataLoader``'s ``__next__`` is mostly no operator of PyTorch (decoding, NumPy,
collating in Python): a gap like any other. Torch annotates it; the annotation becomes a task of its
own whose duration is what the operators inside leave of it. They follow it without gaps, in place
of lying inside. A task this long never runs undisturbed on a busy machine, so that the least of its
recorded times says little: how long loading takes is measured in steps without a profiler
(`clocks.LoadingClock`); what is recorded only shares that out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.clocks import CollectionTime, LoadingTime, UpdateTime
from slipstream.capture.modules import UPDATE
from slipstream.graph import CLOSURE_RANGE

if TYPE_CHECKING:
    from slipstream.capture.events import Aligned
    from slipstream.capture.units import Units

# Above what recording one event costs on a slow machine; a larger excess is contention, which
# spreads over all tasks.
_LARGEST_EVENT_COST_NS = 1500.0
# From this ratio of times on, a step was held up by something else than its own work.
_CONTENDED = 1.15

_Times = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class StepTimes:
    """Plain (unprofiled) steps, in nanoseconds of each.

    Attributes:
        wall_ns, cpu_ns: by the wall clock, and of the thread's CPU time.
        loading: what of it getting batches took; empty when no loader was watched.
        updating: what of it the weight update took; empty when no optimizer was watched.
        collecting: what of it collecting garbage took; empty where nobody watched.
        queued_ns: how long the thread was ready to run in all of them, and had no core.
    """

    wall_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    loading: tuple[LoadingTime, ...] = ()
    updating: tuple[UpdateTime, ...] = ()
    collecting: tuple[CollectionTime, ...] = ()
    queued_ns: int = 0

    def contended(self, threads: int) -> bool:
        """Whether other programs kept the step's threads waiting.

        On one thread that is wall time beyond CPU time. Several threads wait for each other by
        computing, so that only waiting in the queue, or steps of different lengths, tell.
        """
        wall, cpu = float(np.median(self.wall_ns)), float(np.median(self.cpu_ns))
        if threads == 1:
            return wall > _CONTENDED * max(cpu, 1.0)
        queued = self.queued_ns / max(sum(self.wall_ns), 1)
        return wall > _CONTENDED * float(np.min(self.wall_ns)) or queued > _CONTENDED - 1

    def quiet_ns(self, threads: int) -> tuple[float, float]:
        """The step without contention: its least time outside of loaders, and within them.

        Without collections of garbage, which do not come in every step.

        On one thread that is CPU time; in a loader also what it waits for a disk or a process.
        """
        loading = self.loading or (LoadingTime(0, 0),) * len(self.cpu_ns)
        collecting = self.collecting or (CollectionTime(),) * len(self.cpu_ns)
        within = float(min(one.cpu_ns + one.waiting_ns for one in loading))
        if threads != 1:
            walls = np.subtract(self.wall_ns, [one.wall_ns for one in collecting])
            return max(float(walls.min()) - within, 0.0), within
        outside = np.subtract(self.cpu_ns, [one.cpu_ns for one in loading])
        outside = outside - [one.cpu_ns for one in collecting]
        return float(outside.min()), within

    def quiet_update_ns(self, threads: int) -> float:
        """The least time of an update; 0 where none was seen in every step."""
        if threads == 1:
            return float(min((one.cpu_ns for one in self.updating), default=0))
        return float(min((one.wall_ns for one in self.updating), default=0))


@dataclass(frozen=True)
class Calibration:
    """Corrected times of one step.

    Attributes:
        duration_ns: float64 [u].
        gap_ns: float64 [u + 1], before the first unit and after each.
        per_event_ns: the fitted cost of one recorded event.
        scale: the common factor applied after that; near 1.
    """

    duration_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]
    per_event_ns: float
    scale: float


def calibrate(
    durations: NDArray[np.float64],
    gaps: NDArray[np.float64],
    inner: NDArray[np.int64],
    between: NDArray[np.int64],
    quiet_ns: float,
) -> Calibration:
    """Minima over steps, less the profiler's cost, summing to `quiet_ns`.

    Args:
        durations: [steps, u], as recorded; NaN in steps without the unit, but not in all.
        gaps: [steps, u + 1], likewise.
        inner: [u], events recorded inside each unit.
        between: [u + 1], events recorded in each gap.
        quiet_ns: the step's time without a profiler and without contention.
    """
    duration, gap = np.nanmin(durations, axis=0), np.nanmin(gaps, axis=0)
    events = float(inner.sum() + between.sum())
    excess = float(duration.sum() + gap.sum()) - quiet_ns
    per_event = float(np.clip(excess / max(events, 1.0), 0.0, _LARGEST_EVENT_COST_NS))
    duration = np.maximum(duration - per_event * inner, 0.0)
    gap = np.maximum(gap - per_event * between, 0.0)
    left = float(duration.sum() + gap.sum())
    scale = quiet_ns / left if left else 1.0
    return Calibration(duration * scale, gap * scale, per_event, scale)


def calibrate_apart(
    durations: NDArray[np.float64],
    gaps: NDArray[np.float64],
    inner: NDArray[np.int64],
    between: NDArray[np.int64],
    quiet_ns: float,
    update: tuple[NDArray[np.bool_], NDArray[np.bool_], float] | None,
) -> Calibration:
    """`calibrate`, the weight update by itself: the profiler costs it less for each event.

    Args:
        update: the units and gaps it consists of, bool [u] and [u + 1], and what they take without
            a profiler in ns; None where that is not known.
    """
    if update is None:
        return calibrate(durations, gaps, inner, between, quiet_ns)
    units, spaces, update_ns = update
    duration, gap = np.zeros(durations.shape[1]), np.zeros(gaps.shape[1])
    events = cost = left = 0.0
    for some, others, total_ns in (
        (units, spaces, update_ns), (~units, ~spaces, max(quiet_ns - update_ns, 0.0))
    ):  # fmt: skip
        calibration = calibrate(
            durations[:, some], gaps[:, others], inner[some], between[others], total_ns
        )
        duration[some], gap[others] = calibration.duration_ns, calibration.gap_ns
        count = float(inner[some].sum() + between[others].sum())
        events += count
        cost += count * calibration.per_event_ns
        left += total_ns / calibration.scale if calibration.scale else 0.0
    return Calibration(duration, gap, cost / max(events, 1.0), quiet_ns / left if left else 1.0)


@dataclass(frozen=True)
class UpdateSpan:
    """Where the update lies among u units.

    Attributes:
        units: bool [u], those within it.
        gaps: bool [u + 1], gaps between two of them.
        around_ns: what of it lies before its first unit and after its last.
    """

    units: NDArray[np.bool_]
    gaps: NDArray[np.bool_]
    around_ns: float


def find_update(units: Units, aligned: Aligned) -> UpdateSpan | None:
    """The one update of the recorded step; None where there is none, or more, or steps differ."""
    begins = [i for i, name in enumerate(units.events) if name.startswith(UPDATE)]
    if len(begins) != 1 or aligned.unaligned:
        return None
    start, end = aligned.start_ns, aligned.end_ns
    (update,) = begins
    # Of the last step alone: which events lie inside is the same in all.
    first, last = start[-1, update], end[-1, update]
    inside = (start[-1, units.first] >= first) & (end[-1, units.first] <= last)
    inside &= (units.first > update) & ~units.in_closure[units.first]
    indices = np.flatnonzero(inside)
    if len(indices) < 2 or len(indices) != indices[-1] - indices[0] + 1:
        return None
    gaps = np.zeros(len(inside) + 1, np.bool_)
    # Gap i lies before unit i.
    gaps[indices[1:]] = True
    begin = start[:, update]
    closures = [i for i, name in enumerate(units.events) if name == CLOSURE_RANGE and i > update]
    if closures:
        begin = np.maximum(begin, end[:, closures[-1]])
    before = start[:, units.first[indices[0]]] - begin
    after = end[:, update] - end[:, units.first[indices[-1]]]
    return UpdateSpan(inside, gaps, float(before.min() + after.min()))


def lay_out(units: Units, start: NDArray[np.float64], end: NDArray[np.float64]) -> _Times:
    """Begins and ends of the units, float64 [steps, u], those inside of a loading after it.

    NaN where unknown.
    """
    start, end = start.copy(), end.copy()
    for loading, inside in _loadings(units):
        lengths = end[:, inside] - start[:, inside]
        own_end = end[:, loading] - lengths.sum(axis=1)
        # Unknown where the recorded annotation does not enclose its operators.
        own_end[own_end < start[:, loading]] = np.nan
        end[:, loading] = own_end
        end[:, inside] = own_end[:, None] + np.cumsum(lengths, axis=1)
        start[:, inside] = end[:, inside] - lengths
    return start, end


def count_events(units: Units) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Events recorded inside each unit, int64 [u], and in each gap, int64 [u + 1].

    A unit's own record is written outside of it: that cost belongs to the gap before it, and of an
    operator inside of a loading to the loading.
    """
    inner, first, last = units.last - units.first, units.first.copy(), units.last.copy()
    for loading, inside in _loadings(units):
        inner[loading] -= inner[inside].sum()
        first[inside] = last[inside] = last[loading]
    between = np.append(first, len(units.events) - 1) - np.concatenate([[-1], last])
    return inner, between


def share_out(durations: NDArray[np.float64], total_ns: float) -> NDArray[np.float64]:
    """float64 [u] that add up to `total_ns`, in the proportion of the least recorded durations.

    Args:
        durations: float64 [steps, u], of all units that load data; NaN where one did not run.
    """
    least = np.nanmin(durations, axis=0)
    shares: NDArray[np.float64] = least * (total_ns / max(float(least.sum()), 1.0))
    return shares


def _loadings(units: Units) -> list[tuple[int, NDArray[np.int64]]]:
    """Each unit that is a loading, and the units inside of it."""
    loadings = np.flatnonzero(units.loading == np.arange(len(units.loading)))
    return [
        (loading, np.flatnonzero(units.loading == loading)[1:].astype(np.int64))
        for loading in loadings.tolist()
    ]
