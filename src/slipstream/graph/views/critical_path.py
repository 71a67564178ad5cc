"""Which tasks a step's time consists of, what binds each, and how much slack the others have.

    path = find_critical_path(replay(graph))
    path.by("operator")       # contributions that add up to the step's time, to the nanosecond

The path is that of the timeline's last step, from its end back to the end of the step before: what
it adds up to is what a step costs in a long run, with what reaches over from one step to the next.
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
"""What contributions can be summed by."""

_DEVICE = (Kind.KERNEL, Kind.COPY)
_COMPUTE = (Kind.OP, Kind.KERNEL)


@dataclass(frozen=True)
class CriticalPath:
    """The chain of tasks that the step's time consists of, first to last.

    Entry i contributes ``waited_ns[i] + busy_ns[i]``; all entries together contribute the step.

    Attributes:
        timeline: what it is the path of.
        task: int64 [k].
        start_ns, end_ns: float64 [k], when the task runs, from the timeline's begin.
        via: uint8 [k], `Dependency`: what the task waited for last; thread or stream order where
            that was the task before it in its lane.
        waited_ns: float64 [k], between the end of what it waited for and its start: the gap of
            the lane or the delay of the edge.
        busy_ns: float64 [k], its duration, less what lies before the step.
        slack_ns: float64 [n], of all tasks: how much later each could end without making the
            step longer.
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
        """What the contributions add up to."""
        return self.timeline.step_ns

    def by(self, group: str) -> list[Contribution]:
        """Contributions by operator, module, source line, phase, lane or kind; the largest first.

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
        """Nanoseconds the path waits in gaps and delays, by what it waits for."""
        return {
            kind: float(self.waited_ns[self.via == kind].sum())
            for kind in Dependency
            if (self.via == kind).any()
        }


@dataclass(frozen=True)
class Contribution:
    """What a group of tasks adds to the critical path.

    Attributes:
        busy_ns: while they run; waited_ns: gaps and delays before them; tasks: how many.
    """

    name: str
    busy_ns: float
    waited_ns: float
    tasks: int

    @property
    def total_ns(self) -> float:
        """Busy and waiting."""
        return self.busy_ns + self.waited_ns


@dataclass(frozen=True)
class Lane:
    """How a lane spends a step.

    Attributes:
        busy_ns: running tasks; gap_ns: in untracked work of its own (Python); idle_ns: waiting.
    """

    name: str
    tasks: int
    busy_ns: float
    gap_ns: float
    idle_ns: float

    @property
    def busy(self) -> float:
        """Share of the step it runs tasks."""
        total = self.busy_ns + self.gap_ns + self.idle_ns
        return self.busy_ns / total if total else 0.0


@dataclass(frozen=True)
class Communication:
    """Time of collectives and messages, and how much of it no computation of the rank hides."""

    total_ns: float
    exposed_ns: float


def find_critical_path(timeline: Timeline) -> CriticalPath:
    """The path of `timeline`'s last step.

    Among several tasks that end at the same time, the one of the same lane is taken.
    """
    return _Walk(timeline).path()


def namer(graph: Graph, group: str) -> Callable[[int], str]:
    """What a task is counted under.

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
        raise InvalidArgumentError("by", f"'{group}' is none of {', '.join(columns)}")
    return columns[group]


_PHASES = ("other", "forward", "backward", "optimizer")


def lanes(timeline: Timeline) -> list[Lane]:
    """How each lane spends a step, in the graph's order."""
    graph, step = timeline.graph, timeline.step_ns
    tasks, count = graph.tasks, len(graph.lanes)
    busy = timeline.lane_busy_ns
    gaps = np.bincount(tasks.lane, tasks.gap_ns, minlength=count)
    number = np.bincount(tasks.lane, minlength=count)
    rows = []
    for i, name in enumerate(graph.lanes):
        # A lane that falls behind, step after step, is busy for more than a step.
        gap = min(float(gaps[i]), max(step - float(busy[i]), 0.0))
        idle = max(step - float(busy[i]) - gap, 0.0)
        rows.append(Lane(name, int(number[i]), float(busy[i]), gap, idle))
    return rows


