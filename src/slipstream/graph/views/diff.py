"""Comparison of two graphs, by operator, module and source line.

Contributions to the critical path add up to the step time, so their differences add up to the
difference of the steps, to the nanosecond. Work off the path is listed separately, because it may
become critical later.

Recordings of one program vary randomly, which determines the interval of the change. The interval
excludes page faults, which depend on a process's whole history.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from slipstream.graph.graph import Graph, replace_tasks
from slipstream.graph.page_faults import page_fault_tasks
from slipstream.graph.timeline import replay
from slipstream.graph.values import Dependency, Kind
from slipstream.graph.views.critical_path import Contribution, find_critical_path, namer

# Relative standard deviations of a recorded step. Between launches of an unchanged program: of
# ten recordings of two programs each, 18 of 20 pairs were within the resulting interval.
_FLOOR = 0.02
# Additional variation on a busy machine.
_PACE = 0.05
_Z90 = 1.645
# Logarithm of the widest half-interval, a factor of about a thousand.
_MAX_LOG = 7.0
MIN_HALF_WIDTH = _Z90 * math.sqrt(2) * _FLOOR
"""Minimum half-width of the interval of a change."""
# Below this share of common operators two graphs are of different steps.
_MIN_COMMON = 0.5


@dataclass(frozen=True)
class DiffRow:
    """One operator, module or source line, before and after.

    Attributes:
        before_ns, after_ns: time of its tasks on the critical path, without gaps before them.
        waited_before_ns, waited_after_ns: gaps and delays before its tasks on the path.
        work_before_ns, work_after_ns: time of all its tasks, on and off the path.
        tasks_before, tasks_after: number of calls.
    """

    name: str
    before_ns: float
    after_ns: float
    waited_before_ns: float
    waited_after_ns: float
    work_before_ns: float
    work_after_ns: float
    tasks_before: int
    tasks_after: int

    @property
    def change_ns(self) -> float:
        """Contribution to the change of the step time; negative if it saves time."""
        busy = self.after_ns - self.before_ns
        return busy + (self.waited_after_ns - self.waited_before_ns)

    @property
    def status(self) -> str:
        """ "added", "removed", or "" if it is in both graphs."""
        if not self.tasks_before:
            return "added"
        return "" if self.tasks_after else "removed"


@dataclass(frozen=True)
class Difference:
    """Comparison of two steps.

    Attributes:
        before_ns, after_ns: the simulated step times.
        rows: by "operator", "module" and "line"; the largest change first. The changes of each
            add up to `change_ns`.
        gaps_before_ns, gaps_after_ns: untracked time and delays on the path, by dependency.
        faults_before_ns, faults_after_ns: contribution of page faults, which have a separate row.
        error: relative standard deviation of the change without page faults.
        unlike: why the graphs are of different steps; empty if they are not.
    """

    before_ns: float
    after_ns: float
    rows: dict[str, tuple[DiffRow, ...]]
    gaps_before_ns: dict[Dependency, float]
    gaps_after_ns: dict[Dependency, float]
    faults_before_ns: float = 0.0
    faults_after_ns: float = 0.0
    error: float = 0.0
    unlike: str = ""

    @property
    def change_ns(self) -> float:
        """`after_ns` minus `before_ns`."""
        return self.after_ns - self.before_ns

    @property
    def change(self) -> float:
        """The change relative to `before_ns`; 0.05 is five percent slower."""
        return self.change_ns / self.before_ns if self.before_ns else 0.0

    @property
    def work_change(self) -> float:
        """The relative change of the step without page faults."""
        before = self.before_ns - self.faults_before_ns
        return (self.after_ns - self.faults_after_ns) / before - 1 if before > 0 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """90 % interval of `work_change`, from the variation of one program's recordings."""
        ratio, half = 1 + self.work_change, min(_Z90 * self.error, _MAX_LOG)
        return ratio * math.exp(-half) - 1, ratio * math.exp(half) - 1

    @property
    def half_width(self) -> float:
        """Half the width of `interval`."""
        low, high = self.interval
        return (high - low) / 2

    @property
    def verdict(self) -> str:
        """ "slower", "faster", or "within noise" if the interval includes no change."""
        low, high = self.interval
        if low > 0:
            return "slower"
        return "faster" if high < 0 else "within noise"

    def added(self) -> tuple[DiffRow, ...]:
        """Return operators that only the second graph has."""
        return tuple(row for row in self.rows["operator"] if row.status == "added")

    def removed(self) -> tuple[DiffRow, ...]:
        """Return operators that only the first graph has."""
        return tuple(row for row in self.rows["operator"] if row.status == "removed")


