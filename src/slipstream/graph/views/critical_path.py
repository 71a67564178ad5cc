"""The critical path of a step, the dependencies on it, and the slack of all tasks.

    path = find_critical_path(replay(graph))
    path.by("operator")       # contributions that add up to the step's time, to the nanosecond

The path is that of the timeline's last step, from its end back to the end of the step before. Its
sum is the step time of a long run, including dependencies between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream import native
from slipstream.errors import InvalidArgumentError
from slipstream.graph.timeline import Timeline
from slipstream.graph.values import Dependency, Kind

if TYPE_CHECKING:
    from slipstream.graph.graph import Graph

Floats = NDArray[np.float64]
GROUPS = ("operator", "module", "line", "phase", "lane", "kind")
"""Groupings of contributions."""

_DEVICE = (Kind.KERNEL, Kind.COPY)
_COMPUTE = (Kind.OP, Kind.KERNEL)


@dataclass(frozen=True)
class CriticalPath:
    """The chain of tasks that determines the step time, in order.

    Entry i contributes ``waited_ns[i] + busy_ns[i]``; the contributions add up to the step time.

    Attributes:
        timeline: the timeline of the path.
        task: int64 [k], the tasks.
        start_ns, end_ns: float64 [k], times of the task from the timeline's begin.
        via: uint8 [k], the `Dependency` that gated the start; thread or stream order if that was
            the task before it in its lane.
        waited_ns: float64 [k], time between the end of the gating task and the start: the gap of
            the lane or the delay of the edge.
        busy_ns: float64 [k], the duration, without its part before the step.
        slack_ns: float64 [n], for all tasks, the delay of its end that would not lengthen the
            step.
    """

    timeline: Timeline
    task: NDArray[np.int64]
    start_ns: Floats
    end_ns: Floats
    via: NDArray[np.uint8]
    waited_ns: Floats
    busy_ns: Floats
    slack_ns: Floats

    def __len__(self) -> int:
        return len(self.task)

    @property
    def step_ns(self) -> float:
        """The sum of all contributions."""
        return self.timeline.step_ns

    def by(self, group: str) -> list[Contribution]:
        """Return contributions by one of `GROUPS`, the largest first.

        Raises:
            InvalidArgumentError: unknown group.
        """
        name = namer(self.timeline.graph, group)
        sums: dict[str, list[float]] = {}
        rows = zip(self.task.tolist(), self.busy_ns.tolist(), self.waited_ns.tolist(), strict=True)
        for task, busy, waited in rows:
            row = sums.setdefault(name(task), [0.0, 0.0, 0])
            row[0] += busy
            row[1] += waited
            row[2] += 1
        shares = [Contribution(key, row[0], row[1], int(row[2])) for key, row in sums.items()]
        return sorted(shares, key=lambda c: (-c.total_ns, c.name))

    def by_dependency(self) -> dict[Dependency, float]:
        """Return the time of gaps and delays on the path, in ns, by dependency."""
        return {
            kind: float(self.waited_ns[self.via == kind].sum())
            for kind in Dependency
            if (self.via == kind).any()
        }


@dataclass(frozen=True)
class Contribution:
    """The contribution of a group of tasks to the critical path.

    Attributes:
        busy_ns: time in which they run.
        waited_ns: gaps and delays before them.
        tasks: number of tasks on the path.
    """

    name: str
    busy_ns: float
    waited_ns: float
    tasks: int

    @property
    def total_ns(self) -> float:
        """The sum of `busy_ns` and `waited_ns`."""
        return self.busy_ns + self.waited_ns


@dataclass(frozen=True)
class Lane:
    """Utilisation of a lane in a step.

    Attributes:
        busy_ns: time running tasks.
        gap_ns: time in untracked work (Python).
        idle_ns: time waiting.
    """

    name: str
    tasks: int
    busy_ns: float
    gap_ns: float
    idle_ns: float

    @property
    def busy(self) -> float:
        """The share of the step in which it runs tasks."""
        total = self.busy_ns + self.gap_ns + self.idle_ns
        return self.busy_ns / total if total else 0.0


@dataclass(frozen=True)
class Communication:
    """Total time of communication, and its part not hidden by computation of the rank."""

    total_ns: float
    exposed_ns: float


def find_critical_path(timeline: Timeline) -> CriticalPath:
    """Return the critical path of the last step.

    Of several gating tasks that end at the same time, the one on the same lane is chosen.
    """
    return _Walk(timeline).path()


def namer(graph: Graph, group: str) -> Callable[[int], str]:
    """Return a function that maps a task to the name of its group.

    Raises:
        InvalidArgumentError: unknown group.
    """
    tasks, strings = graph.tasks, graph.strings
    columns: dict[str, Callable[[int], str]] = {
        "operator": lambda task: strings[tasks.name[task]],
        "module": lambda task: strings[tasks.module[task]] or "(no module)",
        "line": lambda task: strings[tasks.source[task]] or "(no source line)",
        "phase": lambda task: _PHASES[tasks.phase[task]],
        "lane": lambda task: graph.lanes[tasks.lane[task]],
        "kind": lambda task: Kind(tasks.kind[task]).name.lower(),
    }
    if group not in columns:
        raise InvalidArgumentError("by", f"'{group}' is not one of {', '.join(columns)}")
    return columns[group]


_PHASES = ("other", "forward", "backward", "optimizer")


def lane_utilisation(timeline: Timeline) -> list[Lane]:
    """Return the utilisation of each lane, in the graph's order."""
    graph, step = timeline.graph, timeline.step_ns
    tasks, count = graph.tasks, len(graph.lanes)
    busy = timeline.lane_busy_ns
    gaps = np.bincount(tasks.lane, tasks.gap_ns, minlength=count)
    number = np.bincount(tasks.lane, minlength=count)
    rows = []
    for i, name in enumerate(graph.lanes):
        # A lane that falls further behind in every step is busy for longer than a step.
        gap = min(float(gaps[i]), max(step - float(busy[i]), 0.0))
        idle = max(step - float(busy[i]) - gap, 0.0)
        rows.append(Lane(name, int(number[i]), float(busy[i]), gap, idle))
    return rows


