"""Blocks of a recorded step whose forward can be recomputed, and the effect on memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Editor, Graph, Role, StepPhase, unique_in_order
from slipstream.graph.flow import flow_of
from slipstream.graph.graph import cached_per_graph
from slipstream.graph.uses import Spans, sorted_once, uses_of

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """Forward passes through modules that save tensors for the backward pass, in order.

    Attributes:
        module: name of each block's module.
        task, of: int64 [forward tasks], tasks ordered by block, and the block of each.
        last: int64 [blocks], last forward task.
        again: bool [forward tasks], whether it is recomputed: all up to the last that saves a
            tensor.
        resume: int64 [blocks], first backward task that reads a saved tensor; the block is
            recomputed before it.
        end: int64 [blocks], last backward task that reads a saved tensor.
        saved: int64 [blocks], number of saved tensors; one saved by two operators counts twice.
    """

    module: tuple[str, ...]
    task: _Numbers
    of: _Numbers
    last: _Numbers
    again: NDArray[np.bool_]
    resume: _Numbers
    end: _Numbers
    saved: _Numbers

    def __len__(self) -> int:
        return len(self.module)


@cached_per_graph
def find_blocks(graph: Graph, modules: tuple[str, ...]) -> Blocks:
    """Return the passes through `modules` that save tensors for the backward pass, in order."""
    nodes = nodes_of(graph)
    module, task, of = _forward_runs(graph, modules, nodes.passes)
    count = len(module)
    begin, end = (
        np.searchsorted(of, np.arange(count)),
        np.searchsorted(of, np.arange(count), "right"),
    )
    last = task[end - 1] if count else np.empty(0, np.int64)
    reads = _Reads.of(graph, nodes, task, of, last)
    saved = np.bincount(reads.block, minlength=count)
    # An operator runs up to its saved result; if it only saves inputs, it need not run itself.
    length = np.zeros(count, np.int64)
    np.maximum.at(length, reads.block, reads.forward - begin[reads.block] + reads.made)
    resume, latest = np.full(count, len(graph)), np.full(count, -1)
    np.minimum.at(resume, reads.block, nodes.first[reads.node])
    np.maximum.at(latest, reads.block, nodes.last[reads.node])
    chosen = length > 0
    number = np.cumsum(chosen) - 1
    in_block = chosen[of]
    again = np.arange(len(task)) - begin[of] < length[of]
    return Blocks(
        tuple(name for name, saves in zip(module, chosen.tolist(), strict=True) if saves),
        task[in_block], number[of[in_block]], last[chosen], again[in_block],
        resume[chosen], latest[chosen], saved[chosen],
    )  # fmt: skip


def recomputed(graph: Graph, blocks: Blocks) -> NDArray[np.bool_]:
    """Return whether the recorded step recomputes each of `blocks`, bool [blocks].

    Then its backward pass repeats the calls of the block's forward, with the same inputs or
    recomputed ones. The last may be missing, since torch stops inside it. If fewer repeat, they
    gather sharded parameters.
    """
    views, call = flow_of(graph).views, graph.tasks.call
    chosen = blocks.again & (call[blocks.task] >= 0) & ~views[blocks.task]
    tasks, of = blocks.task[chosen], blocks.of[chosen]
    backward = (graph.tasks.phase == StepPhase.BACKWARD) & ~views & np.isin(call, call[tasks])
    repeats = {}
    for task in np.flatnonzero(backward).tolist():
        inputs, outputs = _operands(graph, task)
        repeats[int(call[task]), inputs] = outputs
    again: dict[int, int] = {}
    count = np.zeros(len(blocks), np.int64)
    for task, block in zip(tasks.tolist(), of.tolist(), strict=True):
        inputs, outputs = _operands(graph, task)
        key = int(call[task]), tuple(again.get(storage, storage) for storage in inputs)
        if key in repeats:
            count[block] += 1
            again.update(zip(outputs, repeats[key], strict=True))
    return count >= np.maximum(np.bincount(of, minlength=len(blocks)) - 1, 1)


def _operands(graph: Graph, task: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    storages = tuple(graph.storages(task).tolist())
    inputs = len(graph.calls[graph.tasks.call[task]].inputs)
    return storages[:inputs], storages[inputs:]


@dataclass(frozen=True)
class Nodes:
    """Autograd nodes: backward tasks of a pass with the same sequence number.

    Attributes:
        passes: int64 [tasks], number of completed backward passes.
        key: int64 [nodes], ascending: the pass and the sequence number.
        task, of: int64 [numbered backward tasks], tasks ordered by node, and the node of each.
        first, last: int64 [nodes], first and last task of each.
    """

    graph: Graph
    passes: _Numbers
    key: _Numbers
    task: _Numbers
    of: _Numbers
    first: _Numbers
    last: _Numbers

    def find(self, tasks: _Numbers) -> _Numbers:
        """Return the nodes with the sequence numbers and passes of `tasks`; -1 if there is none."""
        # The key of a task without a number is -1, which is not the key of any node.
        return _places_in(self.key, _key(self.graph, tasks, self.passes))

    def ends(self) -> _Numbers:
        """Return the task after which each task's inputs can be freed: the last of its node."""
        ends = np.arange(len(self.graph))
        ends[self.task] = self.last[self.of]
        return ends


