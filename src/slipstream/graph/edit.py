"""Edits: a list of intended changes, applied at once to give a new `Graph`.

edit = Editor(graph, "amp:bf16")
edit.set_duration(7, 1.2e6, Provenance.MICROBENCHMARK)
cast = edit.insert(6, "aten::_to_copy", 8e3, Provenance.MICROBENCHMARK)
edit.allocate(4096, Role.ACTIVATION, producer=cast, release=9)
faster = edit.apply("matrix multiplications in bf16")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.graph.call import Call
from slipstream.graph.exchange import Exchange
from slipstream.graph.graph import (
    PROVENANCES,
    Dependency,
    Edges,
    Edit,
    Graph,
    Kind,
    StringTable,
)
from slipstream.graph.memory import Allocations, Role
from slipstream.graph.select import Selection, matching
from slipstream.provenance import Provenance


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
        self._removed: set[int] = set()
        # By position: (before or after, task) -> (handle, new row) in order of insertion.
        self._inserted: dict[tuple[int, int], list[tuple[int, dict[str, object]]]] = {}
        self._touched: set[int] = set()
        self._inserts = 0
        # By id of a new row: the task whose operands it has.
        self._repeated: dict[int, int] = {}
        # By id of a new row: the storages of its call's tensors.
        self._given: dict[int, Sequence[int]] = {}
        self._nbytes = graph.memory.nbytes.copy()
        self._release = graph.memory.release.astype(np.int64)
        # New allocations: as `Allocations`, with -1 or an index or handle for tasks.
        self._allocated: list[dict[str, int]] = []
        self._lanes = list(graph.lanes)
        # (source, target, kind, delay, lag) of new dependencies.
        self._connected: list[_Edge] = []
        self._exchanges = list(graph.exchanges)
        self._order = np.arange(len(graph))
        self._reordered = False

    def set_duration(
        self,
        task: int,
        duration_ns: float,
        provenance: Provenance,
        *,
        spread: float | None = None,
        call: Call | None = None,
    ) -> None:
        """Give `task` another duration, where it comes from, and the call it now makes."""
        self._check(task, duration_ns)
        self._duration_ns[task] = duration_ns
        self._provenance[task] = PROVENANCES.index(provenance)
        if spread is not None:
            self._spread[task] = spread
        if call is not None:
            self._call[task] = self._add_call(call)
        self._touched.add(task)

    def scale(
        self, task: int, factor: float, provenance: Provenance, *, spread: float | None = None
    ) -> None:
        """Multiply the duration of `task`."""
        self._check(task)
        scaled = float(self._duration_ns[task]) * factor
        self.set_duration(task, scaled, provenance, spread=spread)

    def set_gap(self, task: int, gap_ns: float) -> None:
        """Let the lane do something untracked for so long after `task`."""
        self._check(task, gap_ns)
        self._gap_ns[task] = gap_ns
        self._touched.add(task)

    def remove(self, task: int) -> None:
        """Take `task` and the gap after it away; what waited for it waits for its own causes."""
        self._check(task)
        if self._reordered:
            raise GraphError("tasks were reordered in this edit", remedy="apply it, then remove")
        self._removed.add(task)
        self._touched.add(task)

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
        self._check(task, duration_ns, gap_ns)
        self._inserts += 1
        row: dict[str, object] = {
            "name": self._strings.add(name),
            "call": -1 if call is None else self._add_call(call),
            "duration_ns": duration_ns,
            "gap_ns": gap_ns,
            "spread": spread,
            "provenance": PROVENANCES.index(provenance),
            "kind": int(kind),
            "sequence": sequence,
        }
        if lane >= 0:
            row["lane"] = lane
        tensors = 0 if call is None else len(call.inputs) + len(call.outputs)
        if len(storages) not in (0, tensors):
            raise GraphError(f"{len(storages)} storages for {tensors} tensors of {name}")
        self._given[id(row)] = storages
        handle = len(self._graph) + self._inserts - 1
        self._inserted.setdefault((0 if before else 1, task), []).append((handle, row))
        return handle

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
        """
        for task in (source, target):
            self._check_reference(task)
        self._connected.append((source, target, int(kind), delay_ns, lag))

    def exchange(self, row: Exchange) -> None:
        """Add a row to the table of what is communicated; its tasks may be what `insert` gave."""
        self._exchanges.append(row)

    def repeat(self, task: int, where: int, *, before: bool = False) -> int:
        """Put another run of `task`, as it is now, right after (or before) `where`, in its phase.

        Returns:
            A handle, as `insert`.
        """
        self._check(task)
        handle = self.insert(
            where,
            self._graph.string(int(self._graph.tasks.name[task])),
            float(self._duration_ns[task]),
            PROVENANCES[self._provenance[task]],
            before=before,
            gap_ns=float(self._gap_ns[task]),
            spread=float(self._spread[task]),
            kind=Kind(int(self._graph.tasks.kind[task])),
        )
        _, row = self._inserted[(0 if before else 1, where)][-1]
        row["call"] = int(self._call[task])
        for name in ("scope", "module", "source"):
            row[name] = int(getattr(self._graph.tasks, name)[task])
        self._repeated[id(row)] = task
        return handle

    def select(
        self,
        *,
        op: str | None = None,
        module: str | None = None,
        source: str | None = None,
        phase: str | None = None,
        kind: str | None = None,
        where: Callable[[int], bool] | None = None,
    ) -> Selection:
        """Tasks by what they are; see `slipstream.graph.select.matching`.

        Raises:
            InvalidArgumentError: no such phase or kind.
        """
        found = matching(
            self._graph, op=op, module=module, source=source, phase=phase, kind=kind, where=where
        )
        return Selection(self, found)

    def reorder(self, order: NDArray[np.int64]) -> None:
        """Put the tasks in another order; each lane runs its own in the order of the graph.

        Args:
            order: int64 [tasks], every task once.

        Raises:
            GraphError: a task is missing or there twice, or tasks were removed in this edit.
        """
        if not np.array_equal(np.sort(order), np.arange(len(self._graph))):
            raise GraphError("an order names every task once")
        if self._removed:
            raise GraphError("tasks were removed in this edit", remedy="apply it, then reorder")
        order = np.array(order, np.int64)
        self._touched.update(order[order != self._order].tolist())
        self._order, self._reordered = order, True

    def resize(self, allocation: int, nbytes: int) -> None:
        """Let `allocation`, an index in the graph's memory or a new one's handle, be as large."""
        self._check_allocation(allocation)
        if allocation < len(self._nbytes):
            self._nbytes[allocation] = _whole(nbytes)
        else:
            self._allocated[allocation - len(self._nbytes)]["nbytes"] = _whole(nbytes)

    def release_after(self, allocation: int, task: int) -> None:
        """Free `allocation` after `task` (an index, or what `insert` gave); -1: not in the step."""
        self._check_allocation(allocation)
        self._check_reference(task)
        if allocation < len(self._release):
            self._release[allocation] = task
        else:
            self._allocated[allocation - len(self._release)]["release"] = task

    def allocate(
        self, nbytes: int, role: Role, producer: int, release: int, storage: int = -1
    ) -> int:
        """Let task `producer` allocate memory that is freed after task `release`.

        Tasks are indices or what `insert` gave; -1: before the step, or not within it.

        Returns:
            A handle for `resize` and `release_after`.
        """
        self._check_reference(producer)
        self._check_reference(release)
        self._allocated.append(
            {
                "nbytes": _whole(nbytes), "storage": storage, "role": int(role),
                "producer": producer, "release": release,
            }
        )  # fmt: skip
        return len(self._nbytes) + len(self._allocated) - 1

    def apply(self, what: str) -> Graph:
        """The edited copy, with one `Edit` that says `what` was done."""
        graph = self._graph
        order, new_index, rows = self._placed()
        edited = replace(
            graph.tasks,
            duration_ns=self._duration_ns,
            gap_ns=self._gap_ns,
            spread=self._spread,
            provenance=self._provenance,
            call=self._call,
        ).take(order)
        columns = edited.columns()
        for place, row in rows.items():
            for name, value in row.items():
                columns[name][place] = value
        starts, operands = self._operands(order, rows)
        return replace(
            graph,
            tasks=edited,
            edges=self._edges(new_index),
            lanes=tuple(self._lanes),
            exchanges=self._renumbered(new_index),
            memory=self._remapped(new_index, order),
            strings=self._strings.freeze(),
            calls=tuple(self._calls),
            shrunk=self._shrunk(),
            operand_start=starts,
            operands=operands,
            edits=(*graph.edits, Edit(self._technique, what, len(self._touched) + len(rows))),
        )

    def _placed(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, dict[str, object]]]:
        """Where tasks stand in the edited graph.

        Returns:
            Of each task there the recorded one that it is or was put in beside; of each recorded
            or inserted one its place, -1 if removed; and the rows of inserted ones by place.
        """
        n = len(self._graph)
        order = self._order
        if self._removed:
            gone = np.zeros(n, bool)
            gone[list(self._removed)] = True
            order = order[~gone[order]]
        handles, rows = order, {}
        if self._inserted:
            place = np.empty(n, np.int64)
            place[self._order] = np.arange(n)
            # Three places for each recorded task: what is before it, itself, what is after it.
            keys, beside = [3 * place[order] + 1], [order]
            added: list[int] = []
            row_of: dict[int, dict[str, object]] = {}
            for (side, task), inserted in self._inserted.items():
                for handle, row in inserted:
                    added.append(handle)
                    row_of[handle] = row
                keys.append(np.full(len(inserted), 3 * place[task] + 2 * side, np.int64))
                beside.append(np.full(len(inserted), task, np.int64))
            by_place = np.argsort(np.concatenate(keys), kind="stable")
            handles = np.concatenate([order, np.array(added, np.int64)])[by_place]
            order = np.concatenate(beside)[by_place]
            rows = {
                place: row_of[handle]
                for place, handle in enumerate(handles.tolist())
                if handle >= n
            }
        new_index = np.full(n + self._inserts, -1, np.int64)
        new_index[handles] = np.arange(len(handles))
        return order, new_index, rows

    def _check(self, task: int, *times_ns: float) -> None:
        if not 0 <= task < len(self._order):
            raise GraphError(f"there is no task {task} among {len(self._order)}")
        for time_ns in times_ns:
            if not np.isfinite(time_ns) or time_ns < 0:
                raise GraphError(f"task {task} cannot take {time_ns} ns")

    def _check_reference(self, task: int) -> None:
        count = len(self._graph) + self._inserts
        if not -1 <= task < count:
            raise GraphError(f"there is no task {task} among {count}")

    def _check_allocation(self, allocation: int) -> None:
        count = len(self._nbytes) + len(self._allocated)
        if not 0 <= allocation < count:
            raise GraphError(f"there is no allocation {allocation} among {count}")

    def _add_call(self, call: Call) -> int:
        self._calls.append(call)
        return len(self._calls) - 1

    def _shrunk(self) -> tuple[Call | None, ...]:
        """The recorded calls' other forms; nothing is known of a call that was added."""
        recorded = self._graph.shrunk
        added = len(self._calls) - len(self._graph.calls)
        return (*recorded, *[None] * added) if recorded else ()

    def _operands(
        self, order: NDArray[np.int64], rows: dict[int, dict[str, object]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        graph = self._graph
        if not rows:
            return graph.gathered(order)
        # The task whose operands each has; a new one that repeats none has its own.
        like, own = order.copy(), {}
        for place, row in rows.items():
            like[place] = self._repeated.get(id(row), -1)
            if like[place] < 0:
                own[place] = np.array(self._given[id(row)], np.int32)
        return graph.gathered(like, own)

    def _remapped(self, new_index: NDArray[np.int64], order: NDArray[np.int64]) -> Allocations:
        """The allocations with tasks numbered as in the edited graph.

        What a removed task allocated goes with it, unless a kept task uses it: then the next task
        on the lane allocates it. What a removed task freed is freed after the task before it, or
        by what was put in its place.
        """
        changed = {"nbytes": self._nbytes, "release": self._release}
        recorded = {**self._graph.memory.columns(), **changed}
        memory = Allocations.of(
            *(
                np.concatenate([column, np.array([row[name] for row in self._allocated], np.int64)])
                for name, column in recorded.items()
            )
        )
        if not self._removed or not len(memory):
            numbers = np.append(new_index, -1)  # -1 stays -1
            return replace(
                memory,
                producer=numbers[memory.producer].astype(np.int32),
                release=numbers[memory.release].astype(np.int32),
            )
        return _Heirs(self._graph, self._removed, new_index, order).hand_on(memory)

    def _edges(self, new_index: NDArray[np.int64]) -> Edges:
        """Edges between kept tasks, and from what a removed task waited for to what waited.

        What comes before and after it on its own lane counts among them: a kernel that others
        synchronise with hands that on to the kernel before it.
        """
        edges = self._graph.edges
        if len(edges):
            kept = _Links(edges, self._graph.tasks.lane, self._removed).bridged()
            source, target = new_index[kept.source], new_index[kept.target]
            edges = replace(kept, source=source.astype(np.int32), target=target.astype(np.int32))
        if not self._connected:
            return edges
        columns = [list(column) for column in zip(*self._connected, strict=True)]
        added = Edges(
            new_index[np.array(columns[0])].astype(np.int32),
            new_index[np.array(columns[1])].astype(np.int32),
            np.array(columns[2], np.uint8),
            np.array(columns[3], np.float64),
            np.array(columns[4], np.uint8),
        )
        there = (added.source >= 0) & (added.target >= 0)
        names = ("source", "target", "kind", "delay_ns", "lag")
        return Edges(
            *(np.concatenate([getattr(edges, n), getattr(added, n)[there]]) for n in names)
        )

    def _renumbered(self, new_index: NDArray[np.int64]) -> tuple[Exchange, ...]:
        """The exchanges whose task is still there, in its order."""
        numbers = np.append(new_index, -1)
        moved = [
            replace(
                row,
                task=int(numbers[row.task]),
                ready=int(numbers[row.ready]),
                awaited=int(numbers[row.awaited]),
            )
            for row in self._exchanges
        ]
        return tuple(sorted((row for row in moved if row.task >= 0), key=lambda row: row.task))


def _whole(nbytes: int) -> int:
    if nbytes < 0:
        raise GraphError(f"an allocation cannot have {nbytes} bytes")
    return int(nbytes)


class _Heirs:
    """Who allocates and frees what removed tasks did.

    Args:
        new_index: int64 [tasks and inserted ones], their numbers in the edited graph.
        order: int64 [edited tasks], the task each stands for or was put in beside.
    """

    def __init__(
        self,
        graph: Graph,
        removed: set[int],
        new_index: NDArray[np.int64],
        order: NDArray[np.int64],
    ) -> None:
        self._graph = graph
        self._new_index = new_index
        self._anchor = order
        self._gone = np.zeros(len(new_index) + 1, bool)  # -1 is not a task
        self._gone[list(removed)] = True

    def hand_on(self, memory: Allocations) -> Allocations:
        """`memory` of the edited graph."""
        orphans = np.flatnonzero(self._gone[memory.producer])
        needed = np.ones(len(memory), bool)
        needed[orphans] = self._needed(memory.take(orphans))
        kept = memory.take(np.flatnonzero(needed))
        producer, release = self._after(kept.producer), self._before(kept.release)
        release = np.where(kept.release >= 0, np.maximum(release, producer), -1)
        return replace(kept, producer=producer.astype(np.int32), release=release.astype(np.int32))

    def _needed(self, orphans: Allocations) -> NDArray[np.bool_]:
        """Whether a kept task uses what these, whose producers are removed, hold."""
        graph, release, storage = self._graph, orphans.release, orphans.storage.astype(np.int64)
        wanted = np.zeros(max(graph.operands.max(initial=-1), storage.max(initial=-1)) + 2, bool)
        wanted[storage[storage >= 0]] = True
        found = np.flatnonzero(wanted[graph.operands])
        users = np.searchsorted(graph.operand_start, found, side="right") - 1
        # In ascending order, with room for every task behind each storage.
        room = len(graph) + 1
        uses = graph.operands[found].astype(np.int64) * room + users
        uses = np.sort(uses[~self._gone[users]])
        # A storage's number is used again once it is freed: only uses while it lives count.
        first = np.searchsorted(uses, storage * room + orphans.producer, side="left")
        last = np.searchsorted(uses, storage * room + release, side="right")
        unknown = ~self._gone[release] & (release != orphans.producer)
        return (release < 0) | np.where(storage < 0, unknown, first < last)

    def _after(self, tasks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Their numbers; of removed ones that of the next on the lane, or else of the last."""
        return self._numbers(tasks, "left", 0)

    def _before(self, tasks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Their numbers; of removed ones that of the one before on the lane, or of the first."""
        return self._numbers(tasks, "right", -1)

    def _numbers(
        self, tasks: NDArray[np.int32], side: Literal["left", "right"], step: int
    ) -> NDArray[np.int64]:
        numbers = np.append(self._new_index, -1)[tasks]  # -1 stays -1
        gone = np.flatnonzero(self._gone[tasks])
        lane_of = self._graph.tasks.lane
        for one in np.unique(lane_of[tasks[gone]]):
            here = gone[lane_of[tasks[gone]] == one]
            lane = np.flatnonzero(lane_of[self._anchor] == one)
            place = np.searchsorted(self._anchor[lane], tasks[here], side=side) + step
            numbers[here] = lane[np.clip(place, 0, len(lane) - 1)] if len(lane) else -1
        return numbers


_Edge = tuple[int, int, int, float, int]


class _Links:
    """The edges at tasks that are to be removed, taken away one task at a time."""

    def __init__(self, edges: Edges, lane: NDArray[np.int32], removed: set[int]) -> None:
        gone = np.zeros(len(lane), bool)
        gone[list(removed)] = True
        self._touched = gone[edges.source] | gone[edges.target]
        self._edges = edges
        self._removed = sorted(removed)
        self._into: dict[int, list[_Edge]] = {}
        self._from: dict[int, list[_Edge]] = {}
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}
        for e in np.flatnonzero(self._touched):
            self._add(
                (
                    int(edges.source[e]), int(edges.target[e]), int(edges.kind[e]),
                    float(edges.delay_ns[e]), int(edges.lag[e]),
                )
            )  # fmt: skip
        for number in np.unique(lane):
            members = np.flatnonzero(lane == number).tolist()
            for earlier, later in itertools.pairwise(members):
                self._before[later], self._after[earlier] = earlier, later

    def _add(self, edge: _Edge) -> None:
        self._from.setdefault(edge[0], []).append(edge)
        self._into.setdefault(edge[1], []).append(edge)

    def bridged(self) -> Edges:
        """The edges without the removed tasks."""
        for task in self._removed:
            self._take_away(task)
        extra = [edge for found in self._from.values() for edge in found]
        columns = [[edge[column] for edge in extra] for column in range(5)]
        edges, keep = self._edges, ~self._touched
        return Edges(
            np.concatenate([edges.source[keep], np.array(columns[0], np.int32)]),
            np.concatenate([edges.target[keep], np.array(columns[1], np.int32)]),
            np.concatenate([edges.kind[keep], np.array(columns[2], np.uint8)]),
            np.concatenate([edges.delay_ns[keep], np.array(columns[3], np.float64)]),
            np.concatenate([edges.lag[keep], np.array(columns[4], np.uint8)]),
        )

    def _take_away(self, task: int) -> None:
        causes = [edge for edge in self._into.pop(task, []) if edge[0] != task]
        effects = [edge for edge in self._from.pop(task, []) if edge[1] != task]
        for edge in causes:
            self._from[edge[0]].remove(edge)
        for edge in effects:
            self._into[edge[1]].remove(edge)
        before, after = self._before.pop(task, -1), self._after.pop(task, -1)
        for source, _, in_kind, in_delay, in_lag in causes:
            for _, target, kind, delay, lag in effects:
                # Two steps of lag are more than an edge can say; one is the stricter.
                self._add((source, target, kind, in_delay + delay, in_lag | lag))
            if after >= 0:
                self._add((source, after, in_kind, in_delay, in_lag))
        if before >= 0:
            for _, target, kind, delay, lag in effects:
                self._add((before, target, kind, delay, lag))
            self._after.pop(before, None)
        if after >= 0:
            self._before.pop(after, None)
            if before >= 0:
                self._before[after], self._after[before] = before, after
