"""Blocks of a recorded step whose forward could run again, and what that does to memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Editor, Graph, Role, StepPhase, distinct
from slipstream.graph.graph import kept
from slipstream.graph.uses import Spans, sorted_once, uses_of

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """Forward passes through modules that save something for the backward pass, in order.

    Attributes:
        module: the name of each one's module.
        task, of: int64 [forward tasks], block by block and in order, and each one's block.
        last: int64 [blocks], its last forward task.
        again: bool [forward tasks], whether it runs again: up to the last one that saves something.
        resume: int64 [blocks], the first backward task that reads what was saved; the block runs
            again before it.
        end: int64 [blocks], the last backward task that reads what was saved.
        saved: int64 [blocks], how many tensors are saved, one that two operators save counted
            twice.
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


@kept
def find_blocks(graph: Graph, modules: tuple[str, ...]) -> Blocks:
    """The passes through `modules` that save something for the backward pass, in order."""
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
    # A result is saved once it is there; of inputs alone the last operator need not run.
    length = np.zeros(count, np.int64)
    np.maximum.at(length, reads.block, reads.forward - begin[reads.block] + reads.made)
    resume, latest = np.full(count, len(graph)), np.full(count, -1)
    np.minimum.at(resume, reads.block, nodes.first[reads.node])
    np.maximum.at(latest, reads.block, nodes.last[reads.node])
    chosen = length > 0
    number = np.cumsum(chosen) - 1
    kept_tasks = chosen[of]
    again = np.arange(len(task)) - begin[of] < length[of]
    return Blocks(
        tuple(name for name, one in zip(module, chosen.tolist(), strict=True) if one),
        task[kept_tasks], number[of[kept_tasks]], last[chosen], again[kept_tasks],
        resume[chosen], latest[chosen], saved[chosen],
    )  # fmt: skip


@dataclass(frozen=True)
class Nodes:
    """Nodes of autograd: the backward tasks of one pass that have one number.

    Attributes:
        passes: int64 [tasks], how many backward passes are over.
        key: int64 [nodes], ascending: the pass and the number.
        task, of: int64 [numbered backward tasks], node by node and in order, and each one's node.
        first, last: int64 [nodes], the first and the last task of each.
    """

    graph: Graph
    passes: _Numbers
    key: _Numbers
    task: _Numbers
    of: _Numbers
    first: _Numbers
    last: _Numbers

    def find(self, tasks: _Numbers) -> _Numbers:
        """The nodes that have the numbers of these tasks, in their passes; -1: there is none."""
        # Keys are not negative, so that -1, of no number, is none of them.
        return _places_in(self.key, _key(self.graph, tasks, self.passes))

    def ends(self) -> _Numbers:
        """By task: when what it reads can be freed; autograd frees that after a whole node."""
        ends = np.arange(len(self.graph))
        ends[self.task] = self.last[self.of]
        return ends


def _key(graph: Graph, tasks: _Numbers, passes: _Numbers) -> _Numbers:
    sequence = graph.tasks.sequence
    room = int(sequence.max(initial=-1)) + 1
    return np.where(sequence[tasks] >= 0, passes[tasks] * room + sequence[tasks], -1)