def _key(graph: Graph, tasks: _Numbers, passes: _Numbers) -> _Numbers:
    sequence = graph.tasks.sequence
    room = int(sequence.max(initial=-1)) + 1
    return np.where(sequence[tasks] >= 0, passes[tasks] * room + sequence[tasks], -1)


@cached_per_graph
def nodes_of(graph: Graph) -> Nodes:
    """Return the autograd nodes of `graph`."""
    phase = graph.tasks.phase
    # A backward pass ends where the next forward starts.
    chosen = np.flatnonzero((phase == StepPhase.FORWARD) | (phase == StepPhase.BACKWARD))
    backward = phase[chosen] == StepPhase.BACKWARD
    begins = np.zeros(len(graph), np.int64)
    begins[chosen[1:][backward[:-1] & ~backward[1:]]] = 1
    passes = np.cumsum(begins)
    task = np.flatnonzero((phase == StepPhase.BACKWARD) & (graph.tasks.sequence >= 0))
    key = _key(graph, task, passes)
    order = np.argsort(key, kind="stable")
    task, key = task[order], key[order]
    new = np.append(True, key[1:] != key[:-1])[: len(key)]
    return Nodes(
        graph, passes, key[new], task, np.cumsum(new) - 1,
        task[new], task[np.append(new[1:], True)[: len(key)]],
    )  # fmt: skip


def _forward_runs(
    graph: Graph, modules: Sequence[str], passes: _Numbers
) -> tuple[list[str], _Numbers, _Numbers]:
    """Return the modules of contiguous runs of forward tasks, the tasks, and the run of each."""
    tasks = graph.tasks
    owner = np.full(len(graph.strings), -1)
    for number in unique_in_order(tasks.module, len(graph.strings)).tolist():
        name = graph.string(number)
        owners = (m for m, module in enumerate(modules) if f"{name}.".startswith(f"{module}."))
        owner[number] = next(owners, -1)
    task = np.flatnonzero(tasks.phase == StepPhase.FORWARD)
    within = owner[tasks.module[task]]
    key = np.stack([within, passes[task]])
    new = np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0))[: len(task)]
    inside = within >= 0
    of = np.cumsum(new & inside) - 1
    module = [modules[m] for m in within[new & inside].tolist()]
    return module, task[inside], of[inside]


@dataclass(frozen=True)
class _Reads:
    """Reads by the backward pass of tensors of a block's forward.

    Attributes:
        block: int64 [k], the block.
        forward: int64 [k], index among all forward tasks of the operator that saved the tensor.
        made: bool [k], whether that operator produced it.
        node: int64 [k], the node that reads it.
    """

    block: _Numbers
    forward: _Numbers
    made: NDArray[np.bool_]
    node: _Numbers

    @classmethod
    def of(cls, graph: Graph, nodes: Nodes, task: _Numbers, of: _Numbers, last: _Numbers) -> _Reads:
        """Find the reads of blocks, given forward tasks, their blocks, and each block's last."""
        storages = _Storages(graph)
        # A node belongs to the last operator with its number.
        node = nodes.find(task)
        numbered = np.flatnonzero(node >= 0)[::-1]
        _, latest = np.unique(
            of[numbered] * (len(nodes.key) + 1) + node[numbered], return_index=True
        )
        forward = numbered[latest]
        # From each operator to its node's tasks, and to the storages that these read.
        node = node[forward]
        begin, end = np.searchsorted(nodes.of, node), np.searchsorted(nodes.of, node, "right")
        tasks = Spans.of(begin, end)
        reader = nodes.task[tasks.place]
        read = storages.inputs(reader)
        forward, node, reader = (
            forward[tasks.asker][read.asker], node[tasks.asker][read.asker], reader[read.asker],
        )  # fmt: skip
        block, storage = of[forward], graph.operands[read.place].astype(np.int64)
        # Storage numbers are reused: exclude storages that the node itself wrote, ...
        outputs = storages.outputs(nodes.task)
        keys = storages.key(nodes.of[outputs.asker], graph.operands[outputs.place])
        writer = nodes.task[outputs.asker]
        order = np.lexsort((writer, keys))
        keys, writer = keys[order], writer[order]
        places = _places_in(keys, storages.key(node, storage))
        written_by_node = places >= 0
        written_by_node[written_by_node] = writer[places[written_by_node]] < reader[written_by_node]
        # ... those that the block's forward never used, ...
        used = storages.all(task)
        inside = sorted_once(storages.key(of[used.asker], graph.operands[used.place]))
        valid = ~written_by_node & _among(storages.key(block, storage), inside)
        # ... and those allocated after it.
        memory = graph.memory
        makers = np.sort(storages.key_task(memory.storage, memory.producer))
        after = np.searchsorted(makers, storages.key_task(storage, last[block]), "right")
        until = np.searchsorted(makers, storages.key_task(storage, reader), "right")
        valid &= after >= until
        producer = storages.made(task[forward], storage)
        return cls(block[valid], forward[valid], producer[valid], node[valid])


