"""Edits: a list of changes, applied together to give a new `Graph`.

edit = Editor(graph, "amp:bf16")
edit.set_duration(7, 1.2e6, Provenance.MICROBENCHMARK)
cast = edit.insert(6, "aten::_to_copy", 8e3, Provenance.MICROBENCHMARK)
edit.allocate(4096, Role.ACTIVATION, producer=cast, release=9)
faster = edit.apply("matrix multiplications in bf16")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.errors import GraphError
from slipstream.graph.call import Call
from slipstream.graph.exchange import Exchange
from slipstream.graph.price import Price
from slipstream.graph.rewiring import (
    AllocationReassigner,
    Edge,
    Links,
    Rewired,
    aliases_of,
    checked_operands,
    rewired,
)
from slipstream.graph.select import TaskSelection, matching
from slipstream.graph.values import (
    PROVENANCES,
    Allocations,
    Dependency,
    Edges,
    Edit,
    Kind,
    StringTable,
    Tasks,
)
from slipstream.provenance import Provenance

if TYPE_CHECKING:
    from slipstream.graph.graph import Graph

Numbers = int | NDArray[np.int64]
"""The index of a task or allocation, or int64 [k] of several."""


class Editor:
    """Collects changes to a graph; `apply` returns the edited copy."""

    def __init__(self, graph: Graph, technique: str) -> None:
        self._graph = graph
        self._technique = technique
        self._strings = StringTable(graph.strings)
        self._calls = list(graph.calls)
        self._duration_ns = graph.tasks.duration_ns.copy()
        self._gap_ns = graph.tasks.gap_ns.copy()
        self._spread = graph.tasks.spread.copy()
        self._provenance = graph.tasks.provenance.copy()
        self._call = graph.tasks.call.copy()
        self._added_calls: dict[int, int] = {}
        self._removed = np.zeros(len(graph), bool)
        self._touched = np.zeros(len(graph), bool)
        # New tasks in order of insertion: columns of `_INSERTED` for each call.
        self._inserted: list[dict[str, NDArray[Any]]] = []
        self._inserts = 0
        # By handle: the storages of its call's tensors.
        self._storages_of: dict[int, Sequence[int]] = {}
        # By recorded task: the storages that replace the recorded ones.
        self._operands_of: dict[int, list[int]] = {}
        self._memory = {
            "nbytes": graph.memory.nbytes.copy(), "release": graph.memory.release.astype(np.int64)
        }  # fmt: skip
        # New allocations: columns of `Allocations`, whose tasks are -1, an index or a handle.
        self._allocated: dict[str, list[int]] = {name: [] for name in Allocations.dtypes}
        self._lanes = list(graph.lanes)
        # (source, target, kind, delay, lag) of new dependencies.
        self._connected: list[Edge] = []
        self._exchanges = list(graph.exchanges)
        self._order = np.arange(len(graph))
        self._reordered = False

    def set_duration(
        self,
        tasks: Numbers,
        durations_ns: ArrayLike,
        provenance: Provenance | NDArray[np.uint8],
        *,
        spread: ArrayLike | None = None,
        call: Call | ArrayLike | None = None,
    ) -> None:
        """Set durations of tasks, with their provenance, spread and calls.

        Args:
            tasks: one, or int64 [k].
            durations_ns, spread: float64 [k], or one for all.
            provenance: uint8 [k], indices in `PROVENANCES`, or one for all.
            call: one for all, or int [k], results of `call_number`.
        """
        tasks = self._checked(tasks, durations_ns)
        self._duration_ns[tasks] = durations_ns
        self._provenance[tasks] = _code(provenance)
        if spread is not None:
            self._spread[tasks] = spread
        if call is not None:
            self._call[tasks] = self.call_number(call) if isinstance(call, Call) else call
        self._touched[tasks] = True

    def set_price(self, task: int, price: Price, *, call: Call | None = None) -> None:
        """Set the duration of a task to a price."""
        self.set_duration(task, price.nanoseconds, price.provenance, spread=price.spread, call=call)

    def call_number(self, call: Call) -> int:
        """Return the index of `call` in the column of calls, which is added if new."""
        number = self._added_calls.get(id(call))
        if number is None:
            self._calls.append(call)
            number = self._added_calls[id(call)] = len(self._calls) - 1
        return number

    def scale(
        self,
        tasks: Numbers,
        factor: ArrayLike,
        provenance: Provenance | NDArray[np.uint8],
        *,
        spread: ArrayLike | None = None,
    ) -> None:
        """Multiply the durations of tasks; arguments as in `set_duration`.

        A task that is repeated in `tasks` is multiplied by each of its factors.
        """
        tasks = self._checked(tasks)
        np.multiply.at(self._duration_ns, tasks, np.asarray(factor, np.float64))
        self.set_duration(tasks, self._duration_ns[tasks], provenance, spread=spread)

    def set_gap(self, tasks: Numbers, gap_ns: ArrayLike) -> None:
        """Set the untracked time of the lane after each task, in ns."""
        tasks = self._checked(tasks, gap_ns)
        self._gap_ns[tasks] = gap_ns
        self._touched[tasks] = True

    def remove(self, tasks: Numbers) -> None:
        """Remove tasks and the gaps after them; tasks that waited for one wait for its causes."""
        tasks = self._checked(tasks)
        if self._reordered:
            raise GraphError("tasks were reordered in this edit", remedy="apply it, then remove")
        connected = {task for source, target, *_ in self._connected for task in (source, target)}
        if connected.intersection(tasks.tolist()):
            task = min(connected.intersection(tasks.tolist()))
            raise GraphError(f"task {task} was connected in this edit", remedy="remove it first")
        self._removed[tasks] = True
        self._touched[tasks] = True

    def set_operands(
        self, task: int, inputs: Sequence[int], outputs: Sequence[int] | None = None
    ) -> None:
        """Set the storages that `task` reads and writes, and update lifetimes of memory.

        To change the call of the task too, do that first. An output that shares the storage of an
        input, because the task works in place or makes a view, keeps sharing it. Tasks that read a
        storage that the task no longer writes must be changed in the same edit. Unused memory is
        dropped, see `rewiring.rewired`.

        Args:
            inputs: a storage for each tensor its call reads, -1 for unknown.
            outputs: a storage for each tensor that it returns; None to retain them.

        Raises:
            GraphError: the task does not exist or its call is unknown, the number of storages is
                not the number of tensors, an output would no longer share its input's
                storage, or a new tensor would share that of an input. By `apply`: a task reads a
                storage that no task writes any more.
        """
        self._checked(task)
        number = int(self._call[task])
        if number < 0:
            raise GraphError(f"the call of task {task} is unknown, so its operands cannot be set")
        call, recorded = self._calls[number], number == self._graph.tasks.call[task]
        aliases = aliases_of(self._graph, task, call, recorded=recorded)
        present = self._operands_of.get(task, self._graph.storages(task).tolist())
        written = outputs if outputs is not None else present[len(present) - len(call.outputs) :]
        self._operands_of[task] = checked_operands(
            task, call, aliases, inputs, written, explicit=outputs is not None
        )
        self._touched[task] = True

    def insert(
        self,
        task: int,
        name: str,
        duration_ns: float,
        provenance: Provenance,
        *,
        before: bool = False,
        gap_ns: float = 0.0,
        spread: float = 0.0,
        call: Call | None = None,
        kind: Kind = Kind.OP,
        storages: Sequence[int] = (),
        sequence: int = -1,
        lane: int = -1,
    ) -> int:
        """Insert a task right after (or before) `task` on its lane, with its module and phase.

        Args:
            lane: another lane, on which the order of tasks is that of the whole graph; the new task
                starts once that lane is free, unless `connect` makes it wait.
            storages: storages of the call's inputs, then outputs, as `Graph.operands`; empty if
                unknown, so that later techniques cannot follow its tensors.
            sequence: autograd's number that links a backward task to its forward.

        Returns:
            A handle of the new task for methods such as `connect`, `allocate` and `release_after`.

        Raises:
            GraphError: the task does not exist, or the number of storages is not the number of
                tensors of the call.
        """
        tensors = 0 if call is None else len(call.inputs) + len(call.outputs)
        if len(storages) not in (0, tensors):
            raise GraphError(f"{len(storages)} storages for {tensors} tensors of {name}")
        (handle,) = self.insert_all(
            np.array([task]), name, duration_ns, provenance, before=before, gap_ns=gap_ns,
            spread=spread, call=-1 if call is None else self.call_number(call), kind=kind,
            sequence=sequence, lane=lane,
        ).tolist()  # fmt: skip
        if len(storages):
            self._storages_of[handle] = storages
        return int(handle)

    def put(
        self,
        task: int,
        call: Call,
        price: Price,
        *,
        name: str = "",
        before: bool = False,
        gap_ns: float = 0.0,
        storages: Sequence[int] = (),
        sequence: int = -1,
    ) -> int:
        """Insert a call at its price; its `name` is by default that of its operator."""
        return self.insert(
            task, name or call.name, price.nanoseconds, price.provenance, before=before,
            gap_ns=gap_ns, spread=price.spread, call=call, storages=storages, sequence=sequence,
        )  # fmt: skip

    def insert_all(
        self,
        tasks: NDArray[np.int64],
        name: str | Sequence[str],
        durations_ns: ArrayLike,
        provenance: Provenance | NDArray[np.uint8],
        *,
        before: ArrayLike = False,
        gap_ns: ArrayLike = 0.0,
        spread: ArrayLike = 0.0,
        call: ArrayLike = -1,
        kind: Kind = Kind.OP,
        sequence: ArrayLike = -1,
        lane: int = -1,
        storages: Sequence[Sequence[int]] = (),
    ) -> NDArray[np.int64]:
        """Insert a new task right after (or before) each of `tasks`; see `insert`.

        Args:
            tasks: int64 [k].
            durations_ns, gap_ns, spread, before, sequence: [k], or one for all.
            provenance: uint8 [k], indices in `PROVENANCES`, or one for all.
            call: int [k], results of `call_number`; -1 for none.
            name: of each, or one for all.
            storages: storages of each; empty if unknown.

        Returns:
            int64 [k], their handles.
        """
        self._checked(tasks, durations_ns, gap_ns)
        recorded = self._graph.tasks
        handles = self._insert(
            tasks,
            before,
            name=[self._strings.add(each) for each in ([name] if isinstance(name, str) else name)],
            scope=recorded.scope[tasks],
            module=recorded.module[tasks],
            source=recorded.source[tasks],
            kind=int(kind),
            lane=lane if lane >= 0 else recorded.lane[tasks],
            call=call,
            sequence=sequence,
            duration_ns=durations_ns,
            gap_ns=gap_ns,
            spread=spread,
            provenance=_code(provenance),
            like=-1,
        )
        if storages:
            pairs = zip(handles.tolist(), storages, strict=True)
            self._storages_of |= {handle: stored for handle, stored in pairs if len(stored)}
        return handles

    def _insert(
        self, tasks: NDArray[np.int64], before: ArrayLike, **columns: ArrayLike
    ) -> NDArray[np.int64]:
        columns |= {"neighbour": tasks, "before": before}
        # For a single task several times as fast as np.broadcast_to.
        added = {name: np.empty(len(tasks), dtype) for name, dtype in _INSERTED.items()}
        for name, column in added.items():
            column[:] = columns[name]
        self._inserted.append(added)
        first = len(self._graph) + self._inserts
        self._inserts += len(tasks)
        return np.arange(first, first + len(tasks))

    def lane(self, name: str) -> int:
        """Return the index of the lane `name`, which is added if new."""
        if name not in self._lanes:
            self._lanes.append(name)
        return self._lanes.index(name)

    def connect(
        self,
        source: int,
        target: int,
        kind: Dependency = Dependency.COMMUNICATION,
        *,
        delay_ns: float = 0.0,
        lag: int = 0,
    ) -> None:
        """Let `target` wait for `source`, of this step or (lag 1) of the one before.

        Both are indices or handles of `insert`.

        Raises:
            GraphError: a task does not exist, or was removed in this edit.
        """
        self._check_references((source, target))
        for task in (source, target):
            if task < 0 or (task < len(self._removed) and self._removed[task]):
                what = "was removed in this edit" if task >= 0 else "does not exist"
                raise GraphError(f"task {task} cannot be connected: it {what}")
        self._connected.append((source, target, int(kind), delay_ns, lag))

    def exchange(self, row: Exchange) -> None:
        """Add a row to the table of exchanges; its tasks may be handles of `insert`."""
        self._exchanges.append(row)

    def repeat(self, tasks: Numbers, where: Numbers, *, before: bool = False) -> NDArray[np.int64]:
        """Insert a copy of each of `tasks`, as edited so far, right after (or before) `where`.

        Args:
            tasks, where: of equal length; a copy has the phase of its neighbour in `where`.

        Returns:
            int64 [k], their handles, as in `insert`.
        """
        tasks, where = self._checked(tasks), self._checked(where)
        recorded = self._graph.tasks
        copied = ("name", "scope", "module", "source", "kind")
        return self._insert(
            where,
            before,
            **{name: getattr(recorded, name)[tasks] for name in copied},
            lane=recorded.lane[where],
            call=self._call[tasks],
            sequence=-1,
            duration_ns=self._duration_ns[tasks],
            gap_ns=self._gap_ns[tasks],
            spread=self._spread[tasks],
            provenance=self._provenance[tasks],
            like=tasks,
        )

    def select(
        self,
        *,
        op: str | None = None,
        module: str | None = None,
        source: str | None = None,
        phase: str | None = None,
        kind: str | None = None,
        where: Callable[[int], bool] | None = None,
    ) -> TaskSelection:
        """Select tasks by their properties; see `slipstream.graph.select.matching`.

        Raises:
            InvalidArgumentError: the phase or kind does not exist.
        """
        tasks = matching(
            self._graph, op=op, module=module, source=source, phase=phase, kind=kind, where=where
        )
        return TaskSelection(self, tasks)

    def reorder(self, order: NDArray[np.int64]) -> None:
        """Reorder tasks; each lane runs its tasks in the order of the graph.

        Args:
            order: int64 [tasks], every task once.

        Raises:
            GraphError: a task is missing or duplicate, or tasks were removed in this edit.
        """
        if not np.array_equal(np.sort(order), np.arange(len(self._graph))):
            raise GraphError("the order does not contain every task exactly once")
        if self._removed.any():
            raise GraphError("tasks were removed in this edit", remedy="apply it, then reorder")
        order = np.array(order, np.int64)
        self._touched[order[order != self._order]] = True
        self._order, self._reordered = order, True

    def resize(self, allocations: Numbers, nbytes: ArrayLike) -> None:
        """Set the sizes of allocations: indices in the graph's memory, or handles."""
        self._set_memory("nbytes", allocations, _whole(nbytes))

    def release_after(self, allocations: Numbers, tasks: ArrayLike) -> None:
        """Free `allocations` after `tasks` (indices or handles; -1 for after the step)."""
        self._check_references(tasks)
        self._set_memory("release", allocations, np.asarray(tasks, np.int64))

    def allocate(
        self,
        nbytes: ArrayLike,
        role: ArrayLike,
        producer: ArrayLike,
        release: ArrayLike,
        storage: ArrayLike = -1,
    ) -> int:
        """Allocate memory at task `producer` that is freed after task `release`; or [k] of each.

        Tasks are indices or handles of `insert`; -1 for before the step, or after it.

        Returns:
            A handle for `resize` and `release_after`; for several, that of the first, followed by
            consecutive ones.
        """
        self._check_references(producer)
        self._check_references(release)
        rows = (_whole(nbytes), storage, role, producer, release)
        first = len(self._memory["nbytes"]) + len(self._allocated["nbytes"])
        columns = np.broadcast_arrays(*(np.asarray(row, np.int64) for row in rows))
        for column, values in zip(self._allocated.values(), columns, strict=True):
            column.extend(values.reshape(-1).tolist())
        return first

    def apply(self, what: str, note: str = "") -> Graph:
        """Return the edited copy, with one `Edit` that has the description `what` and `note`."""
        wiring = self._wiring()
        graph = wiring.graph
        added = self._added()
        order, new_index = self._placed(added)
        edited = replace(
            graph.tasks,
            duration_ns=self._duration_ns,
            gap_ns=self._gap_ns,
            spread=self._spread,
            provenance=self._provenance,
            call=self._call,
        ).take(order)
        places = new_index[len(graph) :]
        for name, column in edited.columns().items():
            if name in added:
                column[places] = added[name]
        starts, operands = self._operands(graph, order, places, added["like"])
        return replace(
            graph,
            tasks=edited,
            edges=self._edges(new_index),
            lanes=tuple(self._lanes),
            exchanges=self._renumbered(new_index),
            memory=self._remapped(wiring, new_index, order),
            strings=self._strings.freeze(),
            calls=tuple(self._calls),
            shrunk=self._shrunk(),
            operand_start=starts,
            operands=operands,
            edits=(
                *graph.edits,
                Edit(self._technique, what, int(self._touched.sum()) + self._inserts, note),
            ),
        )

    def _wiring(self) -> Rewired:
        """Return the graph with the operands of `set_operands`."""
        graph = self._graph
        if not self._operands_of:
            return Rewired(graph, np.ones(len(graph.memory), bool), Allocations.none())
        calls = {task: self._calls[self._call[task]] for task in self._operands_of}
        return rewired(graph, self._operands_of, calls, self._removed)

    def _added(self) -> dict[str, NDArray[Any]]:
        """Return the columns of all inserted tasks, in order of insertion."""
        none = [np.empty(0, dtype) for dtype in _INSERTED.values()]
        parts = [dict(zip(_INSERTED, none, strict=True)), *self._inserted]
        return {name: np.concatenate([part[name] for part in parts]) for name in _INSERTED}

    def _placed(
        self, added: dict[str, NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the order of tasks in the edited graph.

        Returns:
            For each edited task the recorded task, or that next to which it was inserted; and for
            each recorded or inserted task its index in the edited graph, -1 if removed.
        """
        n = len(self._graph)
        order = self._order
        if self._removed.any():
            order = order[~self._removed[order]]
        handles = order
        if self._inserts:
            place = np.empty(n, np.int64)
            place[self._order] = np.arange(n)
            # Three positions for each recorded task: tasks before it, itself, tasks after it.
            neighbour = added["neighbour"]
            inserted = 3 * place[neighbour] + np.where(added["before"], 0, 2)
            by_place = np.argsort(np.concatenate([3 * place[order] + 1, inserted]), kind="stable")
            handles = np.concatenate([order, n + np.arange(self._inserts)])[by_place]
            order = np.concatenate([order, neighbour])[by_place]
        new_index = np.full(n + self._inserts, -1, np.int64)
        new_index[handles] = np.arange(len(handles))
        return order, new_index

    def _checked(self, tasks: Numbers, *times_ns: ArrayLike) -> NDArray[np.int64]:
        """Return `tasks` as int64 [k], after checking them and their times."""
        tasks = np.atleast_1d(np.asarray(tasks, np.int64))
        if (wrong := (tasks < 0) | (tasks >= len(self._order))).any():
            raise GraphError(f"there is no task {tasks[wrong][0]} among {len(self._order)}")
        for each in times_ns:
            time_ns = np.asarray(each, np.float64)
            wrong = ~np.isfinite(time_ns) | (time_ns < 0)
            if wrong.any():
                at = np.flatnonzero(np.broadcast_to(wrong, len(tasks)))[0]
                duration_ns = np.broadcast_to(time_ns, len(tasks))[at]
                raise GraphError(f"task {tasks[at]} cannot take {duration_ns} ns")
        return tasks

    def _check_references(self, tasks: ArrayLike) -> None:
        """Check that these are -1, tasks of the graph, or handles of `insert`."""
        count, references = len(self._graph) + self._inserts, np.asarray(tasks)
        if (wrong := (references < -1) | (references >= count)).any():
            raise GraphError(f"there is no task {references[wrong].flat[0]} among {count}")

    def _set_memory(self, name: str, allocations: Numbers, values: NDArray[np.int64]) -> None:
        """Set a column of recorded or new allocations."""
        column, added = self._memory[name], self._allocated[name]
        handles = np.atleast_1d(np.asarray(allocations, np.int64))
        count = len(column) + len(added)
        if (wrong := (handles < 0) | (handles >= count)).any():
            raise GraphError(f"there is no allocation {handles[wrong][0]} among {count}")
        values = np.broadcast_to(values, len(handles))
        recorded = handles < len(column)
        column[handles[recorded]] = values[recorded]
        for handle, value in zip(
            handles[~recorded].tolist(), values[~recorded].tolist(), strict=True
        ):
            added[handle - len(column)] = value

    def _shrunk(self) -> tuple[Call | None, ...]:
        """Return the recorded calls at another number of samples; None for added calls."""
        recorded = self._graph.shrunk
        added = len(self._calls) - len(self._graph.calls)
        return (*recorded, *[None] * added) if recorded else ()

    def _operands(
        self,
        graph: Graph,
        order: NDArray[np.int64],
        places: NDArray[np.int64],
        like: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the edited operands; new tasks at `places` have those of the tasks `like`."""
        repeated = order.copy()
        repeated[places] = like
        first = len(self._graph)
        operands = {
            int(places[handle - first]): np.array(storages, np.int32)
            for handle, storages in self._storages_of.items()
        }
        return graph.gathered(repeated, operands)

    def _remapped(
        self, wiring: Rewired, new_index: NDArray[np.int64], order: NDArray[np.int64]
    ) -> Allocations:
        """Return the allocations with the task numbers of the edited graph.

        An allocation of a removed task is dropped, unless a remaining task uses it: then the next
        task on the lane allocates it. Memory that a removed task freed is freed after the task
        before it, or by its replacement.
        """
        recorded = wiring.graph.memory
        changed = self._memory["release"] != self._graph.memory.release
        release = np.where(changed, self._memory["release"], recorded.release)
        columns = recorded.columns() | {"nbytes": self._memory["nbytes"], "release": release}
        allocated = Allocations.of(*self._allocated.values())
        needed = Allocations.of(*(column[wiring.needed] for column in columns.values()))
        memory = needed.joined(allocated, wiring.added)
        if not self._removed.any() or not len(memory):
            numbers = np.append(new_index, -1)  # -1 stays -1
            return replace(
                memory,
                producer=numbers[memory.producer].astype(np.int32),
                release=numbers[memory.release].astype(np.int32),
            )
        reassigner = AllocationReassigner(wiring.graph, self._removed, new_index, order)
        freed = memory.release.copy()
        freed[: len(needed)] = recorded.release[wiring.needed]
        return reassigner.reassigned(memory, freed)

    def _edges(self, new_index: NDArray[np.int64]) -> Edges:
        """Return edges of the remaining tasks, including bridges over removed tasks.

        A bridge leads from each cause of a removed task, including the task before it on its lane,
        to each task that waited for it, including the task after it: tasks that synchronise with a
        removed kernel wait for the kernel before it.
        """
        edges = self._graph.edges
        if len(edges):
            remaining = edges
            if self._removed.any():
                remaining = Links(edges, self._graph.tasks.lane, self._removed).bridged()
            source, target = new_index[remaining.source], new_index[remaining.target]
            edges = replace(
                remaining, source=source.astype(np.int32), target=target.astype(np.int32)
            )
        if not self._connected:
            return edges
        first, second, *rest = zip(*self._connected, strict=True)
        return edges.joined(Edges.of(new_index[list(first)], new_index[list(second)], *rest))

    def _renumbered(self, new_index: NDArray[np.int64]) -> tuple[Exchange, ...]:
        """Return the exchanges of the remaining tasks, in their order."""
        moved = [row.renumbered(lambda task: int(new_index[task])) for row in self._exchanges]
        return tuple(sorted((row for row in moved if row.task >= 0), key=lambda row: row.task))


def append_task(graph: Graph, name: str, total_ns: float, spread: float, kind: Kind) -> Graph:
    """Append a measured task to the recorded step, without adding an `Edit`.

    For measurements of the whole step whose position within it is unknown.
    """
    last = len(graph) - 1
    edit = Editor(graph, "")
    edit.insert(last, name, total_ns, Provenance.MEASURED, spread=spread, kind=kind)
    edited = edit.apply("")
    tasks = edited.tasks
    # It does not inherit the properties of the task before it.
    for column in (tasks.module, tasks.source, tasks.scope, tasks.phase):
        column[-1] = 0
    tasks.sequence[-1] = -1
    return replace(edited, edits=graph.edits)


def _whole(nbytes: ArrayLike) -> NDArray[np.int64]:
    sizes = np.asarray(nbytes)
    if (sizes < 0).any():
        raise GraphError(f"an allocation cannot have {sizes.min()} bytes")
    return sizes.astype(np.int64)


def _code(provenance: Provenance | NDArray[np.uint8]) -> int | NDArray[np.uint8]:
    return PROVENANCES.index(provenance) if isinstance(provenance, Provenance) else provenance


# The columns of inserted tasks: the recorded `neighbour`, and the task `like` which they have
# operands (-1 for none); the others as in `Tasks`.
_INSERTED: dict[str, Any] = {
    "neighbour": np.int64,
    "before": np.bool_,
    "like": np.int64,
    **{name: dtype for name, dtype in Tasks.dtypes.items() if name not in ("phase", "rank")},
}
