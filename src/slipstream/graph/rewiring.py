"""Tasks that read and write other storages than recorded, or are taken out: what follows.

Who allocates, frees and waits for what in place of a removed task, and how long memory lives where
others use it.
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
    """(input, output) of each output that the schema says is an input the call writes in place."""
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
    """(input, output) of each output of `call` that lies in one of its inputs' storages.

    Args:
        recorded: whether the task makes the call it was recorded with: then a view, too, shows in
            its storages. Else its schema tells what it writes in place.
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
    given: bool,
) -> list[int]:
    """Storages of the inputs and then of the outputs of `task`, with its `aliases` as they were.

    Args:
        given: whether `outputs` were asked for; else they follow the inputs they lie in.

    Raises:
        GraphError: not one storage for each tensor, an output that leaves the input it lies in, or
            one that comes to lie in an input though the call makes a new tensor.
    """
    for tensors, storages, word in (
        (call.inputs, inputs, "inputs"),
        (call.outputs, outputs, "outputs"),
    ):
        if len(storages) != len(tensors):
            raise GraphError(f"{len(storages)} storages for {len(tensors)} {word} of {call.name}")
    resolved = list(outputs)
    for i, j in aliases:
        if given and resolved[j] != inputs[i]:
            raise GraphError(
                f"output {j} of task {task} ({call.name}) lies in its input {i}: "
                f"storage {inputs[i]}, not {resolved[j]}",
                remedy="give it a call that does not work in place, or the same storage for both",
            )
        resolved[j] = inputs[i]
    aliased = {j for _, j in aliases}
    for j, storage in enumerate(resolved):
        if j not in aliased and storage >= 0 and storage in inputs:
            raise GraphError(
                f"output {j} of task {task} ({call.name}) is a new tensor, "
                f"and storage {storage} holds its input {list(inputs).index(storage)}"
            )
    return [*inputs, *resolved]


@dataclass(frozen=True)
class Rewired:
    """A graph with other operands for some tasks.

    Attributes:
        graph: with those operands; its allocations are those recorded, with other lifetimes.
        needed: bool [allocations], false where nothing uses what is allocated any more.
        added: what is allocated beside them, for outputs in storages of which nothing was known.
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
    """`graph` with these operands by task, and memory that lives as long as they are in use.

    An allocation that was freed after its last user still is; one that was kept longer is kept as
    long, or until its last user where that is later. What nothing uses any more is not allocated,
    and what another task makes now is allocated by that one.

    Args:
        operands: by task: the storages of its call's inputs and outputs.
        calls: by the same tasks: the calls they make.
        removed: bool [tasks], those that are taken out and use nothing.

    Raises:
        GraphError: a task reads a storage that nothing makes any more.
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
                if _makes(after, calls, now[0], storage):
                    producer[row] = now[0]
                elif born not in gone:
                    raise GraphError(
                        f"task {now[0]} reads storage {storage}, which nothing makes any more",
                        remedy=f"give it the storage that task {born} writes now",
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
    """By storage the tasks that have it among their operands, ascending, each once."""
    wanted = np.isin(graph.operands, list(storages))
    task = np.repeat(np.arange(len(graph)), np.diff(graph.operand_start))[wanted].tolist()
    users: dict[int, dict[int, None]] = {storage: {} for storage in storages}
    for storage, user in zip(graph.operands[wanted].tolist(), task, strict=True):
        users[storage][user] = None
    return {storage: list(tasks) for storage, tasks in users.items()}


def _lives(memory: Allocations, storage: int, tasks: int) -> Iterator[tuple[int, int, int]]:
    """Each allocation of `storage`, and the tasks between which the number can only mean it."""
    rows = np.flatnonzero(memory.storage == storage)
    rows = rows[np.argsort(memory.producer[rows], kind="stable")].tolist()
    for place, row in enumerate(rows):
        earlier = int(memory.release[rows[place - 1]]) if place else -1
        later = int(memory.producer[rows[place + 1]]) if place + 1 < len(rows) else tasks
        yield row, earlier, later


def _makes(graph: Graph, calls: Mapping[int, Call], task: int, storage: int) -> bool:
    """Whether `task` returns a tensor in `storage`."""
    call = calls.get(task) or graph.task(task).call
    return call is not None and storage in graph.storages(task)[len(call.inputs) :]


Edge = tuple[int, int, int, float, int]


class Heirs:
    """Who allocates and frees what removed tasks did.

    Args:
        removed: bool [tasks].
        new_index: int64 [tasks and inserted ones], their numbers in the edited graph.
        order: int64 [edited tasks], the task each stands for or was put in beside.
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
        positions = np.flatnonzero(wanted[graph.operands])
        users = np.searchsorted(graph.operand_start, positions, side="right") - 1
        # In ascending order, with room for every task behind each storage.
        room = len(graph) + 1
        uses = graph.operands[positions].astype(np.int64) * room + users
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


class Links:
    """The edges at tasks that are to be removed, taken away one task at a time."""

    def __init__(self, edges: Edges, lane: NDArray[np.int32], removed: NDArray[np.bool_]) -> None:
        self._touched = removed[edges.source] | removed[edges.target]
        self._edges = edges
        self._removed = np.flatnonzero(removed).tolist()
        self._into: dict[int, list[Edge]] = {}
        self._from: dict[int, list[Edge]] = {}
        # By task the one before it on its lane, and the one after; -1 where there is none.
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
        """The edges without the removed tasks."""
        for task in self._removed:
            self._take_away(task)
        extra = [edge for edges in self._from.values() for edge in edges]
        kept = self._edges.take(np.flatnonzero(~self._touched))
        return kept.joined(Edges.of(*zip(*extra, strict=True))) if extra else kept

    def _take_away(self, task: int) -> None:
        causes = [edge for edge in self._into.pop(task, []) if edge[0] != task]
        effects = [edge for edge in self._from.pop(task, []) if edge[1] != task]
        for edge in causes:
            self._from[edge[0]].remove(edge)
        for edge in effects:
            self._into[edge[1]].remove(edge)
        before, after = int(self._before[task]), int(self._after[task])
        for source, _, in_kind, in_delay, in_lag in causes:
            for _, target, kind, delay, lag in effects:
                # Two steps of lag are more than an edge can say; one is the stricter.
                self._add((source, target, kind, in_delay + delay, in_lag | lag))
            if after >= 0:
                self._add((source, after, in_kind, in_delay, in_lag))
        if before >= 0:
            for _, target, kind, delay, lag in effects:
                self._add((before, target, kind, delay, lag))
            self._after[before] = after
        if after >= 0:
            self._before[after] = before
