"""Clocks for a step's data loader, weight update and garbage collection.

The collector runs at any point of a step once enough objects were allocated, and not in every step,
so minimum times of operators and gaps do not include it. It is therefore timed in plain steps,
subtracted from their times, and becomes a separate task at the end of the step; profiled steps run
without it. Collections of all generations are subtracted but not part of the task: they occur once
in hundreds of steps and scan all objects of the process.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slipstream.capture.closures import ClosureWatch
from slipstream.measure.arms import RunDelay, delay_between

# Minimum share of a step, and of steps with a collection (1 in 4), for a task of its time.
_MIN_SHARE = 0.01
_MAX_STEPS_PER_COLLECTION = 4
_ALL_GENERATIONS = 2
_Time = TypeVar("_Time")


class _Clock(Generic[_Time]):
    """Clock that accumulates a time while it is entered."""

    def __init__(self, nothing: _Time) -> None:
        self._nothing = self._time = nothing

    def take(self) -> _Time:
        """Return the time since the last `take`."""
        elapsed, self._time = self._time, self._nothing
        return elapsed


@dataclass(frozen=True)
class LoadingTime:
    """Time to get a batch: CPU time, and waiting for anything but a core; ns."""

    cpu_ns: int
    waiting_ns: int


class LoadingClock(_Clock[LoadingTime]):
    """Clock of this thread's time in ``__next__`` of a ``DataLoader``'s iterator.

    Excludes run-queue delay if the system reports it.

    Attributes:
        inside: Whether the thread is in ``__next__`` now.
    """

    def __init__(self) -> None:
        super().__init__(LoadingTime(0, 0))
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
                self._time = LoadingTime(
                    self._time.cpu_ns + cpu_ns, self._time.waiting_ns + max(waited, 0)
                )

        iterator.__next__ = timed
        return self

    def __exit__(self, *error: object) -> None:
        _iterator().__next__ = self._original
        self._delay.close()


def _iterator() -> Any:
    """Return the class from which both iterators of a loader inherit ``__next__``."""
    import torch.utils.data.dataloader

    return torch.utils.data.dataloader._BaseDataLoaderIter


@dataclass(frozen=True)
class UpdateTime:
    """Wall and CPU time of one step's update, ns; zero if there was none."""

    wall_ns: int
    cpu_ns: int


class UpdateClock(_Clock[UpdateTime]):
    """Clock of ``step`` of `optimizer` without its closure.

    Args:
        closures: The active watch of closures, if any.
    """

    def __init__(self, optimizer: Any, closures: ClosureWatch | None = None) -> None:
        super().__init__(UpdateTime(0, 0))
        self._optimizer = optimizer
        self._closures = closures or ClosureWatch()
        self._began = (0, 0)
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

    def _begin(self, *arguments: object) -> None:
        self._began = self._now()

    def _end(self, *arguments: object) -> None:
        wall, cpu = self._now()
        self._time = UpdateTime(
            self._time.wall_ns + wall - self._began[0], self._time.cpu_ns + cpu - self._began[1]
        )

    def _now(self) -> tuple[int, int]:
        """Return wall and CPU clocks that stop within closures."""
        return (
            time.perf_counter_ns() - self._closures.wall_ns,
            time.thread_time_ns() - self._closures.cpu_ns,
        )


@dataclass(frozen=True)
class CollectionTime:
    """Time of the garbage collections of one step.

    Attributes:
        wall_ns, cpu_ns: Times of all collections.
        young_ns: CPU time of collections of young generations.
        young: Number of collections of young generations.
    """

    wall_ns: int = 0
    cpu_ns: int = 0
    young_ns: int = 0
    young: int = 0


class CollectionClock(_Clock[CollectionTime]):
    """Clock of this thread's garbage collections.

    Excludes collections while `loader` gets a batch, which count as loading.
    """

    def __init__(self, loader: LoadingClock) -> None:
        super().__init__(CollectionTime())
        self._loader = loader
        self._thread = 0
        self._began: tuple[int, int] | None = None

    def __enter__(self) -> CollectionClock:
        self._thread = threading.get_ident()
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, what: Mapping[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.perf_counter_ns(), time.thread_time_ns()
            return
        if self._began is None:  # the collection started before this clock
            return
        cpu, wall = time.thread_time_ns() - self._began[1], time.perf_counter_ns() - self._began[0]
        self._began = None
        if self._loader.inside:
            return
        young = what.get("generation", 0) < _ALL_GENERATIONS
        previous = self._time
        self._time = CollectionTime(
            previous.wall_ns + wall,
            previous.cpu_ns + cpu,
            previous.young_ns + young * cpu,
            previous.young + young,
        )


def collection_ns(times: tuple[CollectionTime, ...], step_ns: float) -> float:
    """Return a step's mean time in collections of young generations; 0 if negligible."""
    mean = sum(step.young_ns for step in times) / max(len(times), 1)
    count = sum(step.young for step in times)
    frequent = count * _MAX_STEPS_PER_COLLECTION >= len(times)
    return mean if mean >= _MIN_SHARE * step_ns and frequent else 0.0


def collection_spread(times: tuple[CollectionTime, ...]) -> float:
    """Return the relative uncertainty of that mean, from the number of collections."""
    return float(max(sum(step.young for step in times), 1) ** -0.5)