def communication(timeline: Timeline) -> Communication:
    """Return the communication time of the first step, total and exposed, over all ranks."""
    tasks = timeline.graph.tasks
    total = exposed = 0.0
    for rank in np.unique(tasks.rank).tolist():
        of_rank = tasks.rank == rank
        communicates = of_rank & (tasks.kind == Kind.COMMUNICATION)
        if not communicates.any():
            continue
        # With a device, hosts only launch work; without one, they compute.
        device = of_rank & np.isin(tasks.kind, _DEVICE)
        work = device if device.any() else of_rank & np.isin(tasks.kind, _COMPUTE)
        either = _covered(timeline, communicates | work)
        total += _covered(timeline, communicates)
        exposed += either - _covered(timeline, work)
    return Communication(total, exposed)


def _covered(timeline: Timeline, chosen: NDArray[np.bool_]) -> float:
    """Return the length of the union of the tasks' times."""
    start, end = timeline.start_ns[chosen], timeline.end_ns[chosen]
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())


class Causes:
    """The dependency that gates the start of each task of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        graph = timeline.graph
        self.schedule = timeline.schedule
        self.steps = self.schedule.program.steps
        tasks, edges = graph.tasks, graph.edges
        n = len(tasks)
        self.n = n
        streams = np.isin(tasks.kind, (*_DEVICE, Kind.COMMUNICATION))
        self.order = np.where(streams, Dependency.STREAM_ORDER, Dependency.THREAD_ORDER)
        # Rounded to the engine's resolution, because they are compared with its times.
        self.gap = self.schedule.program.gap_ns
        self.delay = self.schedule.program.edges.delay_ns
        order = np.argsort(edges.target, kind="stable")
        self.into = order
        self.into_start = np.searchsorted(edges.target[order], np.arange(n + 1)).tolist()
        by_lane = np.argsort(tasks.lane, kind="stable")
        same = tasks.lane[by_lane][1:] == tasks.lane[by_lane][:-1]
        self.before = np.full(n, -1, np.int64)
        self.before[by_lane[1:][same]] = by_lane[:-1][same]
        # The first task of a lane follows the lane's last task of the step before.
        firsts = by_lane[np.concatenate([[True], ~same])] if n else by_lane
        lasts = by_lane[np.concatenate([~same, [True]])] if n else by_lane
        self.wrapped = np.zeros(n, np.bool_)
        self.wrapped[firsts] = True
        self.before[firsts] = lasts

    def free_ns(self, step: int) -> Floats:
        """Return when the lane of each task becomes free for it, after gaps, float64 [n]."""
        end = self.schedule.end_ns
        last = end[step - 1] if step else np.zeros(self.n)
        ended = np.where(self.wrapped, last[self.before], end[step][self.before])
        gap = np.where(self.wrapped & (step == 0), 0.0, self.gap[self.before])
        free: Floats = ended + gap
        return free

    def of(self, step: int, task: int) -> tuple[int, tuple[int, int] | None, float]:
        """Return the dependency that gated `task`, the gating (step, task), and its end."""
        edges = self.timeline.graph.edges
        end = self.schedule.end_ns
        order = int(self.order[task])
        before = int(self.before[task])
        its_step = step - int(self.wrapped[task])
        best: tuple[float, int, tuple[int, int] | None, float] = (-1.0, order, None, 0.0)
        if its_step >= 0:
            ended = float(end[its_step, before])
            best = (ended + float(self.gap[before]), order, (its_step, before), ended)
        for at in range(self.into_start[task], self.into_start[task + 1]):
            edge = int(self.into[at])
            its_step = step - int(edges.lag[edge])
            if its_step < 0:
                continue
            source = int(edges.source[edge])
            ended = float(end[its_step, source])
            gate = ended + float(self.delay[edge])
            if gate > best[0]:
                best = (gate, int(edges.kind[edge]), (its_step, source), ended)
        return best[1], best[2], best[3]


class _Walk(Causes):
    """Walk backwards from the last end along gating tasks."""

    def path(self) -> CriticalPath:
        """Return the path, in order of time."""
        end = self.schedule.end_ns
        begin_ns = float(self.schedule.step_end_ns[-2]) if self.steps > 1 else 0.0
        rows: list[tuple[int, float, float, int, float, float]] = []
        if self.n:
            step = self.steps - 1
            task = int(np.argmax(end[step]))
            while True:
                row, following = self._row(step, task, begin_ns)
                rows.append(row)
                if following is None:
                    break
                step, task = following
        # float64 represents task numbers exactly.
        tasks, starts, ends, via, waited, busy = np.array(rows[::-1], np.float64).reshape(-1, 6).T
        return CriticalPath(
            self.timeline, tasks.astype(np.int64), starts, ends, via.astype(np.uint8), waited, busy,
            slack(self.timeline),
        )  # fmt: skip

    def _row(
        self, step: int, task: int, begin_ns: float
    ) -> tuple[tuple[int, float, float, int, float, float], tuple[int, int] | None]:
        """Return the row of `task` after `begin_ns`, and its gating task if that ends later."""
        start = float(self.schedule.start_ns[step, task])
        end = float(self.schedule.end_ns[step, task])
        busy = end - max(start, begin_ns)
        via, cause, caused = self.of(step, task)
        if start <= begin_ns:
            return (task, start, end, via, 0.0, busy), None
        waited = start - max(caused, begin_ns)
        following = cause if cause is not None and caused > begin_ns else None
        return (task, start, end, via, waited, busy), following


def slack(timeline: Timeline) -> Floats:
    """Return the slack of each task of the last step, in ns, float64 [n].

    It is the delay of a task's end that leaves the step's end unchanged. The latest ends are from a
    simulation of the reversed graph, in which time runs backwards from the step's end.
    """
    program = timeline.schedule.program
    n = program.tasks
    if not n:
        return np.zeros(0)
    lane = program.lane[::-1]
    # The gap after a task separates it from the next, which precedes it in reversed time.
    by_lane = np.argsort(lane, kind="stable")
    following = np.roll(by_lane, -1)
    last = np.concatenate([lane[by_lane][1:] != lane[by_lane][:-1], [True]])
    firsts = by_lane[np.concatenate([[True], last[:-1]])]
    following[last] = firsts
    gap = np.empty(n)
    gap[by_lane] = program.gap_ns[::-1][following]
    edges = program.edges
    reversed_program = replace(
        program,
        lane=lane,
        duration_ns=timeline.schedule.duration_ns[::-1],
        gap_ns=gap,
        edges=native.Edges(n - 1 - edges.dst, n - 1 - edges.src, edges.delay_ns, edges.lag),
        names=None,
    )
    remaining = native.simulate(reversed_program).start_ns[0][::-1]
    latest = timeline.schedule.step_end_ns[-1] - remaining
    spare: Floats = np.maximum(latest - timeline.schedule.end_ns[-1], 0.0)
    return spare
