"""Simulate a graph: lower it to the event engine and read the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream import native

if TYPE_CHECKING:
    from slipstream.graph.graph import Graph

_STEPS = 2
"""Two steps, so that a gap at the end of a step or an edge into the next one delays the next."""


@dataclass(frozen=True)
class Timeline:
    """The simulated times of the tasks of a graph.

    Attributes:
        schedule: the schedule of two consecutive steps, after those until a pipeline is steady.
    """

    graph: Graph
    schedule: native.Schedule

    @cached_property
    def step_ns(self) -> float:
        """Time from one step's end to the next one's: the step time of a long run."""
        ends = self.schedule.step_end_ns
        return float(ends[-1] - ends[-2])

    @cached_property
    def start_ns(self) -> NDArray[np.float64]:
        """Start times of the tasks of the first steady step, from its begin, float64 [n]."""
        return np.asarray(self.schedule.start_ns[-_STEPS]) - self._begin_ns

    @cached_property
    def end_ns(self) -> NDArray[np.float64]:
        """End times of the tasks of the first steady step, from its begin, float64 [n]."""
        return np.asarray(self.schedule.end_ns[-_STEPS]) - self._begin_ns

    @cached_property
    def _begin_ns(self) -> float:
        starts = self.schedule.start_ns
        return float(starts[-_STEPS].min(initial=np.inf)) if len(starts) > _STEPS else 0.0

    @cached_property
    def memory(self) -> native.MemoryTimeline:
        """Lifetimes of the allocations of the first step, and their total over time."""
        start, end = self.start_ns, self.end_ns
        # Tasks of zero duration hold memory for one distinct moment each, in order: too short to
        # change times noticeably, and long enough to be distinct.
        moment = 4 * np.spacing(end.max(initial=1.0))
        nth = np.arange(len(start)) * moment
        begins, ends = np.empty((2, 1, len(start) + 1))
        np.add(start, nth, out=begins[0, :-1])
        np.maximum(start, end, out=ends[0, :-1])
        ends[0, :-1] += nth
        ends[0, :-1] += moment / 2
        # An additional task at the step's end uses allocations that outlive the step.
        begins[0, -1] = ends[0, -1] = ends[0, :-1].max(initial=0.0)
        return native.memory_timeline(_tensors(self.graph), begins, ends)

    @cached_property
    def memory_changes(self) -> NDArray[np.int64]:
        """Changes of allocated bytes within the first step, in order, int64 [changes].

        At equal times frees come first, in descending order of size.
        """
        memory = self.graph.memory
        changes = None
        if self._sequential:
            changes = native.changes_in_turn(
                memory.nbytes, memory.producer, memory.release, len(self.graph)
            )
        if changes is None:
            born, freed = memory.producer >= 0, memory.release >= 0
            lives = self.memory
            times = np.concatenate([lives.birth_ns[0][born], lives.death_ns[0][freed]])
            changes = np.concatenate([memory.nbytes[born], -memory.nbytes[freed]])
            changes = changes[np.lexsort((changes, times))]
        return changes

    @cached_property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes of a rank during the step; 0 if memory was not recorded."""
        memory = self.graph.memory
        if not self._sequential:
            return int(self.memory.peak_bytes.max(initial=0))
        before = int(memory.nbytes[memory.producer < 0].sum())
        return before + int(np.cumsum(self.memory_changes).max(initial=0))

    @cached_property
    def _sequential(self) -> bool:
        """Whether tasks run sequentially in order and free nothing before it is allocated."""
        memory = self.graph.memory
        backwards = (memory.release >= 0) & (memory.release < memory.producer)
        waits = self.start_ns[1:] >= self.end_ns[:-1]
        return bool(waits.all()) and not backwards.any()

    def memory_curve(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return times, float64 [k], ascending, and the bytes allocated from each to the next."""
        if not len(self.graph.memory):
            return np.empty(0), np.empty(0, np.int64)
        return self.memory.curve()

    @cached_property
    def lane_busy_ns(self) -> NDArray[np.float64]:
        """Time per step in which each lane runs tasks, without gaps, float64 [lanes]."""
        busy: NDArray[np.float64] = self.schedule.lane_busy_ns / self.schedule.program.steps
        return busy


class _Names(Sequence[str]):
    """Lazy names of tasks, for messages: a list of all takes longer than simulating them."""

    def __init__(self, graph: Graph) -> None:
        self._strings, self._name = graph.strings, graph.tasks.name

    def __len__(self) -> int:
        return len(self._name)

    def __getitem__(self, task: Any) -> Any:
        return self._strings[self._name[task]]


def lower(graph: Graph, steps: int = _STEPS) -> native.Program:
    """Convert `graph` for the engine: lanes in program order, edges with delay and lag."""
    edges = graph.edges
    return native.Program(
        lane=graph.tasks.lane,
        duration_ns=native.quantize_ns(graph.tasks.duration_ns),
        gap_ns=native.quantize_ns(graph.tasks.gap_ns),
        policies=np.zeros(len(graph.lanes), np.uint8),
        edges=native.Edges(
            edges.source, edges.target, native.quantize_ns(edges.delay_ns), edges.lag
        ),
        steps=steps + graph.warm_steps,
        names=_Names(graph),
    )


def _tensors(graph: Graph) -> native.Tensors:
    """Convert `Graph.memory` for the engine; task ``len(graph)`` is the end of the step."""
    memory = graph.memory
    return native.Tensors(
        nbytes=memory.nbytes,
        producer=memory.producer,
        consumer_offset=np.arange(len(memory) + 1),
        consumer_task=np.where(memory.release < 0, len(graph), memory.release),
        persistent=(memory.producer < 0) & (memory.release < 0),
        pool=pools(graph),
    )


def pools(graph: Graph) -> NDArray[np.int32]:
    """Return the memory of each allocation, that of the rank of its tasks, int32 [allocations]."""
    memory, rank = graph.memory, np.append(graph.tasks.rank, 0)
    if not graph.has_several_ranks:
        return np.zeros(len(memory), np.int32)
    pool: NDArray[np.int32] = rank[np.where(memory.producer >= 0, memory.producer, memory.release)]
    return pool


def replay(graph: Graph) -> Timeline:
    """Simulate `graph`.

    Raises:
        GraphError: its dependencies form a cycle.
    """
    return Timeline(graph, native.simulate(lower(graph)))


def replay_like(timeline: Timeline, graph: Graph) -> Timeline:
    """Replay the graph of `timeline` with other durations, without compiling it again."""
    duration_ns = native.quantize_ns(graph.tasks.duration_ns)
    replayed = Timeline(graph, native.simulate(timeline.schedule.program, duration_ns))
    if timeline._sequential and replayed._sequential and graph.memory is timeline.graph.memory:
        # It depends only on the order of the tasks.
        replayed.__dict__["memory_changes"] = timeline.memory_changes
    return replayed
