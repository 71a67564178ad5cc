"""`Graph`: the tasks of one step, as arrays; edits return a copy that lists its edits."""

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

# A file may contain any value, and each is a simulated step.
_MAX_WARM_STEPS = 4096


@dataclass(frozen=True, eq=False)
class Graph:
    """The tasks of one training step or inference, and their properties.

    Two graphs are equal if all their fields are, bit by bit; their files are then equal, too.

    Attributes:
        tasks, edges: columns of tasks and dependencies.
        strings: the strings that string columns index; entry 0 is empty.
        calls: the calls that `Tasks.call` indexes.
        operand_start: int64 [n + 1]; operands of task t are ``operands[start[t]:start[t + 1]]``:
            first the storages of its call's inputs, then of its outputs.
        operands: int32, storage ids; -1 for none.
        parameters: int32, ids of storages that hold parameters.
        lanes: the name of each lane.
        samples: samples per step; 0 if unknown.
        meta: schema, machine, thread count, calibration, contention (JSON).
        edits: changes to the recorded graph, oldest first.
        memory: allocations of the step; empty if memory was not recorded.
        shrunk: for each of `calls` the same call in a step of ``meta["shrunk"]["samples"]``
            samples, while `calls` are those of ``meta["shrunk"]["of"]``; None for a call that an
            edit inserted or changed. Empty if no second size was recorded.
        statistics: statistics of the values in the step, recorded on request.
        exchanges: communications with other ranks; empty on one rank.
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
        """Start an edit of this graph, see `slipstream.graph.edit`; `name` labels its changes."""
        return Editor(self, name)

    def string(self, index: int) -> str:
        """Return the string of a column's entry."""
        return self.strings[index]

    def task(self, number: int) -> TaskView:
        """Return one task, with its call, name, module, storages and durations."""
        return TaskView(self, number)

    def texts(self, column: str, tasks: NDArray[np.int64] | None = None) -> list[str]:
        """Return the strings of a column of `tasks`: "name", "scope", "module" or "source".

        Args:
            tasks: int64 [k]; None for all.
        """
        numbers = getattr(self.tasks, column)
        return [self.strings[n] for n in (numbers if tasks is None else numbers[tasks]).tolist()]

    @property
    def workers(self) -> int:
        """The number of replicas that share the step; 1 unless an edit distributed it."""
        replicas = self.meta.get("workers", 1)
        # A file may contain any value.
        return replicas if type(replicas) is int and replicas > 0 else 1

    @property
    def has_several_ranks(self) -> bool:
        """Whether it lists the tasks of several ranks, not of one that represents all."""
        rank = self.tasks.rank
        return bool((rank != rank[:1]).any())

    @property
    def warm_steps(self) -> int:
        """The number of steps after which a pipeline of ranks is steady; 0 for others."""
        steps = self.meta.get("warm_steps", 0)
        return steps if type(steps) is int and 0 < steps <= _MAX_WARM_STEPS else 0

    def storages(self, task: int) -> NDArray[np.int32]:
        """Return the storage ids of the task's inputs, then outputs."""
        ids: NDArray[np.int32] = self.operands[
            self.operand_start[task] : self.operand_start[task + 1]
        ]
        return ids

    def gathered(
        self, tasks: NDArray[np.int64], own: Mapping[int, NDArray[np.int32]] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return ``operand_start`` and ``operands`` of a graph of these tasks, in this order.

        Args:
            own: operands of the entries of `tasks` that are -1, by position in `tasks`.
        """
        runs = stretches(tasks)
        if not own and isinstance(runs, list):
            return self._gathered_stretches(runs)
        counts = np.where(tasks >= 0, np.diff(self.operand_start, append=0)[tasks], 0)
        for place, storages in (own or {}).items():
            counts[place] = len(storages)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Offsets from a task's first operand stay the same.
        first = np.where(tasks >= 0, self.operand_start[tasks], 0) - starts[:-1]
        places = np.repeat(first, counts) + np.arange(starts[-1])
        for place in own or {}:
            places[starts[place] : starts[place + 1]] = 0
        operands = self.operands[places] if len(self.operands) else np.zeros(len(places), np.int32)
        for place, storages in (own or {}).items():
            operands[starts[place] : starts[place + 1]] = storages
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
        """Raise a `GraphError` for the first invalid entry."""
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
            raise GraphError(f"the number of samples is {self.samples}")
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
                f"{len(self.shrunk)} calls at another number of samples for {len(self.calls)} calls"
            )


def _check_times(column: NDArray[np.float64], name: str, row: str) -> None:
    bad = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
    if len(bad):
        raise GraphError(f"{row} {bad[0]} has {name} {column[bad[0]]}")


_Found = TypeVar("_Found")


def cached_per_graph(find: Callable[..., _Found]) -> Callable[..., _Found]:
    """Cache the results of `find` for the lifetime of the graph.

    For results that depend on operators and their tensors, not on durations: several methods of a
    technique need them, and a page requests the same technique repeatedly.
    """

    @functools.wraps(find)
    def lookup(graph: Graph, *settings: Hashable) -> _Found:
        # In `__dict__`, as `cached_property` does: a changed copy starts with an empty cache.
        cached = graph.__dict__.setdefault("_kept", {})
        key = (find, settings)
        if key not in cached:
            cached[key] = find(graph, *settings)
        result: _Found = cached[key]
        return result

    return lookup


def need_graph(graph: object) -> None:
    """Check that `graph` is a recording, not for example the path of one.

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
        f"it has the type {type(graph).__name__}",
        remedy="pass a graph that ss.profile or ss.load returned",
    )


def replace_tasks(graph: Graph, **changes: Any) -> Graph:
    """Return `graph` with the named task columns replaced."""
    return replace(graph, tasks=replace(graph.tasks, **changes))
