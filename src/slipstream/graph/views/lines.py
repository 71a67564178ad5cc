"""Attribution of a step to source lines: time by phase, and memory at the peak.

    found = attribute(replay(graph))
    found.lines[0].name                     # the most expensive line
    sum(found.parts(), Cost()).time_ns == found.step_ns             # exactly

The time of a line is the contribution of its tasks to the critical path; tasks off the path do not
lengthen the step. Time on the path in which no task runs (Python, dispatch) belongs to the line of
the next task or, if that has none, to the line of the task before. Costs without a line are an
explicit remainder.

Source: the breakdown with an "untracked" node is from Skyline (Yu et al., UIST 2020), which times
every operation in isolation; here the parts are those of the whole running step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.graph import Graph
from slipstream.graph.page_faults import page_fault_tasks
from slipstream.graph.timeline import Timeline
from slipstream.graph.values import StepPhase
from slipstream.graph.views.critical_path import find_critical_path

_PHASES = len(StepPhase)


@dataclass(frozen=True)
class Cost:
    """Additive cost of a part of the source.

    Attributes:
        phase_ns: contribution of its tasks to the step, including the time before them, by
            `StepPhase`: other, forward, backward, optimizer.
        memory_bytes: memory at the peak that its tasks made; memory from before the step belongs
            to the line that uses it first.
        tasks: number of tasks, on and off the path.
    """

    phase_ns: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    memory_bytes: int = 0
    tasks: int = 0

    def __add__(self, other: Cost) -> Cost:
        a, b, c, d = (x + y for x, y in zip(self.phase_ns, other.phase_ns, strict=True))
        return Cost(
            (a, b, c, d),
            self.memory_bytes + other.memory_bytes,
            self.tasks + other.tasks,
        )

    @property
    def time_ns(self) -> float:
        """The time of all phases."""
        return sum(self.phase_ns)

    @property
    def forward_ns(self) -> float:
        """The time of the forward pass."""
        return self.phase_ns[StepPhase.FORWARD]

    @property
    def backward_ns(self) -> float:
        """The time of the backward pass."""
        return self.phase_ns[StepPhase.BACKWARD]

    @property
    def optimizer_ns(self) -> float:
        """The time of the update."""
        return self.phase_ns[StepPhase.OPTIMIZER]


@dataclass(frozen=True)
class LineCost:
    """Cost of one source line.

    Attributes:
        file: path relative to the project's root.
        number: line number, from 1.
        function: qualified name of the enclosing function, ``Block.forward``; empty if unknown.
        callers: the distinct call stacks: ``file:line``, the nearest first.
        modules: qualified names of the modules whose operators it runs.
    """

    file: str
    number: int
    function: str
    cost: Cost
    callers: tuple[tuple[str, ...], ...]
    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Attribution:
    """Time and memory of a step, by line.

    All times are multiples of the engine's resolution, so that sums are exact in any order.

    Attributes:
        lines: the lines, the most expensive first.
        page_faults: the cost of the step's page faults, whose lines are unknown; zero if they were
            not recorded.
        untracked: the remaining cost without a line.
        step_ns, peak_bytes: the sums of lines, page faults and untracked costs.
        modules: the cost of each module's operators without its children, by qualified name.
    """

    lines: tuple[LineCost, ...]
    page_faults: Cost
    untracked: Cost
    step_ns: float
    peak_bytes: int
    modules: Mapping[str, Cost]
    _made: Mapping[str, str] = field(repr=False, default_factory=dict)

    def parts(self) -> list[Cost]:
        """Return the parts that add up to the step time and its peak."""
        return [*(line.cost for line in self.lines), self.page_faults, self.untracked]

    @cached_property
    def functions(self) -> dict[tuple[str, str], Cost]:
        """The sums of lines, by (file, qualified name of the function)."""
        costs: dict[tuple[str, str], Cost] = {}
        for line in self.lines:
            key = line.file, line.function
            costs[key] = costs.get(key, Cost()) + line.cost
        return costs

    @property
    def untracked_time(self) -> float:
        """The share of the step without a line, excluding page faults."""
        return self.untracked.time_ns / self.step_ns if self.step_ns else 0.0

    @property
    def untracked_memory(self) -> float:
        """The share of the peak without a line."""
        return self.untracked.memory_bytes / self.peak_bytes if self.peak_bytes else 0.0

    def module(self, name: str) -> Cost:
        """Return the cost of a module including its children."""
        inside = f"{name}."
        parts = (c for m, c in self.modules.items() if m == name or m.startswith(inside))
        return sum(parts, Cost())

    def made_at(self, name: str) -> str:
        """Return the ``file:line`` that creates a module; empty if unknown."""
        return self._made.get(name, "")


def attribute(timeline: Timeline) -> Attribution:
    """Attribute the costs of a step to source lines."""
    graph = timeline.graph
    tasks, described = graph.tasks, _described(graph)
    time_ns = _times(timeline)
    nbytes, of_memory = _alive(timeline)
    faults = page_fault_tasks(graph)
    lines = tasks.source.astype(np.int64)
    count = len(graph.strings) + 1
    # Page faults have a row after all lines.
    lines[faults] = count - 1
    line_costs = _costs(lines, tasks.phase, time_ns, of_memory(lines), nbytes, count)
    modules = tasks.module.astype(np.int64)
    module_costs = _costs(modules, tasks.phase, time_ns, of_memory(modules), nbytes, count)
    inside = _modules_by_line(graph)
    entries = [
        _line(graph.strings[number], cost, described, inside.get(number, ()))
        for number, cost in enumerate(line_costs[:-1])
        if number and (cost.tasks or cost.memory_bytes)
    ]
    entries.sort(key=lambda line: (-line.cost.time_ns, line.file, line.number))
    return Attribution(
        tuple(entries),
        line_costs[-1],
        line_costs[0],
        timeline.step_ns,
        timeline.peak_bytes,
        {
            graph.strings[number]: cost
            for number, cost in enumerate(module_costs[:-1])
            if number and (cost.tasks or cost.memory_bytes)
        },
        _texts(described.get("made")),
    )


def _times(timeline: Timeline) -> NDArray[np.float64]:
    """Return the contribution of each task and the time before it, in ns, float64 [n].

    The time before a task without a line belongs to the task that it waited for.
    """
    path = find_critical_path(timeline)
    source = timeline.graph.tasks.source
    times = np.zeros(len(source))
    np.add.at(times, path.task, path.busy_ns)
    before = np.concatenate([path.task[:1], path.task[:-1]])
    if len(path):
        # The step before is identical, so its last task is that of this step.
        before[0] = path.task[-1]
    waits = np.where((source[path.task] == 0) & (source[before] != 0), before, path.task)
    np.add.at(times, waits, path.waited_ns)
    return times


def _alive(timeline: Timeline) -> tuple[NDArray[np.int64], Any]:
    """Return bytes live at the peak, int64 [k], and a function from a task column to owners."""
    graph, memory = timeline.graph, timeline.graph.memory
    if not len(memory):
        return np.zeros(0, np.int64), lambda column: np.zeros(0, np.int64)
    lives = timeline.memory
    at_ns = float(lives.peak_time_ns[0])
    lasting = (memory.producer < 0) & (memory.release < 0)
    alive = np.flatnonzero(lasting | ((lives.birth_ns[0] <= at_ns) & (at_ns < lives.death_ns[0])))

    def owners_by(column: NDArray[np.int64]) -> NDArray[np.int64]:
        first: dict[int, int] = {}
        for task in np.flatnonzero(column).tolist():
            for storage in graph.storages(task).tolist():
                first.setdefault(storage, int(column[task]))
        producers = memory.producer[alive]
        owners = np.where(producers >= 0, column[producers], 0)
        # Memory without a producing line (an accumulated gradient) belongs to its first user.
        for i in np.flatnonzero(owners == 0).tolist():
            owners[i] = first.get(int(memory.storage[alive[i]]), 0)
        return owners

    return memory.nbytes[alive], owners_by


def _costs(
    of_task: NDArray[np.int64],
    phase: NDArray[np.uint8],
    time_ns: NDArray[np.float64],
    of_memory: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    count: int,
) -> list[Cost]:
    """Return the costs of the tasks and memory of each of `count` groups."""
    cell = of_task * _PHASES + phase
    times = np.bincount(cell, time_ns, minlength=count * _PHASES).reshape(count, _PHASES)
    number = np.bincount(of_task, minlength=count)
    held = np.zeros(count, np.int64)
    np.add.at(held, of_memory, nbytes)
    rows = zip(times.tolist(), held.tolist(), number.tolist(), strict=True)
    return [Cost((a, b, c, d), memory, tasks) for (a, b, c, d), memory, tasks in rows]


def _modules_by_line(graph: Graph) -> dict[int, tuple[str, ...]]:
    pairs = np.unique(np.stack([graph.tasks.source, graph.tasks.module]), axis=1)
    modules: dict[int, list[str]] = {}
    for line, module in pairs.T.tolist():
        if line and module:
            modules.setdefault(line, []).append(graph.strings[module])
    return {line: tuple(sorted(names)) for line, names in modules.items()}


def _line(
    text: str, cost: Cost, described: Mapping[str, Any], modules: tuple[str, ...]
) -> LineCost:
    file, _, number = text.rpartition(":")
    functions = _texts(described.get("functions"))
    callers = described.get("callers")
    ways = callers.get(text, ()) if isinstance(callers, Mapping) else ()
    return LineCost(
        file or text,
        int(number) if number.isdecimal() else 0,
        functions.get(text, ""),
        cost,
        tuple(tuple(map(str, way)) for way in ways if isinstance(way, (list, tuple))),
        modules,
    )


def _described(graph: Graph) -> Mapping[str, Any]:
    """Return the recorded details of lines; empty for older or invalid recordings."""
    lines = graph.meta.get("lines")
    return lines if isinstance(lines, Mapping) else {}


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