class _Storages:
    """Storages of tasks' calls, as indices into ``graph.operands``."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._start = graph.operand_start
        inputs = np.array([*(len(call.inputs) for call in graph.calls), 0], np.int64)
        # All operands of a task without a call count as outputs.
        self._middle = np.minimum(self._start[:-1] + inputs[graph.tasks.call], self._start[1:])
        self._room = int(graph.operands.max(initial=-1)) + 2
        self._room = max(self._room, int(graph.memory.storage.max(initial=-1)) + 2)

    def key(self, group: _Numbers, storage: NDArray[np.int32] | _Numbers) -> _Numbers:
        """Return keys that sort by group, then storage, which may be -1."""
        return group * self._room + storage + 1

    def key_task(
        self, storage: NDArray[np.int32] | _Numbers, task: NDArray[np.int32] | _Numbers
    ) -> _Numbers:
        """Return keys that sort by storage, then task, either of which may be -1."""
        return (storage.astype(np.int64) + 1) * (len(self._graph) + 1) + task + 1

    def inputs(self, tasks: _Numbers) -> Spans:
        """Return the spans of the inputs of `tasks`."""
        return Spans.of(self._start[tasks], self._middle[tasks])

    def outputs(self, tasks: _Numbers) -> Spans:
        """Return the spans of the outputs of `tasks`."""
        return Spans.of(self._middle[tasks], self._start[tasks + 1])

    def all(self, tasks: _Numbers) -> Spans:
        """Return the spans of all operands of `tasks`."""
        return Spans.of(self._start[tasks], self._start[tasks + 1])

    def made(self, tasks: _Numbers, storages: _Numbers) -> NDArray[np.bool_]:
        """Return whether each task returns its storage and does not read it."""
        chosen = sorted_once(tasks)
        operands, keys = self._graph.operands, self.key(tasks, storages)
        outputs, inputs = self.outputs(chosen), self.inputs(chosen)
        returned = sorted_once(self.key(chosen[outputs.asker], operands[outputs.place]))
        read = sorted_once(self.key(chosen[inputs.asker], operands[inputs.place]))
        return _among(keys, returned) & ~_among(keys, read)


def _among(numbers: _Numbers, values: _Numbers) -> NDArray[np.bool_]:
    """Return which numbers are in the ascending `values`, bool [numbers]."""
    return _places_in(values, numbers) >= 0


def _places_in(values: _Numbers, numbers: _Numbers) -> _Numbers:
    """Return the first index of each number in the ascending `values`; -1 if it is missing."""
    place = np.searchsorted(values, numbers)
    matches = place < len(values)
    matches[matches] = values[place[matches]] == numbers[matches]
    return np.where(matches, place, -1)


def edit_memory(edit: Editor, graph: Graph, modules: tuple[str, ...], handles: _Numbers) -> None:
    """Free the saved tensors of blocks after their forward; allocate them on recomputation.

    Args:
        handles: results of `Editor.repeat` for all recomputed tasks, ordered by block.
    """
    if len(graph.memory):
        change_lifetimes(edit, graph, handles, *_lifetimes(graph, modules))


def change_lifetimes(
    edit: Editor, graph: Graph, handles: _Numbers, released: _Numbers, allocated: _Numbers
) -> None:
    """Free and allocate in `edit`, where `handles` represent the added tasks.

    Args:
        released, allocated: columns of `Editor.release_after` and `allocate`, in which added
            tasks are numbered from ``len(graph)``.
    """
    number = np.concatenate([np.arange(len(graph)), handles, [-1]]).astype(np.int64)  # -1 stays -1
    edit.release_after(released[0], number[released[1]])
    nbytes, role, producer, release, storage = allocated
    edit.allocate(nbytes, role, number[producer], number[release], storage)


@cached_per_graph
def _lifetimes(graph: Graph, modules: tuple[str, ...]) -> tuple[_Numbers, _Numbers]:
    """Return the columns of `Editor.release_after` and of `Editor.allocate`.

    Recomputed tasks are numbered from ``len(graph)``, ordered by block.
    """
    lifetimes = _Lifetimes(graph, find_blocks(graph, modules))
    return lifetimes.released(), lifetimes.allocated()


class _Lifetimes:
    """Users of the forward pass's allocations, and their blocks."""

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self._graph, self._blocks = graph, blocks
        nodes = nodes_of(graph)
        self._ends = nodes.ends()
        self._forward = graph.tasks.phase == StepPhase.FORWARD
        self._backward = graph.tasks.phase == StepPhase.BACKWARD
        # By task: its block; for a backward task, the block of its forward; -1 for none.
        self._block = np.full(len(graph), -1)
        self._block[blocks.task] = blocks.of
        block_of_node = np.full(len(nodes.key), -1)
        node = nodes.find(blocks.task)
        block_of_node[node[node >= 0]] = blocks.of[node >= 0]
        self._block[nodes.task] = block_of_node[nodes.of]
        # By task: the number of its recomputation; -1 for none.
        self._second = np.full(len(graph), -1)
        again = blocks.task[blocks.again]
        self._second[again] = len(graph) + np.arange(len(again))
        memory = graph.memory
        producer = memory.producer
        self._chosen = np.flatnonzero((producer >= 0) & self._forward[producer])
        self._made = producer[self._chosen].astype(np.int64)
        self._release = memory.release[self._chosen].astype(np.int64)
        self._storage = memory.storage[self._chosen].astype(np.int64)
        until = np.where(self._release >= 0, self._release, len(graph))
        # The users of an allocation without a storage number are unknown.
        until = np.where(self._storage >= 0, until, self._made - 1)
        uses = uses_of(graph)
        spans = uses.between(self._storage, self._made, until)
        self._user, self._used = uses.task[spans.place], spans.asker

    def allocated(self) -> _Numbers:
        """Return the columns of allocations that recomputation repeats."""
        blocks, producer, release = self._blocks, self._made, self._release
        home = self._block[producer]
        rows = (home >= 0) & (self._second[producer] >= 0)
        # The last reader in the block's backward pass, or else in its recomputation.
        inside = self._block[self._user] == home[self._used]
        saved_until, used_until = np.full((2, len(producer)), -1)
        saved = inside & self._backward[self._user]
        np.maximum.at(saved_until, self._used[saved], self._ends[self._user[saved]])
        rerun = inside & (self._second[self._user] >= 0)
        np.maximum.at(used_until, self._used[rerun], self._second[self._user[rerun]])
        chosen = np.flatnonzero(rows)
        home, release, producer = home[chosen], release[chosen], producer[chosen]
        storage, until = self._storage[chosen], saved_until[chosen]
        released_inside = (release >= 0) & self._forward[release] & (self._block[release] == home)
        second = np.where(released_inside, self._second[release], -1)
        last_again = np.zeros(len(blocks), np.int64)
        again = blocks.task[blocks.again]
        last_again[blocks.of[blocks.again]] = self._second[again]
        # The tensor leaves the block, or only a Python variable refers to it.
        otherwise = np.where(used_until[chosen] >= 0, used_until[chosen], self._second[producer])
        is_saved = until >= 0
        until = np.select(
            [
                is_saved,
                (storage < 0) & (release >= blocks.resume[home]),
                second >= 0,
                released_inside,
            ],
            [until, np.minimum(release, blocks.end[home]), second, last_again[home]],
            otherwise,
        )
        role = np.where(is_saved, Role.ACTIVATION, Role.TEMPORARY)
        nbytes = self._graph.memory.nbytes[self._chosen[chosen]]
        return np.stack([nbytes, role, self._second[producer], until, storage])

    def released(self) -> _Numbers:
        """Return columns (allocation, task): tensors that only blocks save, and their release."""
        blocks, producer, release, user = self._blocks, self._made, self._release, self._user
        home, block = self._block[producer], self._block[user]
        touched = home >= 0
        touched[self._used[block >= 0]] = True
        rows = touched & (release >= 0) & self._backward[release]
        unnumbered = self._storage < 0
        ends = np.append(blocks.end, -1)  # for no block
        rows &= ~unnumbered | ((home >= 0) & (release <= ends[home]))
        # An input of another block lives until that block's recomputed backward has finished.
        needed = np.where(
            block >= 0, ends[block], np.where(self._forward[user], user, self._ends[user])
        )
        inside = (block >= 0) & (block == home[self._used])
        needed = np.where(inside, np.where(self._forward[user], user, -1), needed)
        until = producer.copy()
        np.maximum.at(until, self._used, needed)
        return np.stack([self._chosen[rows], np.where(unnumbered, producer, until)[rows]])
