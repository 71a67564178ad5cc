"""What each of the user's source lines costs in a step: time by phase, and memory at its peak.

    found = attribute(replay(graph))
    found.lines[0].name                     # the dearest line
    sum(found.parts(), Cost()).time_ns == found.step_ns             # exactly

A step is as long as its critical path, so that a line's time is what its tasks add to that path;
what runs beside the path costs the step nothing. The time before a task in which nothing of the
path runs (Python, dispatch) belongs to the line that waits, or where that has none, to the line
that was waited for. What belongs to no line is kept as an explicit remainder, in a row of its own.

Source: the breakdown with its "untracked" node is Skyline's (Yu et al., UIST 2020), which times
every operation alone; here the parts are those of the step as it runs.
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
    """What a part of the source costs; a value that adds up.

    Attributes:
        phase_ns: by `StepPhase`, other, forward, backward, optimizer: what its tasks add to the
            step, with the time before them.
        memory_bytes: of what lives at the step's peak: what its tasks made; what exists before the
            step belongs to the line that uses it first.
        tasks: how many, on the path or not.
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
        """Of all phases."""
        return sum(self.phase_ns)

    @property
    def forward_ns(self) -> float:
        """Of the forward pass."""
        return self.phase_ns[StepPhase.FORWARD]

    @property
    def backward_ns(self) -> float:
        """Of the backward pass."""
        return self.phase_ns[StepPhase.BACKWARD]

    @property
    def optimizer_ns(self) -> float:
        """Of the update."""
        return self.phase_ns[StepPhase.OPTIMIZER]


@dataclass(frozen=True)
class LineCost:
    """One of the user's lines.

    Attributes:
        file: from the project's root; number: from 1.
        function: the qualified name of what it is in, ``Block.forward``; empty where unknown.
        callers: each way it was reached: ``file:line``, the nearest first.
        modules: whose operators run on it, by qualified name.
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
    """A step's time and memory, by line.

    All times are multiples of the engine's resolution, so that sums are exact in any order.

    Attributes:
        lines: the dearest first.
        page_faults: the task that stands for a whole step's page faults; nobody knows which line
            has them. Nothing where it was not recorded.
        untracked: what else belongs to no line.
        step_ns, peak_bytes: what lines, page faults and the untracked rest add up to.
        modules: by qualified name: the cost of its own operators, its children's left out.
    """

    lines: tuple[LineCost, ...]
    page_faults: Cost
    untracked: Cost
    step_ns: float
    peak_bytes: int
    modules: Mapping[str, Cost]
    _made: Mapping[str, str] = field(repr=False, default_factory=dict)

    def parts(self) -> list[Cost]:
        """What adds up to the step and its peak."""
        return [*(line.cost for line in self.lines), self.page_faults, self.untracked]

    @cached_property
    def functions(self) -> dict[tuple[str, str], Cost]:
        """By (file, qualified name of a function): the sum of its lines."""
        costs: dict[tuple[str, str], Cost] = {}
        for line in self.lines:
            key = line.file, line.function
            costs[key] = costs.get(key, Cost()) + line.cost
        return costs

    @property
    def untracked_time(self) -> float:
        """Share of the step that belongs to no line, without page faults."""
        return self.untracked.time_ns / self.step_ns if self.step_ns else 0.0

    @property
    def untracked_memory(self) -> float:
        """Share of the peak that belongs to no line."""
        return self.untracked.memory_bytes / self.peak_bytes if self.peak_bytes else 0.0

    def module(self, name: str) -> Cost:
        """A module with all in it."""
        inside = f"{name}."
        parts = (c for m, c in self.modules.items() if m == name or m.startswith(inside))
        return sum(parts, Cost())

    def made_at(self, name: str) -> str:
        """``file:line`` that makes a module; empty where unknown."""
        return self._made.get(name, "")


def attribute(timeline: Timeline) -> Attribution:
    """The costs of `timeline`'s step by source line."""
    graph = timeline.graph
    tasks, described = graph.tasks, _described(graph)
    time_ns = _times(timeline)
    nbytes, of_memory = _alive(timeline)
    faults = page_fault_tasks(graph)
    lines = tasks.source.astype(np.int64)
    count = len(graph.strings) + 1
    # Page faults have a row behind all lines.
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
    """float64 [n], ns: what each task adds to the step, with the time before it.

    The time before a task that has no line goes to the one it waited for.
    """
    path = find_critical_path(timeline)
    source = timeline.graph.tasks.source
    times = np.zeros(len(source))
    np.add.at(times, path.task, path.busy_ns)
    before = np.concatenate([path.task[:1], path.task[:-1]])
    if len(path):
        # The step before is the same: its last task is this one's.
        before[0] = path.task[-1]
    waits = np.where((source[path.task] == 0) & (source[before] != 0), before, path.task)
    np.add.at(times, waits, path.waited_ns)
    return times


def _alive(timeline: Timeline) -> tuple[NDArray[np.int64], Any]:
    """Bytes of what lives at the peak, int64 [k]; and by a task column, whose each of them is."""
    graph, memory = timeline.graph, timeline.graph.memory
    if not len(memory):
        return np.zeros(0, np.int64), lambda column: np.zeros(0, np.int64)
    lives = timeline.memory
    at_ns = float(lives.peak_time_ns[0])
    lasting = (memory.producer < 0) & (memory.release < 0)
    alive = np.flatnonzero(lasting | ((lives.birth_ns[0] <= at_ns) & (at_ns < lives.death_ns[0])))

    def whose(column: NDArray[np.int64]) -> NDArray[np.int64]:
        first: dict[int, int] = {}
        for task in np.flatnonzero(column).tolist():
            for storage in graph.storages(task).tolist():
                first.setdefault(storage, int(column[task]))
        producers = memory.producer[alive]
        owners = np.where(producers >= 0, column[producers], 0)
        # What no line makes or uses (a gradient that is added up) goes where it is used first.
        for i in np.flatnonzero(owners == 0).tolist():
            owners[i] = first.get(int(memory.storage[alive[i]]), 0)
        return owners

    return memory.nbytes[alive], whose


def _costs(
    of_task: NDArray[np.int64],
    phase: NDArray[np.uint8],
    time_ns: NDArray[np.float64],
    of_memory: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    count: int,
) -> list[Cost]:
    """By group, of `count`: what its tasks and its memory add up to."""
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
    """What was recorded of lines; nothing of an older recording. A file may say anything."""
    lines = graph.meta.get("lines")
    return lines if isinstance(lines, Mapping) else {}


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
