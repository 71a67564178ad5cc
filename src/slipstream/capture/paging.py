"""Measure the page faults of a step, from memory that the allocator returns to the system.

Plain steps first run with the workload's settings; then the process retains its pages during the
recording. The difference is the time of page faults. It becomes a separate task, because operators
repeated in isolation (see `slipstream.durations`) do not incur it, and because it varies between
launches of a program far more than operators do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from slipstream import heap
from slipstream.capture.overhead import StepTimes

# Minimum share of a step that counts.
_MIN_SHARE = 0.01
# Bounds of the cost of a page fault, on old and new machines.
_MIN_FAULT_NS, _MAX_FAULT_NS = 300.0, 6000.0
_TYPICAL_NS = 2000.0
# Bounds of the spread, since faults that are constant within a launch vary between launches.
_MIN_SPREAD, _MAX_SPREAD = 0.25, 0.7
_MIN_STEPS, _MAX_STEPS, _SETTLE = 4, 12, 2
# Steps of a launch that only measures page faults.
_WARM_UP, _LAUNCH_STEPS = 3, 6


@dataclass(frozen=True)
class Faulting:
    """Times in ns and page faults of plain steps before the process kept its pages."""

    wall_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    faults: tuple[int, ...]

    def extra_ns(self, retained: StepTimes, threads: int) -> float:
        """Return how much longer a step takes than with pages kept, in ns.

        Compares medians, since faults vary between steps, and clips the difference to the possible
        cost of its page faults, since other load may have caused it.
        """
        before, after = (
            (self.cpu_ns, retained.cpu_ns) if threads == 1 else (self.wall_ns, retained.wall_ns)
        )
        faults = float(np.mean(self.faults))
        extra = float(np.median(before)) - float(np.median(after))
        return float(np.clip(extra, _MIN_FAULT_NS * faults, _MAX_FAULT_NS * faults))

    @property
    def spread(self) -> float:
        """Relative variation of page faults between launches.

        If faults vary between steps, the heap is near its threshold for shrinking.
        """
        faults = np.array(self.faults, float)
        varies = float(faults.std() / max(faults.mean(), 1.0))
        return float(np.clip(varies, _MIN_SPREAD, _MAX_SPREAD))


def keep_pages(most: int, report: Callable[[str], None]) -> Generator[None, None, Faulting | None]:
    """Watch plain steps, then keep the pages; with few page faults, change nothing, return None.

    Args:
        most: Maximum number of steps to watch.
    """
    if not heap.can_keep_pages():
        return None
    walls: list[int] = []
    cpus: list[int] = []
    faults: list[int] = []
    report("watching page faults")
    while len(walls) < min(_MAX_STEPS, most):
        wall, cpu, before = time.perf_counter_ns(), time.thread_time_ns(), heap.page_faults()
        yield
        faults.append(heap.page_faults() - before)
        cpus.append(time.thread_time_ns() - cpu)
        walls.append(time.perf_counter_ns() - wall)
        few = sum(faults) * _TYPICAL_NS < _MIN_SHARE * sum(cpus)
        if few and len(walls) >= min(_MIN_STEPS, most):
            return None
    if not heap.keep_pages():
        return None
    # The heap grows again to the needs of a whole step.
    for _ in range(min(_SETTLE, most)):
        yield
    return Faulting(tuple(walls), tuple(cpus), tuple(faults))


def watch_faults(threads: int) -> Generator[None, None, float]:
    """Return the time of page faults in a step in this launch of the program, in ns.

    Run it in a separate process, which keeps its pages from then on.
    """
    for _ in range(_WARM_UP):
        yield
    faulting = yield from keep_pages(_LAUNCH_STEPS, lambda line: None)
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