@kept
def nodes_of(graph: Graph) -> Nodes:
    """Those of `graph`."""
    phase = graph.tasks.phase
    # A backward pass is over where the next forward begins.
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
    """Unbroken runs of forward tasks within one of `modules`: their modules, tasks, and whose."""
    tasks = graph.tasks
    owner = np.full(len(graph.strings), -1)
    for number in distinct(tasks.module, len(graph.strings)).tolist():
        name = graph.string(number)
        holds = (m for m, one in enumerate(modules) if name == one or name.startswith(f"{one}."))
        owner[number] = next(holds, -1)
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
    """What the backward pass reads of what was there in a block's forward, one row each.

    Attributes:
        block: int64 [k], whose.
        forward: int64 [k], the place among all forward tasks of the operator that saved it.
        made: bool [k], whether that operator made it.
        node: int64 [k], what reads it.
    """

    block: _Numbers
    forward: _Numbers
    made: NDArray[np.bool_]
    node: _Numbers

    @classmethod
    def of(cls, graph: Graph, nodes: Nodes, task: _Numbers, of: _Numbers, last: _Numbers) -> _Reads:
        """Of blocks of these forward tasks, each one's block, and the last of each block."""
        storages = _Storages(graph)
        # The last operator with a node's number is the one it belongs to.
        node = nodes.find(task)
        numbered = np.flatnonzero(node >= 0)[::-1]
        _, latest = np.unique(
            of[numbered] * (len(nodes.key) + 1) + node[numbered], return_index=True
        )
        forward = numbered[latest]
        # From each of them to its node's tasks, and on to what these read.
        node = node[forward]
        begin, end = np.searchsorted(nodes.of, node), np.searchsorted(nodes.of, node, "right")
        tasks = Spans.of(begin, end)
        reader = nodes.task[tasks.place]
        read = storages.inputs(reader)
        forward, node, reader = (
            forward[tasks.asker][read.asker], node[tasks.asker][read.asker], reader[read.asker],
        )  # fmt: skip
        block, storage = of[forward], graph.operands[read.place].astype(np.int64)
        # Numbers of storages are used again: what the node made itself is not what was saved, ...
        outputs = storages.outputs(nodes.task)
        keys = storages.key(nodes.of[outputs.asker], graph.operands[outputs.place])
        by = nodes.task[outputs.asker]
        order = np.lexsort((by, keys))
        keys, by = keys[order], by[order]
        places = _places_in(keys, storages.key(node, storage))
        fresh = places >= 0
        fresh[fresh] = by[places[fresh]] < reader[fresh]
        # ... nor what the forward of the block never saw, ...
        seen = storages.all(task)
        inside = sorted_once(storages.key(of[seen.asker], graph.operands[seen.place]))
        known = ~fresh & _among(storages.key(block, storage), inside)
        # ... nor what was made after it.
        memory = graph.memory
        makers = np.sort(storages.key_task(memory.storage, memory.producer))
        after = np.searchsorted(makers, storages.key_task(storage, last[block]), "right")
        until = np.searchsorted(makers, storages.key_task(storage, reader), "right")
        known &= after >= until
        producer = storages.made(task[forward], storage)
        return cls(block[known], forward[known], producer[known], node[known])


