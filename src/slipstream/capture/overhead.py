"""Subtract the profiler's cost from the tasks, event by event.

Each recorded event costs its parent some time. The cost c per event is fitted such that the
corrected times add up to the step time without profiler and contention in the same run; a single
factor for the whole step would misplace it, since small operators suffer most. The remainder (the
sum of per-task minima is less than the minimum of whole steps) becomes a common factor.

The profiler costs less per event in an update of many small operators than in a backward pass,
where autograd adds records. A common cost would be wrong by a tenth of the update's time in a step
that only dispatches, so the update is calibrated separately.

Most time in a ``DataLoader``'s ``__next__`` is outside of PyTorch operators (decoding, NumPy,
collating in Python) and would be a gap. Torch annotates it; the annotation becomes a separate task
with the time outside of its operators, which follow it without gaps. A task this long never runs
undisturbed on a busy machine, so the minimum of its recorded times is not useful: the loading time
is measured in steps without a profiler (`clocks.LoadingClock`) and distributed in proportion to
the recorded times.
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

# Upper bound of the cost per event, on a slow machine; a larger excess is contention, which affects
# all tasks.
_MAX_EVENT_COST_NS = 1500.0
# Ratio of times above which a step was delayed by other load.
_CONTENDED = 1.15

_Times = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class StepTimes:
    """Times of plain (unprofiled) steps, in nanoseconds.

    Attributes:
        wall_ns, cpu_ns: Wall time, and CPU time of the thread.
        loading: Time to get batches; empty if not measured.
        updating: Time of the weight update; empty if not measured.
        collecting: Time of garbage collection; empty if not measured.
        queued_ns: Total time in which the thread was ready to run but had no core.
    """

    wall_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    loading: tuple[LoadingTime, ...] = ()
    updating: tuple[UpdateTime, ...] = ()
    collecting: tuple[CollectionTime, ...] = ()
    queued_ns: int = 0

    def contended(self, threads: int) -> bool:
        """Whether other programs kept the step's threads waiting.

        On one thread, wall time then exceeds CPU time. Several threads wait for each other by
        spinning, so that only run-queue delay or varying step times show contention.
        """
        wall, cpu = float(np.median(self.wall_ns)), float(np.median(self.cpu_ns))
        if threads == 1:
            return wall > _CONTENDED * max(cpu, 1.0)
        queued = self.queued_ns / max(sum(self.wall_ns), 1)
        return wall > _CONTENDED * float(np.min(self.wall_ns)) or queued > _CONTENDED - 1

    def quiet_ns(self, threads: int) -> tuple[float, float]:
        """Return the step's minimum time outside of loaders, and within them.

        Garbage collections, which do not occur in every step, are excluded. On one thread the time
        is CPU time; in a loader it includes waiting for a disk or a process.
        """
        loading = self.loading or (LoadingTime(0, 0),) * len(self.cpu_ns)
        within = float(min(step.cpu_ns + step.waiting_ns for step in loading))
        if threads != 1:
            collecting = self.collecting or (CollectionTime(),) * len(self.cpu_ns)
            walls = np.subtract(self.wall_ns, [step.wall_ns for step in collecting])
            return max(float(walls.min()) - within, 0.0), within
        return float(self.outside_cpu_ns.min()), within

    @property
    def outside_cpu_ns(self) -> NDArray[np.float64]:
        """CPU time of each step outside of loaders and garbage collections."""
        outside = np.array(self.cpu_ns, float)
        for within in (self.loading, self.collecting):
            outside -= [step.cpu_ns for step in within] or 0.0
        return outside

    def quiet_update_ns(self, threads: int) -> float:
        """Return the minimum time of an update; 0 unless every step has one."""
        if threads == 1:
            return float(min((step.cpu_ns for step in self.updating), default=0))
        return float(min((step.wall_ns for step in self.updating), default=0))


@dataclass(frozen=True)
class Calibration:
    """Corrected times of one step.

    Attributes:
        duration_ns: float64 [u].
        gap_ns: float64 [u + 1], before the first unit and after each.
        per_event_ns: Fitted cost of one recorded event.
        scale: Common factor applied after that; near 1.
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
    """Subtract the profiler's cost from minima over steps, so that they add up to `quiet_ns`.

    Args:
        durations: [steps, u], as recorded; NaN in steps without the unit, but not in all.
        gaps: [steps, u + 1], likewise.
        inner: [u], events recorded inside each unit.
        between: [u + 1], events recorded in each gap.
        quiet_ns: The step's time without a profiler and without contention.
    """
    duration, gap = np.nanmin(durations, axis=0), np.nanmin(gaps, axis=0)
    events = float(inner.sum() + between.sum())
    excess = float(duration.sum() + gap.sum()) - quiet_ns
    per_event = float(np.clip(excess / max(events, 1.0), 0.0, _MAX_EVENT_COST_NS))
    duration = np.maximum(duration - per_event * inner, 0.0)
    gap = np.maximum(gap - per_event * between, 0.0)
    corrected = float(duration.sum() + gap.sum())
    scale = quiet_ns / corrected if corrected else 1.0
    return Calibration(duration * scale, gap * scale, per_event, scale)