def communication(timeline: Timeline) -> Communication:
    """Time of communication in the first step, all ranks together, and the exposed part of it."""
    tasks = timeline.graph.tasks
    total = exposed = 0.0
    for rank in np.unique(tasks.rank).tolist():
        mine = tasks.rank == rank
        talk = mine & (tasks.kind == Kind.COMMUNICATION)
        if not talk.any():
            continue
        # Where a device computes, hosts only issue; without a device they compute themselves.
        device = mine & np.isin(tasks.kind, _DEVICE)
        work = device if device.any() else mine & np.isin(tasks.kind, _COMPUTE)
        both = _covered(timeline, talk | work)
        total += _covered(timeline, talk)
        exposed += both - _covered(timeline, work)
    return Communication(total, exposed)


def _covered(timeline: Timeline, chosen: NDArray[np.bool_]) -> float:
    """Length of the union of the chosen tasks' times."""
    start, end = timeline.start_ns[chosen], timeline.end_ns[chosen]
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())


class Causes:
    """What gates the start of each task of a timeline."""

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
        # The engine rounds times to its resolution; so must what is compared with them.
        self.gap = self.schedule.program.gap_ns
        self.delay = self.schedule.program.edges.delay_ns
        order = np.argsort(edges.target, kind="stable")
        self.into = order
        self.into_start = np.searchsorted(edges.target[order], np.arange(n + 1)).tolist()
        by_lane = np.argsort(tasks.lane, kind="stable")
        same = tasks.lane[by_lane][1:] == tasks.lane[by_lane][:-1]
        self.before = np.full(n, -1, np.int64)
        self.before[by_lane[1:][same]] = by_lane[:-1][same]
        # The first of a lane follows the lane's last of the step before.
        firsts = by_lane[np.concatenate([[True], ~same])] if n else by_lane
        lasts = by_lane[np.concatenate([~same, [True]])] if n else by_lane
        self.wrapped = np.zeros(n, np.bool_)
        self.wrapped[firsts] = True
        self.before[firsts] = lasts

    def free_ns(self, step: int) -> Floats:
        """float64 [n], when each task's lane has nothing else to do before it, gaps included."""
        end = self.schedule.end_ns
        last = end[step - 1] if step else np.zeros(self.n)
        ended = np.where(self.wrapped, last[self.before], end[step][self.before])
        gap = np.where(self.wrapped & (step == 0), 0.0, self.gap[self.before])
        free: Floats = ended + gap
        return free

    def of(self, step: int, task: int) -> tuple[int, tuple[int, int] | None, float]:
        """What gated the start of `task`: the kind, (step, task), and when that ended."""
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
    """From the last end backwards, always to what the task waited for."""

    def path(self) -> CriticalPath:
        """The path, first task first."""
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
        # Numbers of tasks are whole in float64, too.
        tasks, starts, ends, via, waited, busy = np.array(rows[::-1], np.float64).reshape(-1, 6).T
        return CriticalPath(
            self.timeline, tasks.astype(np.int64), starts, ends, via.astype(np.uint8), waited, busy,
            slack(self.timeline),
        )  # fmt: skip

    def _row(
        self, step: int, task: int, begin_ns: float
    ) -> tuple[tuple[int, float, float, int, float, float], tuple[int, int] | None]:
        """What `task` contributes after `begin_ns`, and what it waited for if that is later."""
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
    """float64 [n], ns: how much later each task of the last step could end for the same step end.

    The latest times are a simulation of the graph turned round: every task waits for what it
    gates, and time runs from the step's end backwards.
    """
    program = timeline.schedule.program
    n = program.tasks
    if not n:
        return np.zeros(0)
    lane = program.lane[::-1]
    # The gap after a task separates it from the next, which comes before it when time is turned.
    by_lane = np.argsort(lane, kind="stable")
    following = np.roll(by_lane, -1)
    last = np.concatenate([lane[by_lane][1:] != lane[by_lane][:-1], [True]])
    firsts = by_lane[np.concatenate([[True], last[:-1]])]
    following[last] = firsts
    gap = np.empty(n)
    gap[by_lane] = program.gap_ns[::-1][following]
    edges = program.edges
    turned = replace(
        program,
        lane=lane,
        duration_ns=timeline.schedule.duration_ns[::-1],
        gap_ns=gap,
        edges=native.Edges(n - 1 - edges.dst, n - 1 - edges.src, edges.delay_ns, edges.lag),
        names=None,
    )
    remaining = native.simulate(turned).start_ns[0][::-1]
    latest = timeline.schedule.step_end_ns[-1] - remaining
    spare: Floats = np.maximum(latest - timeline.schedule.end_ns[-1], 0.0)
    return spare
