"""Take the profiler's own cost off the tasks, event by event.

Each recorded event costs its parent some time. The cost c per event is fitted so that the sum of
what remains equals the quiet step measured without a profiler in the same run; a single factor
for the whole step would misplace it, since small operators suffer most. What c cannot explain
(the sum of per-task minima lies below the minimum of whole steps) is a common factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Above what recording one event costs on a slow machine; a larger excess is contention, which
# spreads over all tasks.
_LARGEST_EVENT_COST_NS = 1500.0


@dataclass(frozen=True)
class StepTimes:
    """Plain (unprofiled) steps: wall and CPU nanoseconds of each."""

    wall_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]


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
    durations: NDArray[np.int64],
    gaps: NDArray[np.int64],
    inner: NDArray[np.int64],
    between: NDArray[np.int64],
    quiet_ns: float,
) -> Calibration:
    """Minima over steps, less the profiler's cost, summing to `quiet_ns`.

    Args:
        durations: [steps, u], as recorded.
        gaps: [steps, u + 1].
        inner: [u], events recorded inside each unit.
        between: [u + 1], events recorded in each gap.
        quiet_ns: the step's time without a profiler and without contention.
    """
    duration = durations.min(axis=0).astype(np.float64)
    gap = gaps.min(axis=0).astype(np.float64)
    events = float(inner.sum() + between.sum())
    excess = float(duration.sum() + gap.sum()) - quiet_ns
    per_event = float(np.clip(excess / max(events, 1.0), 0.0, _LARGEST_EVENT_COST_NS))
    duration = np.maximum(duration - per_event * inner, 0.0)
    gap = np.maximum(gap - per_event * between, 0.0)
    left = float(duration.sum() + gap.sum())
    scale = quiet_ns / left if left else 1.0
    return Calibration(duration * scale, gap * scale, per_event, scale)
