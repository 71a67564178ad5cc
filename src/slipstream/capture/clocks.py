"""What of a step its loader, its weight update and Python's garbage collector take: clocks.

The collector runs when enough objects have been made, wherever the step then is, and not in every
step: the least time of an operator or of a gap knows nothing of it. So it is watched in plain
steps, taken out of their times, and becomes a task of its own at the step's end; profiled steps run
without it. Collections of all generations are taken out as well but not told: they come once in
hundreds of steps, and go through whatever else the process has.
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

# Of a step; and in at least every so manieth one: else chance would decide whether it is seen.
_MATTERS = 0.01
_EVERY = 4
_ALL_GENERATIONS = 2
_Time = TypeVar("_Time")


class _Clock(Generic[_Time]):
    """Adds up a time that passes within it, from nothing on."""

    def __init__(self, nothing: _Time) -> None:
        self._nothing = self._time = nothing

    def take(self) -> _Time:
        """What passed since it was taken last."""
        passed, self._time = self._time, self._nothing
        return passed


@dataclass(frozen=True)
class LoadingTime:
    """What getting a batch took: CPU time, and waiting for anything but a core; ns."""

    cpu_ns: int
    waiting_ns: int


class LoadingClock(_Clock[LoadingTime]):
    """Within it: how long this thread is in ``__next__`` of a ``DataLoader``'s iterator.

    Time in the queue for a core that another program has is in neither part of it, where the system
    tells it apart.

    Attributes:
        inside: whether it is there now.
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
    """What both kinds of loader's iterators inherit ``__next__`` from."""
    import torch.utils.data.dataloader

    return torch.utils.data.dataloader._BaseDataLoaderIter


@dataclass(frozen=True)
class UpdateTime:
    """Of one step's update by the wall clock and in CPU time, ns; zero where there was none."""

    wall_ns: int
    cpu_ns: int


class UpdateClock(_Clock[UpdateTime]):
    """Within it: how long ``step`` of `optimizer` takes without its closure; ``take`` reads it.

    Args:
        closures: the watch that is entered, if any.
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
        """Wall and CPU clock, both of which stop within closures."""
        return (
            time.perf_counter_ns() - self._closures.wall_ns,
            time.thread_time_ns() - self._closures.cpu_ns,
        )


@dataclass(frozen=True)
class CollectionTime:
    """What collections took in one step, ns.

    Attributes:
        wall_ns, cpu_ns: of all.
        young_ns: CPU time of those of young generations.
        young: how many these were.
    """

    wall_ns: int = 0
    cpu_ns: int = 0
    young_ns: int = 0
    young: int = 0


class CollectionClock(_Clock[CollectionTime]):
    """Within it: how long this thread collects garbage; ``take`` reads it.

    What is collected while `loader` gets a batch is part of its time already.
    """

    def __init__(self, loader: LoadingClock) -> None:
        super().__init__(CollectionTime())
        self._loader = loader
        self._thread = 0
        self._began: tuple[int, int] | None = None

    def __enter__(self) -> CollectionClock:
        self._thread = threading.get_ident()
        gc.callbacks.append(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._seen)

    def _seen(self, phase: str, what: Mapping[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.perf_counter_ns(), time.thread_time_ns()
            return
        if self._began is None:  # it began before we did
            return
        cpu, wall = time.thread_time_ns() - self._began[1], time.perf_counter_ns() - self._began[0]
        self._began = None
        if self._loader.inside:
            return
        young = what.get("generation", 0) < _ALL_GENERATIONS
        so_far = self._time
        self._time = CollectionTime(
            so_far.wall_ns + wall,
            so_far.cpu_ns + cpu,
            so_far.young_ns + young * cpu,
            so_far.young + young,
        )


def collection_ns(times: tuple[CollectionTime, ...], step_ns: float) -> float:
    """A step's mean time in collections of young generations; 0 where that does not matter."""
    mean = sum(one.young_ns for one in times) / max(len(times), 1)
    seen = sum(one.young for one in times)
    return mean if mean >= _MATTERS * step_ns and seen * _EVERY >= len(times) else 0.0


def collection_spread(times: tuple[CollectionTime, ...]) -> float:
    """How unsure that mean is, relative: so many collections were seen, and no more."""
    return float(max(sum(one.young for one in times), 1) ** -0.5)