def calibrate_apart(
    durations: NDArray[np.float64],
    gaps: NDArray[np.float64],
    inner: NDArray[np.int64],
    between: NDArray[np.int64],
    quiet_ns: float,
    update: tuple[NDArray[np.bool_], NDArray[np.bool_], float] | None,
) -> Calibration:
    """Calibrate like `calibrate`, but the weight update separately.

    Args:
        update: Units and gaps of the update, bool [u] and [u + 1], and their time without a
            profiler in ns; None if unknown.
    """
    if update is None:
        return calibrate(durations, gaps, inner, between, quiet_ns)
    units, spaces, update_ns = update
    duration, gap = np.zeros(durations.shape[1]), np.zeros(gaps.shape[1])
    events = cost = corrected = 0.0
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
        corrected += total_ns / calibration.scale if calibration.scale else 0.0
    return Calibration(
        duration, gap, cost / max(events, 1.0), quiet_ns / corrected if corrected else 1.0
    )


@dataclass(frozen=True)
class UpdateSpan:
    """Position of the update among u units.

    Attributes:
        units: bool [u], units within it.
        gaps: bool [u + 1], gaps between two of these units.
        around_ns: Its time before its first unit and after its last.
    """

    units: NDArray[np.bool_]
    gaps: NDArray[np.bool_]
    around_ns: float


def find_update(units: Units, aligned: Aligned) -> UpdateSpan | None:
    """Find the update of the recorded step; None unless there is exactly one and steps agree."""
    begins = [i for i, name in enumerate(units.events) if name.startswith(UPDATE)]
    if len(begins) != 1 or aligned.unaligned:
        return None
    start, end = aligned.start_ns, aligned.end_ns
    (update,) = begins
    # Use the last step: the same events are inside in all steps.
    first, last = start[-1, update], end[-1, update]
    inside = (start[-1, units.first] >= first) & (end[-1, units.first] <= last)
    inside &= (units.first > update) & ~units.in_closure[units.first]
    indices = np.flatnonzero(inside)
    if len(indices) < 2 or len(indices) != indices[-1] - indices[0] + 1:
        return None
    gaps = np.zeros(len(inside) + 1, np.bool_)
    # Gap i precedes unit i.
    gaps[indices[1:]] = True
    begin = start[:, update]
    closures = [i for i, name in enumerate(units.events) if name == CLOSURE_RANGE and i > update]
    if closures:
        begin = np.maximum(begin, end[:, closures[-1]])
    before = start[:, units.first[indices[0]]] - begin
    after = end[:, update] - end[:, units.first[indices[-1]]]
    return UpdateSpan(inside, gaps, float(before.min() + after.min()))


def lay_out(units: Units, start: NDArray[np.float64], end: NDArray[np.float64]) -> _Times:
    """Return starts and ends of the units, float64 [steps, u]; NaN if unknown.

    Units inside a loading unit are moved after it.
    """
    start, end = start.copy(), end.copy()
    for loading, inside in _loadings(units):
        lengths = end[:, inside] - start[:, inside]
        own_end = end[:, loading] - lengths.sum(axis=1)
        # Unknown if the recorded annotation does not enclose its operators.
        own_end[own_end < start[:, loading]] = np.nan
        end[:, loading] = own_end
        end[:, inside] = own_end[:, None] + np.cumsum(lengths, axis=1)
        start[:, inside] = end[:, inside] - lengths
    return start, end


def count_events(units: Units) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the events recorded inside each unit, int64 [u], and in each gap, int64 [u + 1].

    The record of a unit itself is written outside of it: its cost belongs to the gap before, or to
    the enclosing loading unit.
    """
    inner, first, last = units.last - units.first, units.first.copy(), units.last.copy()
    for loading, inside in _loadings(units):
        inner[loading] -= inner[inside].sum()
        first[inside] = last[inside] = last[loading]
    between = np.append(first, len(units.events) - 1) - np.concatenate([[-1], last])
    return inner, between


def share_out(durations: NDArray[np.float64], total_ns: float) -> NDArray[np.float64]:
    """Distribute `total_ns` in proportion to the minimum recorded durations, float64 [u].

    Args:
        durations: float64 [steps, u], of all units that load data; NaN if a unit did not run.
    """
    minima = np.nanmin(durations, axis=0)
    shares: NDArray[np.float64] = minima * (total_ns / max(float(minima.sum()), 1.0))
    return shares


def _loadings(units: Units) -> list[tuple[int, NDArray[np.int64]]]:
    """Return each loading unit, and the units inside it."""
    loadings = np.flatnonzero(units.loading == np.arange(len(units.loading)))
    return [
        (loading, np.flatnonzero(units.loading == loading)[1:].astype(np.int64))
        for loading in loadings.tolist()
    ]
