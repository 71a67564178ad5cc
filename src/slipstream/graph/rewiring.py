"""Consequences of changed operands and removed tasks for memory and dependencies.

Reassigns the allocations, frees and dependencies of removed tasks, and updates the lifetimes of
memory that other tasks use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.graph.call import Call, TensorSpec
from slipstream.graph.values import Allocations, Edges, Role

if TYPE_CHECKING:
    from slipstream.graph.graph import Graph

_WRITTEN = re.compile(r"\(([a-z]+)!\)")


def written_aliases(call: Call) -> list[tuple[int, int]]:
    """Return (input, output) pairs of the inputs that the call writes in place by its schema."""
    schema, _, returned = call.op.rpartition("->")
    parameters = schema.partition("(")[2].replace("*, ", "").split(", ")
    names = [_WRITTEN.search(text) for text in returned.split(", ")]
    pairs, position = [], 0
    for text, argument in zip(parameters, call.arguments, strict=False):
        mark = _WRITTEN.search(text)
        if isinstance(argument, TensorSpec) and mark is not None:
            outputs = (j for j, name in enumerate(names) if name and name[1] == mark[1])
            pairs += [(position, j) for j in outputs if j < len(call.outputs)]
        position += len(Call(call.op, (argument,)).inputs)
    return pairs


def aliases_of(graph: Graph, task: int, call: Call, *, recorded: bool) -> list[tuple[int, int]]:
    """Return (input, output) pairs of `call` that share a storage.

    Args:
        recorded: whether `call` is the recorded one, so that the recorded storages also show
            views. Else only the in-place writes of its schema count.
    """
    storages = graph.storages(task).tolist()
    inputs = len(call.inputs)
    if not recorded or len(storages) != inputs + len(call.outputs):
        return written_aliases(call)
    return [
        (storages.index(storage), number)
        for number, storage in enumerate(storages[inputs:])
        if storage >= 0 and storage in storages[:inputs]
    ]


def checked_operands(
    task: int,
    call: Call,
    aliases: Sequence[tuple[int, int]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    explicit: bool,
) -> list[int]:
    """Return the storages of the inputs, then outputs of `task`, with its `aliases` preserved.

    Args:
        explicit: whether the caller specified `outputs`; else outputs that share the storage of
            an input follow it.

    Raises:
        GraphError: the number of storages is not the number of tensors, an output would no longer
            share the storage of its input, or a new tensor would share that of an input.
    """
    for tensors, storages, word in (
        (call.inputs, inputs, "inputs"),
        (call.outputs, outputs, "outputs"),
    ):
        if len(storages) != len(tensors):
            raise GraphError(f"{len(storages)} storages for {len(tensors)} {word} of {call.name}")
    resolved = list(outputs)
    for i, j in aliases:
        if explicit and resolved[j] != inputs[i]:
            raise GraphError(
                f"output {j} of task {task} ({call.name}) shares the storage of its input {i}: "
                f"storage {inputs[i]}, not {resolved[j]}",
                remedy="use a call that does not work in place, or the same storage for both",
            )
        resolved[j] = inputs[i]
    aliased = {j for _, j in aliases}
    for j, storage in enumerate(resolved):
        if j not in aliased and storage >= 0 and storage in inputs:
            raise GraphError(
                f"output {j} of task {task} ({call.name}) is a new tensor, "
                f"but storage {storage} holds its input {list(inputs).index(storage)}"
            )
    return [*inputs, *resolved]


@dataclass(frozen=True)
class Rewired:
    """A graph with other operands for some tasks.

    Attributes:
        graph: the graph with those operands and updated lifetimes of its recorded allocations.
        needed: bool [allocations], whether any task still uses the allocation.
        added: additional allocations, for outputs in storages without a recorded allocation.
    """

    graph: Graph
    needed: NDArray[np.bool_]
    added: Allocations


def rewired(
    graph: Graph,
    operands: Mapping[int, Sequence[int]],
    calls: Mapping[int, Call],
    removed: NDArray[np.bool_],
) -> Rewired:
    """Return `graph` with other operands of some tasks, and updated lifetimes of memory.

    An allocation that was freed after its last user still is; one that was freed later is freed at
    the same task, or after its last user if that is later. Unused allocations are dropped, and an
    allocation that another task now makes begins with that task.

    Args:
        operands: the storages of the inputs and outputs of calls, by task.
        calls: the calls of the same tasks.
        removed: bool [tasks], whether the task is removed and uses nothing.

    Raises:
        GraphError: a task reads a storage that no task writes any more.
    """
    order = np.arange(len(graph))
    order[list(operands)] = -1
    starts, column = graph.gathered(
        order, {task: np.array(storages, np.int32) for task, storages in operands.items()}
    )
    after = replace(graph, operand_start=starts, operands=column)
    memory = graph.memory
    if not len(memory):
        return Rewired(after, np.ones(0, bool), Allocations.none())
    changed = {s for task, storages in operands.items() for s in storages}
    changed |= {s for task in operands for s in graph.storages(task).tolist()}
    changed -= {-1, *graph.parameters.tolist()}
    users, present = _users(graph, changed), _users(after, changed)
    gone = set(np.flatnonzero(removed).tolist())
    producer, release = memory.producer.copy(), memory.release.copy()
    needed = np.ones(len(memory), bool)
    for storage in sorted(changed):
        remaining = [task for task in present[storage] if task not in gone]
        for row, begin, end in _lives(memory, storage, len(graph)):
            born, freed = int(memory.producer[row]), int(memory.release[row])
            until = freed if freed >= 0 else len(graph)
            before = [task for task in users[storage] if max(born, 0) <= task <= until]
            now = [task for task in remaining if begin < task < end]
            if now == before:
                continue
            if not now:
                needed[row] = born < 0 or born in gone or not before
                continue
            if born >= 0 and born not in now:
                if _writes(after, calls, now[0], storage):
                    producer[row] = now[0]
                elif born not in gone:
                    raise GraphError(
                        f"task {now[0]} reads storage {storage}, which no task writes any more",
                        remedy=f"pass the storage that task {born} writes now",
                    )
            if freed >= 0:
                last = max(now[-1], int(producer[row]))
                release[row] = last if freed == max([born, *before]) else max(freed, last)
    edited = replace(memory, producer=producer, release=release)
    fresh = [
        (spec.nbytes, storage, int(Role.ACTIVATION), task, max([*present[storage], task]))
        for task, storages in sorted(operands.items())
        for spec, storage in zip(
            calls[task].outputs, storages[len(calls[task].inputs) :], strict=True
        )
        if storage in changed
        and storage not in memory.storage
        and storage not in storages[: len(calls[task].inputs)]
        and min(present[storage]) == task
    ]
    return Rewired(
        replace(after, memory=edited), needed,
        Allocations.of(*zip(*fresh, strict=True)) if fresh else Allocations.none(),
    )  # fmt: skip


def _users(graph: Graph, storages: set[int]) -> dict[int, list[int]]:
    """Return the distinct tasks that have each storage among their operands, ascending."""
    used = np.isin(graph.operands, list(storages))
    task = np.repeat(np.arange(len(graph)), np.diff(graph.operand_start))[used].tolist()
    users: dict[int, dict[int, None]] = {storage: {} for storage in storages}
    for storage, user in zip(graph.operands[used].tolist(), task, strict=True):
        users[storage][user] = None
    return {storage: list(tasks) for storage, tasks in users.items()}


def _lives(memory: Allocations, storage: int, tasks: int) -> Iterator[tuple[int, int, int]]:
    """Yield each allocation of `storage`, and the tasks between which the id refers to it."""
    rows = np.flatnonzero(memory.storage == storage)
    rows = rows[np.argsort(memory.producer[rows], kind="stable")].tolist()
    for place, row in enumerate(rows):
        earlier = int(memory.release[rows[place - 1]]) if place else -1
        later = int(memory.producer[rows[place + 1]]) if place + 1 < len(rows) else tasks
        yield row, earlier, later


def _writes(graph: Graph, calls: Mapping[int, Call], task: int, storage: int) -> bool:
    """Whether an output of `task` is in `storage`."""
    call = calls.get(task) or graph.task(task).call
    return call is not None and storage in graph.storages(task)[len(call.inputs) :]


Edge = tuple[int, int, int, float, int]


class AllocationReassigner:
    """Reassignment of removed tasks' allocations.

    Args:
        removed: bool [tasks].
        new_index: int64 [tasks and inserted ones], their numbers in the edited graph.
        order: int64 [edited tasks], the recorded task, or that next to which it was inserted.
    """

    def __init__(
        self,
        graph: Graph,
        removed: NDArray[np.bool_],
        new_index: NDArray[np.int64],
        order: NDArray[np.int64],
    ) -> None:
        self._graph = graph
        self._new_index = new_index
        self._anchor = order
        self._gone = np.zeros(len(new_index) + 1, bool)  # -1 is not a task
        self._gone[: len(removed)] = removed

    def reassigned(self, memory: Allocations, freed: NDArray[np.int32]) -> Allocations:
        """Return `memory` with tasks of the edited graph.

        Args:
            freed: int32 [allocations], the tasks that freed them in the recorded step. Another
                allocation may have the number of the storage after that.
        """
        orphans = np.flatnonzero(self._gone[memory.producer])
        needed = np.ones(len(memory), bool)
        needed[orphans] = self._needed(replace(memory, release=freed).take(orphans))
        memory = memory.take(np.flatnonzero(needed))
        producer, release = self._after(memory.producer), self._before(memory.release)
        release = np.where(memory.release >= 0, np.maximum(release, producer), -1)
        return replace(memory, producer=producer.astype(np.int32), release=release.astype(np.int32))

    def _needed(self, orphans: Allocations) -> NDArray[np.bool_]:
        """Return whether a remaining task uses each allocation whose producer is removed."""
        graph, release, storage = self._graph, orphans.release, orphans.storage.astype(np.int64)
        orphaned = np.zeros(max(graph.operands.max(initial=-1), storage.max(initial=-1)) + 2, bool)
        orphaned[storage[storage >= 0]] = True
        positions = np.flatnonzero(orphaned[graph.operands])
        users = np.searchsorted(graph.operand_start, positions, side="right") - 1
        # Keys by storage and then by task, ascending.
        room = len(graph) + 1
        uses = graph.operands[positions].astype(np.int64) * room + users
        uses = np.sort(uses[~self._gone[users]])
        # The number of a freed storage is reused: only uses during the lifetime count.
        first = np.searchsorted(uses, storage * room + orphans.producer, side="left")
        last = np.searchsorted(uses, storage * room + release, side="right")
        unknown = ~self._gone[release] & (release != orphans.producer)
        return (release < 0) | np.where(storage < 0, unknown, first < last)

    def _after(self, tasks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return their numbers; if removed, that of the next task on the lane, or of the last."""
        return self._numbers(tasks, "left", 0)

    def _before(self, tasks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return their numbers; if removed, that of the last on the lane before, or the first."""
        return self._numbers(tasks, "right", -1)

    def _numbers(
        self, tasks: NDArray[np.int32], side: Literal["left", "right"], step: int
    ) -> NDArray[np.int64]:
        numbers = np.append(self._new_index, -1)[tasks]  # -1 stays -1
        gone = np.flatnonzero(self._gone[tasks])
        lane_of = self._graph.tasks.lane
        for lane in np.unique(lane_of[tasks[gone]]):
            rows = gone[lane_of[tasks[gone]] == lane]
            remaining = np.flatnonzero(lane_of[self._anchor] == lane)
            place = np.searchsorted(self._anchor[remaining], tasks[rows], side=side) + step
            last = len(remaining) - 1
            numbers[rows] = remaining[np.clip(place, 0, last)] if len(remaining) else -1
        return numbers


class Links:
    """The edges of tasks to be removed, bridged task by task."""

    def __init__(self, edges: Edges, lane: NDArray[np.int32], removed: NDArray[np.bool_]) -> None:
        self._touched = removed[edges.source] | removed[edges.target]
        self._edges = edges
        self._removed = np.flatnonzero(removed).tolist()
        self._into: dict[int, list[Edge]] = {}
        self._from: dict[int, list[Edge]] = {}
        # By task the one before it on its lane, and the one after; -1 for none.
        self._before, self._after = np.full((2, len(lane)), -1)
        for e in np.flatnonzero(self._touched):
            self._add(
                (
                    int(edges.source[e]), int(edges.target[e]), int(edges.kind[e]),
                    float(edges.delay_ns[e]), int(edges.lag[e]),
                )
            )  # fmt: skip
        in_lanes = np.argsort(lane, kind="stable")
        earlier, later = in_lanes[:-1], in_lanes[1:]
        same = lane[earlier] == lane[later]
        self._before[later[same]], self._after[earlier[same]] = earlier[same], later[same]

    def _add(self, edge: Edge) -> None:
        self._from.setdefault(edge[0], []).append(edge)
        self._into.setdefault(edge[1], []).append(edge)

    def bridged(self) -> Edges:
        """Return the edges without the removed tasks."""
        for task in self._removed:
            self._bridge(task)
        extra = [edge for edges in self._from.values() for edge in edges]
        others = self._edges.take(np.flatnonzero(~self._touched))
        return others.joined(Edges.of(*zip(*extra, strict=True))) if extra else others

    def _bridge(self, task: int) -> None:
        causes = [edge for edge in self._into.pop(task, []) if edge[0] != task]
        effects = [edge for edge in self._from.pop(task, []) if edge[1] != task]
        for edge in causes:
            self._from[edge[0]].remove(edge)
        for edge in effects:
            self._into[edge[1]].remove(edge)
        before, after = int(self._before[task]), int(self._after[task])
        for source, _, in_kind, in_delay, in_lag in causes:
            for _, target, kind, delay, lag in effects:
                # An edge cannot have a lag of two steps; a lag of one is stricter.
                self._add((source, target, kind, in_delay + delay, in_lag | lag))
            if after >= 0:
                self._add((source, after, in_kind, in_delay, in_lag))
        if before >= 0:
            for _, target, kind, delay, lag in effects:
                self._add((before, target, kind, delay, lag))
            self._after[before] = after
        if after >= 0:
            self._before[after] = before