class _Storages:
    """The storages of tasks' calls, as places in ``graph.operands``."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._start = graph.operand_start
        inputs = np.array([*(len(call.inputs) for call in graph.calls), 0], np.int64)
        # Of what has no call, all count as made.
        self._middle = np.minimum(self._start[:-1] + inputs[graph.tasks.call], self._start[1:])
        self._room = int(graph.operands.max(initial=-1)) + 2
        self._room = max(self._room, int(graph.memory.storage.max(initial=-1)) + 2)

    def key(self, group: _Numbers, storage: NDArray[np.int32] | _Numbers) -> _Numbers:
        """In the order of groups, and then of storages, which may be -1."""
        return group * self._room + storage + 1

    def key_task(
        self, storage: NDArray[np.int32] | _Numbers, task: NDArray[np.int32] | _Numbers
    ) -> _Numbers:
        """In the order of storages, and then of tasks, either of which may be -1."""
        return (storage.astype(np.int64) + 1) * (len(self._graph) + 1) + task + 1

    def inputs(self, tasks: _Numbers) -> Spans:
        """Where those lie that these tasks read."""
        return Spans.of(self._start[tasks], self._middle[tasks])

    def outputs(self, tasks: _Numbers) -> Spans:
        """Where those lie that these tasks return."""
        return Spans.of(self._middle[tasks], self._start[tasks + 1])

    def all(self, tasks: _Numbers) -> Spans:
        """Where all lie."""
        return Spans.of(self._start[tasks], self._start[tasks + 1])

    def made(self, tasks: _Numbers, storages: _Numbers) -> NDArray[np.bool_]:
        """Whether each task returns that storage and does not read it."""
        chosen = sorted_once(tasks)
        operands, wanted = self._graph.operands, self.key(tasks, storages)
        outputs, inputs = self.outputs(chosen), self.inputs(chosen)
        returned = sorted_once(self.key(chosen[outputs.asker], operands[outputs.place]))
        read = sorted_once(self.key(chosen[inputs.asker], operands[inputs.place]))
        return _among(wanted, returned) & ~_among(wanted, read)


def _among(numbers: _Numbers, known: _Numbers) -> NDArray[np.bool_]:
    """bool [numbers]: which of them are in `known`, that is in ascending order."""
    return _places_in(known, numbers) >= 0


def _places_in(known: _Numbers, numbers: _Numbers) -> _Numbers:
    """int64 [numbers]: where each first is in `known`, in ascending order; -1: nowhere."""
    place = np.searchsorted(known, numbers)
    matches = place < len(known)
    matches[matches] = known[place[matches]] == numbers[matches]
    return np.where(matches, place, -1)


def edit_memory(edit: Editor, graph: Graph, modules: tuple[str, ...], handles: _Numbers) -> None:
    """Free what blocks save after their forward; allocate it again when they run again.

    Args:
        handles: of all tasks that run again, block by block, what `Editor.repeat` gave for them.
    """
    if len(graph.memory):
        change_lifetimes(edit, graph, handles, *_lifetimes(graph, modules))


def change_lifetimes(
    edit: Editor, graph: Graph, handles: _Numbers, released: _Numbers, allocated: _Numbers
) -> None:
    """Free and allocate in `edit`, where `handles` stand for the tasks it adds.

    Args:
        released, allocated: columns of `Editor.release_after` and `allocate`, in which added
            tasks are numbered from ``len(graph)`` on.
    """
    number = np.concatenate([np.arange(len(graph)), handles, [-1]]).astype(np.int64)  # -1 stays -1
    edit.release_after(released[0], number[released[1]])
    nbytes, role, producer, release, storage = allocated
    edit.allocate(nbytes, role, number[producer], number[release], storage)


@kept
def _lifetimes(graph: Graph, modules: tuple[str, ...]) -> tuple[_Numbers, _Numbers]:
    """Columns of `Editor.release_after`, and of `Editor.allocate`.

    Tasks that run again are numbered from ``len(graph)`` on, block by block.
    """
    lifetimes = _Lifetimes(graph, find_blocks(graph, modules))
    return lifetimes.released(), lifetimes.allocated()


class _Lifetimes:
    """Of the allocations made in the forward pass: who uses them, and in which block."""

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self._graph, self._blocks = graph, blocks
        nodes = nodes_of(graph)
        self._ends = nodes.ends()
        self._forward = graph.tasks.phase == StepPhase.FORWARD
        self._backward = graph.tasks.phase == StepPhase.BACKWARD
        # By task: its block, and in the backward pass that whose forward it belongs to; -1: none.
        self._block = np.full(len(graph), -1)
        self._block[blocks.task] = blocks.of
        block_of_node = np.full(len(nodes.key), -1)
        node = nodes.find(blocks.task)
        block_of_node[node[node >= 0]] = blocks.of[node >= 0]
        self._block[nodes.task] = block_of_node[nodes.of]
        # By task: what stands for its second run; -1: none.
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
        # Of what has no number nobody knows who uses it.
        until = np.where(self._storage >= 0, until, self._made - 1)
        uses = uses_of(graph)
        spans = uses.between(self._storage, self._made, until)
        self._user, self._used = uses.task[spans.place], spans.asker

    def allocated(self) -> _Numbers:
        """What is allocated once more where its block runs again."""
        blocks, producer, release = self._blocks, self._made, self._release
        home = self._block[producer]
        rows = (home >= 0) & (self._second[producer] >= 0)
        # The last that reads it for its block's gradient, or else in the block's second run.
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
        # It leaves the block, or nothing but a name of Python's keeps it.
        left = np.where(used_until[chosen] >= 0, used_until[chosen], self._second[producer])
        known = until >= 0
        until = np.select(
            [known, (storage < 0) & (release >= blocks.resume[home]), second >= 0, released_inside],
            [until, np.minimum(release, blocks.end[home]), second, last_again[home]],
            left,
        )
        role = np.where(known, Role.ACTIVATION, Role.TEMPORARY)
        nbytes = self._graph.memory.nbytes[self._chosen[chosen]]
        return np.stack([nbytes, role, self._second[producer], until, storage])

    def released(self) -> _Numbers:
        """What only checkpointed blocks keep for the backward pass goes when they let go of it."""
        blocks, producer, release, user = self._blocks, self._made, self._release, self._user
        home, block = self._block[producer], self._block[user]
        touched = home >= 0
        touched[self._used[block >= 0]] = True
        rows = touched & (release >= 0) & self._backward[release]
        unnumbered = self._storage < 0
        ends = np.append(blocks.end, -1)  # of no block
        rows &= ~unnumbered | ((home >= 0) & (release <= ends[home]))
        # An input of another block: kept until that one has run again and is done.
        needed = np.where(
            block >= 0, ends[block], np.where(self._forward[user], user, self._ends[user])
        )
        inside = (block >= 0) & (block == home[self._used])
        needed = np.where(inside, np.where(self._forward[user], user, -1), needed)
        until = producer.copy()
        np.maximum.at(until, self._used, needed)
        return np.stack([self._chosen[rows], np.where(unnumbered, producer, until)[rows]])
