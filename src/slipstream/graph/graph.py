"""`Graph`: the tasks of one step, as arrays; edits return a copy that knows what was edited."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.graph.call import Call
from slipstream.graph.edit import Editor
from slipstream.graph.exchange import Exchange
from slipstream.graph.statistics import Statistics
from slipstream.graph.values import (
    PROVENANCES,
    Allocations,
    Dependency,
    Edges,
    Edit,
    Kind,
    StepPhase,
    Tasks,
    check_range,
    same_bytes,
    stretches,
)
from slipstream.graph.view import TaskView
from slipstream.graph.views.notebook import graph_html, graph_line


@dataclass(frozen=True, eq=False)
class Graph:
    """The tasks of one training step or inference, with what is known of each.

    Two graphs are equal where everything in them is, bit by bit: then their files are equal, too.

    Attributes:
        tasks, edges: see there.
        strings: what the string columns index; entry 0 is empty.
        calls: what `Tasks.call` indexes.
        operand_start: int64 [n + 1]; operands of task t are ``operands[start[t]:start[t + 1]]``:
            first the storages of its call's inputs, then of its outputs.
        operands: int32, storage ids; -1 for none.
        parameters: int32, ids of storages that hold parameters.
        lanes: a name per lane.
        samples: samples per step; 0 if unknown.
        meta: schema, machine, thread count, calibration, contention (JSON).
        edits: what was done to the recorded graph, oldest first.
        memory: what the step allocates and frees; none when that was not recorded.
        shrunk: beside each of `calls` the same call in a step of ``meta["shrunk"]["samples"]``
            samples, while `calls` are those of ``meta["shrunk"]["of"]``; None for a call that was
            put in or changed by an edit. Empty when no second size was recorded.
        statistics: what was recorded on request of the values in the step; none by default.
        exchanges: what the step communicates with other ranks, see there; none on one.
    """

    tasks: Tasks
    edges: Edges
    strings: tuple[str, ...]
    calls: tuple[Call, ...]
    operand_start: NDArray[np.int64]
    operands: NDArray[np.int32]
    parameters: NDArray[np.int32]
    lanes: tuple[str, ...]
    samples: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    memory: Allocations = field(default_factory=Allocations.none)
    shrunk: tuple[Call | None, ...] = ()
    statistics: Statistics = field(default_factory=Statistics)
    exchanges: tuple[Exchange, ...] = ()

    def __len__(self) -> int:
        return len(self.tasks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        for field_ in dataclasses.fields(self):
            ours, theirs = getattr(self, field_.name), getattr(other, field_.name)
            arrays = isinstance(ours, np.ndarray)
            if not (same_bytes(ours, theirs) if arrays else ours == theirs):
                return False
        return True

    def __repr__(self) -> str:
        return f"<Graph {graph_line(self)}>"

    def _repr_html_(self) -> str:
        return graph_html(self)

    def what_if(self, name: str = "by hand") -> Editor:
        """An edit of this graph, see `slipstream.graph.edit`; `name` stands before what it did."""
        return Editor(self, name)

    def string(self, index: int) -> str:
        """The string a column's entry stands for."""
        return self.strings[index]

    def task(self, number: int) -> TaskView:
        """One task, with its call, name, module, storages and durations."""
        return TaskView(self, number)

    def texts(self, column: str, tasks: NDArray[np.int64] | None = None) -> list[str]:
        """The strings of a column of `tasks`: "name", "scope", "module" or "source".

        Args:
            tasks: of which; None for all.
        """
        numbers = getattr(self.tasks, column)
        return [self.strings[n] for n in (numbers if tasks is None else numbers[tasks]).tolist()]

    @property
    def workers(self) -> int:
        """How many replicas take such a step together; 1 unless it was edited to be shared."""
        replicas = self.meta.get("workers", 1)
        # A file may say anything.
        return replicas if type(replicas) is int and replicas > 0 else 1

    def storages(self, task: int) -> NDArray[np.int32]:
        """Storage ids of the task's inputs, then outputs."""
        ids: NDArray[np.int32] = self.operands[
            self.operand_start[task] : self.operand_start[task + 1]
        ]
        return ids

    def gathered(
        self, tasks: NDArray[np.int64], own: Mapping[int, NDArray[np.int32]] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """``operand_start`` and ``operands`` of a graph of these tasks, in this order.

        Args:
            own: by place in `tasks` where those are -1, the operands there.
        """
        runs = stretches(tasks)
        if not own and isinstance(runs, list):
            return self._gathered_stretches(runs)
        counts = np.where(tasks >= 0, np.diff(self.operand_start, append=0)[tasks], 0)
        for place, given in (own or {}).items():
            counts[place] = len(given)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Each operand's place: as far from its task's first as in the gathered ones.
        first = np.where(tasks >= 0, self.operand_start[tasks], 0) - starts[:-1]
        places = np.repeat(first, counts) + np.arange(starts[-1])
        for place in own or {}:
            places[starts[place] : starts[place + 1]] = 0
        operands = self.operands[places] if len(self.operands) else np.zeros(len(places), np.int32)
        for place, given in (own or {}).items():
            operands[starts[place] : starts[place + 1]] = given
        return starts, operands.astype(np.int32)

    def _gathered_stretches(
        self, runs: Sequence[slice]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        starts, operands, total = [np.zeros(1, np.int64)], [self.operands[:0]], 0
        for run in runs:
            if run.start < 0:
                starts.append(np.array([total]))
                continue
            first, last = self.operand_start[[run.start, run.stop]].tolist()
            starts.append(self.operand_start[run.start + 1 : run.stop + 1] + (total - first))
            operands.append(self.operands[first:last])
            total += last - first
        return np.concatenate(starts), np.concatenate(operands)

    def check(self) -> None:
        """Raise a `GraphError` naming the first thing that cannot be in a graph."""
        n = len(self.tasks)
        self.tasks.check_lengths("the column")
        for name in ("name", "scope", "module", "source"):
            check_range(getattr(self.tasks, name), 0, len(self.strings), name)
        check_range(self.tasks.call, -1, len(self.calls), "call")
        check_range(self.tasks.lane, 0, len(self.lanes), "lane")
        check_range(self.tasks.kind, 0, len(Kind), "kind")
        check_range(self.tasks.phase, 0, len(StepPhase), "phase")
        check_range(self.tasks.provenance, 0, len(PROVENANCES), "provenance")
        for name in ("duration_ns", "gap_ns", "spread"):
            _check_times(getattr(self.tasks, name), name, "task")
        edges = self.edges
        edges.check_lengths("the edges'")
        for name in ("source", "target"):
            check_range(getattr(edges, name), 0, n, f"edge {name}")
        check_range(edges.kind, 0, len(Dependency), "edge kind")
        check_range(edges.lag, 0, 2, "edge lag")
        _check_times(edges.delay_ns, "delay_ns", "edge")
        if self.samples < 0:
            raise GraphError(f"a step of {self.samples} samples")
        starts = self.operand_start
        if (
            starts.shape != (n + 1,)
            or (np.diff(starts) < 0).any()
            or starts[0] != 0
            or starts[-1] != len(self.operands)
        ):
            raise GraphError("the operand table does not match the tasks")
        self.memory.check(n)
        self.statistics.check()
        for row in self.exchanges:
            row.check(n)
        if self.shrunk and len(self.shrunk) != len(self.calls):
            raise GraphError(
                f"{len(self.shrunk)} calls at another number of samples for {len(self.calls)}"
            )


def _check_times(column: NDArray[np.float64], name: str, row: str) -> None:
    bad = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
    if len(bad):
        raise GraphError(f"{row} {bad[0]} has {name} {column[bad[0]]}")


_Found = TypeVar("_Found")


def kept(find: Callable[..., _Found]) -> Callable[..., _Found]:
    """`find`, which remembers what it found for as long as the graph lives.

    For what depends on operators and their tensors, not on durations. Several methods of a
    technique need it, and a page asks for the same technique again and again.
    """

    @functools.wraps(find)
    def lookup(graph: Graph, *settings: Hashable) -> _Found:
        # As `cached_property` does: a copy with anything changed starts without.
        known = graph.__dict__.setdefault("_kept", {})
        key = (find, settings)
        if key not in known:
            known[key] = find(graph, *settings)
        result: _Found = known[key]
        return result

    return lookup


def need_graph(graph: object) -> None:
    """Say what to do with a recording's path where the recording itself is needed.

    Raises:
        InvalidArgumentError: `graph` is not a `Graph`.
    """
    if isinstance(graph, Graph):
        return
    if isinstance(graph, (str, os.PathLike)):
        raise InvalidArgumentError(
            "graph",
            f"'{os.fspath(graph)}' is a path",
            remedy=f'read the recording: ss.load("{os.fspath(graph)}")'
            if str(graph).endswith(".slipgraph")
            else f'record it: ss.profile("{os.fspath(graph)}")',
        )
    raise InvalidArgumentError(
        "graph",
        f"it is of the type {type(graph).__name__}",
        remedy="give what ss.profile or ss.load returned",
    )


def replace_tasks(graph: Graph, **changes: Any) -> Graph:
    """`graph` with the named task columns replaced."""
    return replace(graph, tasks=replace(graph.tasks, **changes))
