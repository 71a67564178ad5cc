"""Edits: a list of intended changes, applied at once to give a new `Graph`.

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
    Edge,
    Heirs,
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
"""Of one task or allocation, or int64 [k], of several."""


class Editor:
    """Collects changes to a graph; `apply` makes the edited copy, the original stays as it is."""

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
        # New tasks in order of insertion: columns of `_INSERTED`, of as many as came together.
        self._inserted: list[dict[str, NDArray[Any]]] = []
        self._inserts = 0
        # By handle: the storages of its call's tensors.
        self._given: dict[int, Sequence[int]] = {}
        # By recorded task: the storages it has in place of the recorded ones.
        self._operands_of: dict[int, list[int]] = {}
        self._memory = {
            "nbytes": graph.memory.nbytes.copy(), "release": graph.memory.release.astype(np.int64)
        }  # fmt: skip
        # New allocations: as `Allocations`, with -1 or an index or handle for tasks.
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
        """Give tasks another duration, where it comes from, and the call they now make.

        Args:
            tasks: one, or int64 [k].
            durations_ns, spread: float64 [k], or one for all.
            provenance: uint8 [k], indices in `PROVENANCES`, or one for all.
            call: one for all, or int [k], what `call_number` gave.
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
        """As `set_duration`, of a price."""
        self.set_duration(task, price.nanoseconds, price.provenance, spread=price.spread, call=call)

    def call_number(self, call: Call) -> int:
        """What stands for `call` in the column of calls; added where this edit has not met it."""
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
        """Multiply the durations of tasks; arguments as of `set_duration`.

        A task that is repeated in `tasks` is multiplied by each of its factors.
        """
        tasks = self._checked(tasks)
        np.multiply.at(self._duration_ns, tasks, np.asarray(factor, np.float64))
        self.set_duration(tasks, self._duration_ns[tasks], provenance, spread=spread)

    def set_gap(self, tasks: Numbers, gap_ns: ArrayLike) -> None:
        """Let the lane do something untracked for so long after a task, or each of several."""
        tasks = self._checked(tasks, gap_ns)
        self._gap_ns[tasks] = gap_ns
        self._touched[tasks] = True

    def remove(self, tasks: Numbers) -> None:
        """Take tasks and the gaps after them away; what waited for one waits for its causes."""
        tasks = self._checked(tasks)
        if self._reordered:
            raise GraphError("tasks were reordered in this edit", remedy="apply it, then remove")
        waiting = {task for source, target, *_ in self._connected for task in (source, target)}
        if waiting.intersection(tasks.tolist()):
            task = min(waiting.intersection(tasks.tolist()))
            raise GraphError(f"task {task} was connected in this edit", remedy="remove it first")
        self._removed[tasks] = True
        self._touched[tasks] = True

    def set_operands(
        self, task: int, inputs: Sequence[int], outputs: Sequence[int] | None = None
    ) -> None:
        """Let `task` read, and write, other storages; memory lives as long as they are in use.

        Its call is the one it makes in this edit by now: change that first. An output that lies in
        an input, because the task works in place or only looks at it, stays there: by itself where
        no `outputs` are given. Who reads what the task wrote before has to be told in the same
        edit; the memory of what nobody uses any more goes away, see `rewiring.rewired`.

        Args:
            inputs: a storage for each tensor its call reads, -1 for unknown.
            outputs: for each that it returns; None for those it has.

        Raises:
            GraphError: there is no such task or it makes no known call, not one storage for every
                tensor, or one that parts an output from the input it lies in or puts a new tensor
                into one. By `apply`: a task reads what nothing makes any more.
        """
        self._checked(task)
        number = int(self._call[task])
        if number < 0:
            raise GraphError(f"task {task} makes no known call, whose tensors could lie elsewhere")
        call, recorded = self._calls[number], number == self._graph.tasks.call[task]
        aliases = aliases_of(self._graph, task, call, recorded=recorded)
        present = self._operands_of.get(task, self._graph.storages(task).tolist())
        given = outputs is not None
        written = outputs if outputs is not None else present[len(present) - len(call.outputs) :]
        self._operands_of[task] = checked_operands(
            task, call, aliases, inputs, written, given=given
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
        """Put a new task right after (or before) `task` on its lane, with its module and phase.

        Args:
            lane: another lane, where it stands in the order of the tasks it was put beside; it
                starts once that lane is free, so that it needs `connect` to wait for anything.
            storages: of the call's inputs, then outputs, as `Graph.operands`; empty when unknown,
                and then techniques that follow cannot see what it does to tensors.
            sequence: autograd's number, that ties a backward task to its forward.

        Returns:
            A handle that stands for the new task where `allocate` and `release_after` take one.

        Raises:
            GraphError: there is no such task, or not one storage for every tensor of the call.
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
            self._given[handle] = storages
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
        """As `insert`, of a call at its price; without a `name` it is called as its operator."""
        return self.insert(
            task, name or call.name, price.nanoseconds, price.provenance, before=before,
            gap_ns=gap_ns, spread=price.spread, call=call, storages=storages, sequence=sequence,
        )  # fmt: skip

    def insert_all(
        self,
        tasks: NDArray[np.int64],
        name: str,
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
        """As `insert`, of many new tasks at once, one right after (or before) each of `tasks`.

        Args:
            tasks: int64 [k].
            durations_ns, gap_ns, spread, before, sequence: [k], or one for all.
            provenance: uint8 [k], indices in `PROVENANCES`, or one for all.
            call: int [k], what `call_number` gave; -1 for none.
            storages: of each; empty when unknown.

        Returns:
            int64 [k], their handles.
        """
        self._checked(tasks, durations_ns, gap_ns)
        recorded = self._graph.tasks
        handles = self._insert(
            tasks,
            before,
            name=self._strings.add(name),
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
            self._given.update(zip(handles.tolist(), storages, strict=True))
        return handles

    def _insert(
        self, tasks: NDArray[np.int64], before: ArrayLike, **columns: ArrayLike
    ) -> NDArray[np.int64]:
        columns |= {"beside": tasks, "before": before}
        # Several times as fast for a single task as np.broadcast_to.
        added = {name: np.empty(len(tasks), dtype) for name, dtype in _INSERTED.items()}
        for name, column in added.items():
            column[:] = columns[name]
        self._inserted.append(added)
        first = len(self._graph) + self._inserts
        self._inserts += len(tasks)
        return np.arange(first, first + len(tasks))

    def lane(self, name: str) -> int:
        """The number of the lane `name`, added if there is none."""
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

        Both are indices or what `insert` gave.

        Raises:
            GraphError: there is no such task, or it was removed in this edit.
        """
        self._check_references((source, target))
        for task in (source, target):
            if task < 0 or (task < len(self._removed) and self._removed[task]):
                what = "was removed in this edit" if task >= 0 else "is none"
                raise GraphError(f"task {task} cannot be waited for or wait: it {what}")
        self._connected.append((source, target, int(kind), delay_ns, lag))

    def exchange(self, row: Exchange) -> None:
        """Add a row to the table of what is communicated; its tasks may be what `insert` gave."""
        self._exchanges.append(row)

    def repeat(self, tasks: Numbers, where: Numbers, *, before: bool = False) -> NDArray[np.int64]:
        """Put another run of each of `tasks`, as it is now, right after (or before) `where`.

        Args:
            tasks, where: as many; a new task has the phase of the one that it is put beside.

        Returns:
            int64 [k], their handles, as of `insert`.
        """
        tasks, where = self._checked(tasks), self._checked(where)
        recorded = self._graph.tasks
        kept = ("name", "scope", "module", "source", "kind")
        return self._insert(
            where,
            before,
            **{name: getattr(recorded, name)[tasks] for name in kept},
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
        """Tasks by what they are; see `slipstream.graph.select.matching`.

        Raises:
            InvalidArgumentError: no such phase or kind.
        """
        tasks = matching(
            self._graph, op=op, module=module, source=source, phase=phase, kind=kind, where=where
        )
        return TaskSelection(self, tasks)

    def reorder(self, order: NDArray[np.int64]) -> None:
        """Put the tasks in another order; each lane runs its own in the order of the graph.

        Args:
            order: int64 [tasks], every task once.

        Raises:
            GraphError: a task is missing or there twice, or tasks were removed in this edit.
        """
        if not np.array_equal(np.sort(order), np.arange(len(self._graph))):
            raise GraphError("an order names every task once")
        if self._removed.any():
            raise GraphError("tasks were removed in this edit", remedy="apply it, then reorder")
        order = np.array(order, np.int64)
        self._touched[order[order != self._order]] = True
        self._order, self._reordered = order, True

    def resize(self, allocations: Numbers, nbytes: ArrayLike) -> None:
        """Let allocations, indices in the graph's memory or new ones' handles, be as large."""
        self._set_memory("nbytes", allocations, _whole(nbytes))

    def release_after(self, allocations: Numbers, tasks: ArrayLike) -> None:
        """Free `allocations` after `tasks` (indices or what `insert` gave; -1: not in the step)."""
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
        """Let task `producer` allocate memory that is freed after task `release`; or [k] of each.

        Tasks are indices or what `insert` gave; -1: before the step, or not within it.

        Returns:
            A handle for `resize` and `release_after`; of several the first, the others follow it.
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
        """The edited copy, with one `Edit` that says `what` was done, and its `note`."""
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
        """The graph with the operands that `set_operands` gave."""
        graph = self._graph
        if not self._operands_of:
            return Rewired(graph, np.ones(len(graph.memory), bool), Allocations.none())
        calls = {task: self._calls[self._call[task]] for task in self._operands_of}
        return rewired(graph, self._operands_of, calls, self._removed)

    def _added(self) -> dict[str, NDArray[Any]]:
        """The columns of all inserted tasks, in order of insertion."""
        none = [np.empty(0, dtype) for dtype in _INSERTED.values()]
        parts = [dict(zip(_INSERTED, none, strict=True)), *self._inserted]
        return {name: np.concatenate([part[name] for part in parts]) for name in _INSERTED}

    def _placed(
        self, added: dict[str, NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where tasks stand in the edited graph.

        Returns:
            Of each task there the recorded one that it is or was put in beside; and of each
            recorded or inserted one its place, -1 if removed.
        """
        n = len(self._graph)
        order = self._order
        if self._removed.any():
            order = order[~self._removed[order]]
        handles = order
        if self._inserts:
            place = np.empty(n, np.int64)
            place[self._order] = np.arange(n)
            # Three places for each recorded task: what is before it, itself, what is after it.
            beside = added["beside"]
            put = 3 * place[beside] + np.where(added["before"], 0, 2)
            by_place = np.argsort(np.concatenate([3 * place[order] + 1, put]), kind="stable")
            handles = np.concatenate([order, n + np.arange(self._inserts)])[by_place]
            order = np.concatenate([order, beside])[by_place]
        new_index = np.full(n + self._inserts, -1, np.int64)
        new_index[handles] = np.arange(len(handles))
        return order, new_index

    def _checked(self, tasks: Numbers, *times_ns: ArrayLike) -> NDArray[np.int64]:
        """int64 [k]: these are tasks of the graph, and can take so long."""
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
        """That these are -1, tasks of the graph, or what `insert` gave."""
        count, given = len(self._graph) + self._inserts, np.asarray(tasks)
        if (wrong := (given < -1) | (given >= count)).any():
            raise GraphError(f"there is no task {given[wrong].flat[0]} among {count}")

    def _set_memory(self, name: str, allocations: Numbers, values: NDArray[np.int64]) -> None:
        """Write `values` where `allocations` are: among the recorded ones, or the new ones."""
        column, added = self._memory[name], self._allocated[name]
        given = np.atleast_1d(np.asarray(allocations, np.int64))
        count = len(column) + len(added)
        if (wrong := (given < 0) | (given >= count)).any():
            raise GraphError(f"there is no allocation {given[wrong][0]} among {count}")
        values = np.broadcast_to(values, len(given))
        recorded = given < len(column)
        column[given[recorded]] = values[recorded]
        for handle, value in zip(
            given[~recorded].tolist(), values[~recorded].tolist(), strict=True
        ):
            added[handle - len(column)] = value

    def _shrunk(self) -> tuple[Call | None, ...]:
        """The recorded calls' other forms; nothing is known of a call that was added."""
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
        """Of the edited graph; a new task at one of `places` has those of the task it is `like`."""
        repeated = order.copy()
        repeated[places] = like
        first = len(self._graph)
        operands = {
            int(places[handle - first]): np.array(storages, np.int32)
            for handle, storages in self._given.items()
        }
        return graph.gathered(repeated, operands)

    def _remapped(
        self, wiring: Rewired, new_index: NDArray[np.int64], order: NDArray[np.int64]
    ) -> Allocations:
        """The allocations with tasks numbered as in the edited graph.

        What a removed task allocated goes with it, unless a kept task uses it: then the next task
        on the lane allocates it. What a removed task freed is freed after the task before it, or
        by what was put in its place.
        """
        recorded = wiring.graph.memory
        asked = self._memory["release"] != self._graph.memory.release
        release = np.where(asked, self._memory["release"], recorded.release)
        columns = recorded.columns() | {"nbytes": self._memory["nbytes"], "release": release}
        allocated = Allocations.of(*self._allocated.values())
        kept = Allocations.of(*(column[wiring.needed] for column in columns.values()))
        memory = kept.joined(allocated, wiring.added)
        if not self._removed.any() or not len(memory):
            numbers = np.append(new_index, -1)  # -1 stays -1
            return replace(
                memory,
                producer=numbers[memory.producer].astype(np.int32),
                release=numbers[memory.release].astype(np.int32),
            )
        return Heirs(wiring.graph, self._removed, new_index, order).hand_on(memory)

    def _edges(self, new_index: NDArray[np.int64]) -> Edges:
        """Edges between kept tasks, and from what a removed task waited for to what waited.

        What comes before and after it on its own lane counts among them: a kernel that others
        synchronise with hands that on to the kernel before it.
        """
        edges = self._graph.edges
        if len(edges):
            kept = edges
            if self._removed.any():
                kept = Links(edges, self._graph.tasks.lane, self._removed).bridged()
            source, target = new_index[kept.source], new_index[kept.target]
            edges = replace(kept, source=source.astype(np.int32), target=target.astype(np.int32))
        if not self._connected:
            return edges
        first, second, *rest = zip(*self._connected, strict=True)
        return edges.joined(Edges.of(new_index[list(first)], new_index[list(second)], *rest))

    def _renumbered(self, new_index: NDArray[np.int64]) -> tuple[Exchange, ...]:
        """The exchanges whose task is still there, in its order."""
        moved = [row.renumbered(lambda task: int(new_index[task])) for row in self._exchanges]
        return tuple(sorted((row for row in moved if row.task >= 0), key=lambda row: row.task))


def append_task(graph: Graph, name: str, total_ns: float, spread: float, kind: Kind) -> Graph:
    """The recorded step with one more measured task at its end, which is no edit of it.

    For what was measured of the step as a whole: where in it the parts lie is not known.
    """
    last = len(graph) - 1
    edit = Editor(graph, "")
    edit.insert(last, name, total_ns, Provenance.MEASURED, spread=spread, kind=kind)
    edited = edit.apply("")
    tasks = edited.tasks
    # It takes over nothing of the task it stands behind.
    for column in (tasks.module, tasks.source, tasks.scope, tasks.phase):
        column[-1] = 0
    tasks.sequence[-1] = -1
    return replace(edited, edits=graph.edits)


def _whole(nbytes: ArrayLike) -> NDArray[np.int64]:
    given = np.asarray(nbytes)
    if (given < 0).any():
        raise GraphError(f"an allocation cannot have {given.min()} bytes")
    return given.astype(np.int64)


def _code(provenance: Provenance | NDArray[np.uint8]) -> int | NDArray[np.uint8]:
    return PROVENANCES.index(provenance) if isinstance(provenance, Provenance) else provenance


# The columns of tasks that are put in: `beside` which recorded one, and `like` which, whose
# operands they have (-1: none); the others as in `Tasks`.
_INSERTED: dict[str, Any] = {
    "beside": np.int64,
    "before": np.bool_,
    "like": np.int64,
    **{name: dtype for name, dtype in Tasks.dtypes.items() if name not in ("phase", "rank")},
}