def difference(before: Graph, after: Graph) -> Difference:
    """Compare two graphs of the same step.

    Raises:
        GraphError: one of them has a cycle.
    """
    before, after = _with_fault_groups(before), _with_fault_groups(after)
    paths = [find_critical_path(replay(graph)) for graph in (before, after)]
    faults = [
        path.step_ns - _without_faults_ns(graph, path.step_ns)
        for graph, path in zip((before, after), paths, strict=True)
    ]
    rows = {}
    for group in ("operator", "module", "line"):
        on_path = [{c.name: c for c in path.by(group)} for path in paths]
        work = [_work(graph, group) for graph in (before, after)]
        names = sorted({*work[0], *work[1]})
        compared = [
            _row(name, [costs.get(name) for costs in on_path], [costs.get(name) for costs in work])
            for name in names
        ]
        rows[group] = tuple(sorted(compared, key=lambda row: (-abs(row.change_ns), row.name)))
    return Difference(
        paths[0].step_ns,
        paths[1].step_ns,
        rows,
        paths[0].by_dependency(),
        paths[1].by_dependency(),
        faults[0],
        faults[1],
        math.hypot(
            *(
                _error(graph, path.step_ns - fault)
                for graph, path, fault in zip((before, after), paths, faults, strict=True)
            )
        ),
        _unlike(before, after),
    )


def _with_fault_groups(graph: Graph) -> Graph:
    """Return the graph with page faults as a separate module and source line."""
    faults = page_fault_tasks(graph)
    if not faults:
        return graph
    module, source = graph.tasks.module.copy(), graph.tasks.source.copy()
    module[faults] = source[faults] = graph.tasks.name[faults]
    return replace_tasks(graph, module=module, source=source)


def _without_faults_ns(graph: Graph, step_ns: float) -> float:
    faults = page_fault_tasks(graph)
    if not faults:
        return step_ns
    duration = graph.tasks.duration_ns.copy()
    duration[faults] = 0.0
    return replay(replace_tasks(graph, duration_ns=duration)).step_ns


def _error(graph: Graph, step_ns: float) -> float:
    """Return the relative standard deviation of a recorded step without its page faults.

    Spreads of one call add up, and those of different calls are independent. Both these and the
    spread of the step decrease with the number of steps.
    """
    meta, tasks = graph.meta, graph.tasks
    errors = tasks.duration_ns * tasks.spread
    errors[page_fault_tasks(graph)] = 0.0
    by_call = np.bincount(tasks.call[tasks.call >= 0], errors[tasks.call >= 0])
    spread = math.sqrt(float((by_call**2).sum() + (errors[tasks.call < 0] ** 2).sum()))
    steps = math.sqrt(max(int(meta.get("aligned_steps", 1)), 1))
    of_step = float(meta.get("step_ns", {}).get("relative_spread", 0.0))
    return math.hypot(
        _FLOOR,
        _PACE if meta.get("contended") else 0.0,
        float(meta.get("unaligned_share", 0.0)),
        of_step / steps,
        spread / steps / max(step_ns, 1.0),
    )


def _unlike(before: Graph, after: Graph) -> str:
    targets = [str((graph.meta.get("recipe") or {}).get("target", "")) for graph in (before, after)]
    if all(targets) and targets[0] != targets[1]:
        return f"{targets[0]} and {targets[1]}"
    names = [Counter(graph.texts("name")) for graph in (before, after)]
    common = (names[0] & names[1]).total() / max(names[0].total(), names[1].total(), 1)
    if common < _MIN_COMMON:
        return f"{100 * common:.0f} % of the tasks in common"
    return ""


def _row(
    name: str, on_path: list[Contribution | None], work: list[tuple[float, int] | None]
) -> DiffRow:
    (busy_a, waited_a), (busy_b, waited_b) = (
        (c.busy_ns, c.waited_ns) if c else (0.0, 0.0) for c in on_path
    )
    (work_a, tasks_a), (work_b, tasks_b) = (totals or (0.0, 0) for totals in work)
    return DiffRow(name, busy_a, busy_b, waited_a, waited_b, work_a, work_b, tasks_a, tasks_b)


def _work(graph: Graph, group: str) -> dict[str, tuple[float, int]]:
    """Return total duration and number of calls by group; host remainders are not calls."""
    name = namer(graph, group)
    totals: dict[str, tuple[float, int]] = {}
    durations, kinds = graph.tasks.duration_ns.tolist(), graph.tasks.kind.tolist()
    host = int(Kind.HOST)
    for task, (duration, kind) in enumerate(zip(durations, kinds, strict=True)):
        key = name(task)
        total, count = totals.get(key, (0.0, 0))
        totals[key] = (total + duration, count + (kind != host))
    # Groups of host remainders alone (the begin of a step) still count as present.
    return {key: (total, max(count, 1)) for key, (total, count) in totals.items()}
