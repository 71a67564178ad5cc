"""Time a step waits for its data: what passes inside a ``DataLoader``'s ``__next__``.

Most of it is no operator of PyTorch (decoding, NumPy, collating in Python), so that it would be a
gap like any other. Torch annotates it; the annotation becomes a task of its own whose duration is
what the operators inside leave of it. They follow it without gaps, in place of lying inside.

A task this long never runs undisturbed on a busy machine, so that the least of its recorded times
says little. How long loading takes is measured by `LoadingClock` in steps without a profiler; what
is recorded only shares that out.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.overhead import LoadingTime
from slipstream.measure.arms import RunDelay, delay_between

if TYPE_CHECKING:
    from slipstream.capture.units import Units

_Times = tuple[NDArray[np.float64], NDArray[np.float64]]


def lay_out(units: Units, start: NDArray[np.float64], end: NDArray[np.float64]) -> _Times:
    """Begins and ends of the units, float64 [steps, u], those inside of a loading behind it."""
    start, end = start.copy(), end.copy()
    for loading, inside in _loadings(units):
        lengths = end[:, inside] - start[:, inside]
        own_end = end[:, loading] - lengths.sum(axis=1)
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


class LoadingClock:
    """Within it: how long this thread is in ``__next__`` of a ``DataLoader``'s iterator.

    Attributes:
        time: so far; time in the queue for a core that another program has is in neither part,
            where the system tells it apart.
        inside: whether it is there now.
    """

    def __init__(self) -> None:
        self.time = LoadingTime(0, 0)
        self._delay = RunDelay()
        self._original: Callable[[Any], Any] | None = None
        self.inside = False

    def __enter__(self) -> LoadingClock:
        iterator = _iterator()
        self._original = original = iterator.__next__
        self._delay.open()

        @functools.wraps(original)
        def timed(batches: Any) -> Any:
            if self.inside:
                return original(batches)
            self.inside = True
            queued = self._delay.read()
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return original(batches)
            finally:
                cpu_ns, wall_ns = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
                waited = wall_ns - cpu_ns - (delay_between(queued, self._delay.read()) or 0)
                self.inside = False
                self.time = LoadingTime(
                    self.time.cpu_ns + cpu_ns, self.time.waiting_ns + max(waited, 0)
                )

        iterator.__next__ = timed
        return self

    def __exit__(self, *error: object) -> None:
        _iterator().__next__ = self._original
        self._delay.close()


def _iterator() -> Any:
    """What both kinds of loader's iterators inherit ``__next__`` from."""
    import torch.utils.data.dataloader

    return torch.utils.data.dataloader._BaseDataLoaderIter


def _loadings(units: Units) -> list[tuple[int, NDArray[np.int64]]]:
    """Each unit that is a loading, and the units inside of it."""
    found = np.flatnonzero(units.loading == np.arange(len(units.loading)))
    return [
        (loading, np.flatnonzero(units.loading == loading)[1:].astype(np.int64))
        for loading in found.tolist()
    ]
