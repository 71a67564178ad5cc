"""Time a step spends in Python's garbage collector.

It runs when enough objects have been made, wherever the step then is, and not in every step: the
least time of an operator or of a gap knows nothing of it. So it is watched in plain steps, taken
out of their times, and becomes a task of its own at the step's end; profiled steps run without it.
Collections of all generations are taken out as well but not told: they come once in hundreds of
steps, and go through whatever else the process has.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.capture.loading import LoadingClock

# Of a step; and in at least every so manieth one: else chance would decide whether it is seen.
_MATTERS = 0.01
_EVERY = 4
_ALL_GENERATIONS = 2


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


class CollectionClock:
    """Within it: how long this thread collects garbage; ``take`` reads it.

    What is collected while `loader` gets a batch is part of its time already.
    """

    def __init__(self, loader: LoadingClock) -> None:
        self._loader = loader
        self._thread = 0
        self._began: tuple[int, int] | None = None
        self._time = CollectionTime()

    def __enter__(self) -> CollectionClock:
        self._thread = threading.get_ident()
        gc.callbacks.append(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._seen)

    def take(self) -> CollectionTime:
        """What passed in collections since it was taken last."""
        found, self._time = self._time, CollectionTime()
        return found

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
