"""What a step pays for memory that the allocator gives back to the system between its uses.

Plain steps run as the workload has them; then the process is told to keep its pages, and all that
follows is recorded so. What the same steps took longer before is the time of page faults: one
task of its own, because operators repeated alone (see `slipstream.durations`) do not pay it, and
because it differs between launches of one program far more than operators do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from slipstream import heap
from slipstream.capture.overhead import StepTimes

# Below this share of a step there is nothing to tell apart.
_MATTERS = 0.01
# A page fault's cost: the least and the most it can be, on machines old and new.
_LEAST_NS, _MOST_NS = 300.0, 6000.0
_TYPICAL_NS = 2000.0
# Steady within a launch is not yet the same in the next.
_LEAST_SPREAD, _MOST_SPREAD = 0.25, 0.7
_LOOK, _STEPS, _SETTLE = 4, 12, 2
# Of a launch that is watched for them alone.
_WARM_UP, _BRIEFLY = 3, 6


@dataclass(frozen=True)
class Faulting:
    """Plain steps before pages were kept: of each its times in ns, and its page faults."""

    wall_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    faults: tuple[int, ...]

    def extra_ns(self, kept: StepTimes, threads: int) -> float:
        """How much longer a step takes than with its pages kept.

        Medians are compared, since faults come and go between steps; what a page fault can cost
        bounds the difference, which a busy machine may have made.
        """
        now, then = (self.cpu_ns, kept.cpu_ns) if threads == 1 else (self.wall_ns, kept.wall_ns)
        faults = float(np.mean(self.faults))
        extra = float(np.median(now)) - float(np.median(then))
        return float(np.clip(extra, _LEAST_NS * faults, _MOST_NS * faults))

    @property
    def spread(self) -> float:
        """By how much page faults may differ in another launch, relative.

        Where they differ between steps, the heap is near the point at which it shrinks or not.
        """
        faults = np.array(self.faults, float)
        varies = float(faults.std() / max(faults.mean(), 1.0))
        return float(np.clip(varies, _LEAST_SPREAD, _MOST_SPREAD))


def keep_pages(most: int, report: Callable[[str], None]) -> Generator[None, None, Faulting | None]:
    """Watch plain steps, then keep the pages; None, and nothing changed, where few are faulted.

    Args:
        most: steps to watch at most.
    """
    if not heap.can_keep_pages():
        return None
    walls: list[int] = []
    cpus: list[int] = []
    faults: list[int] = []
    report("watching page faults")
    while len(walls) < min(_STEPS, most):
        wall, cpu, before = time.perf_counter_ns(), time.thread_time_ns(), heap.page_faults()
        yield
        faults.append(heap.page_faults() - before)
        cpus.append(time.thread_time_ns() - cpu)
        walls.append(time.perf_counter_ns() - wall)
        few = sum(faults) * _TYPICAL_NS < _MATTERS * sum(cpus)
        if few and len(walls) >= min(_LOOK, most):
            return None
    if not heap.keep_pages():
        return None
    # The heap grows once more, to what a whole step needs.
    for _ in range(_SETTLE):
        yield
    return Faulting(tuple(walls), tuple(cpus), tuple(faults))


def watch_faults(threads: int) -> Generator[None, None, float]:
    """The time of a step that goes to page faults in this launch of the program, in ns.

    To be run in a process of its own, which keeps its pages from then on.
    """
    for _ in range(_WARM_UP):
        yield
    faulting = yield from keep_pages(_BRIEFLY, lambda line: None)
    if faulting is None:
        return 0.0
    walls: list[int] = []
    cpus: list[int] = []
    while len(walls) < len(faulting.wall_ns):
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        yield
        cpus.append(time.thread_time_ns() - cpu)
        walls.append(time.perf_counter_ns() - wall)
    return faulting.extra_ns(StepTimes(tuple(walls), tuple(cpus)), threads)
