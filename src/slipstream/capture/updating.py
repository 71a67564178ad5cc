"""How long the weight update takes in steps without a profiler.

The profiler costs an update of many small operators less for each event than a backward pass,
where autograd writes records of its own. One cost for both would take too much off the one and too
little off the other, by a tenth of an update's time in a step that only dispatches; so the update
is calibrated by itself (see `assemble`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.modules import UPDATE

if TYPE_CHECKING:
    from slipstream.capture.events import Aligned
    from slipstream.capture.units import Units


@dataclass(frozen=True)
class UpdateTime:
    """Of one step's update by the wall clock and in CPU time, ns; zero where there was none."""

    wall_ns: int
    cpu_ns: int


class UpdateClock:
    """Within it: how long ``step`` of `optimizer` takes, of whatever make; ``take`` reads it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._began = (0, 0)
        self._time = UpdateTime(0, 0)
        self._handles: list[Any] = []

    def __enter__(self) -> UpdateClock:
        if hasattr(self._optimizer, "register_step_pre_hook"):
            self._handles = [
                self._optimizer.register_step_pre_hook(self._begin),
                self._optimizer.register_step_post_hook(self._end),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def take(self) -> UpdateTime:
        """What passed in updates since it was taken last."""
        found, self._time = self._time, UpdateTime(0, 0)
        return found

    def _begin(self, *arguments: object) -> None:
        self._began = time.perf_counter_ns(), time.thread_time_ns()

    def _end(self, *arguments: object) -> None:
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        self._time = UpdateTime(
            self._time.wall_ns + wall - self._began[0], self._time.cpu_ns + cpu - self._began[1]
        )


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
    inside &= units.first > update
    found = np.flatnonzero(inside)
    if len(found) < 2 or len(found) != found[-1] - found[0] + 1:
        return None
    gaps = np.zeros(len(inside) + 1, np.bool_)
    # Gap i lies before unit i.
    gaps[found[1:]] = True
    before = start[:, units.first[found[0]]] - start[:, update]
    after = end[:, update] - end[:, units.first[found[-1]]]
    return UpdateSpan(inside, gaps, float(before.min() + after.min()))
