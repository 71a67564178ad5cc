"""Blocks of a recorded step whose forward could run again, and what that does to memory."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Editor, Graph, Role, StepPhase, distinct
from slipstream.graph.graph import kept
from slipstream.graph.uses import uses_of


@dataclass
class Block:
    """One forward pass through a module, and its backward.

    Attributes:
        forward: its forward tasks, in order.
        again: those of them that run again: up to the last one that saves something.
        resume: the first backward task that reads what was saved; the block runs again before it.
        end: the last backward task that reads what was saved.
        saved: how many tensors are saved, one that two operators save counted twice.
    """

    module: str
    forward: list[int]
    again: list[int] = field(default_factory=list)
    resume: int = -1
    end: int = -1
    saved: int = 0


@kept
def find_blocks(graph: Graph, modules: tuple[str, ...]) -> list[Block]:
    """The passes through `modules` that save something for the backward pass, in order."""
    passes = _passes(graph)
    made = _Made(graph)
    ends = _node_tasks(graph, passes)
    found = []
    for block in _forward_runs(graph, modules, passes):
        _complete(graph, block, passes, ends, made)
        if block.again:
            found.append(block)
    return found


def _passes(graph: Graph) -> list[int]:
    """By task: how many backward passes are over."""
    phase, number, backward = graph.tasks.phase, 0, False
    found = []
    for one in phase.tolist():
        if one == StepPhase.FORWARD and backward:
            number, backward = number + 1, False
        backward = backward or one == StepPhase.BACKWARD
        found.append(number)
    return found


def _node_tasks(graph: Graph, passes: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """Backward tasks by pass and autograd's number."""
    tasks = graph.tasks
    found: dict[tuple[int, int], list[int]] = {}
    numbered = (tasks.phase == StepPhase.BACKWARD) & (tasks.sequence >= 0)
    for t in np.flatnonzero(numbered).tolist():
        found.setdefault((passes[t], int(tasks.sequence[t])), []).append(t)
    return found


def _forward_runs(graph: Graph, modules: Sequence[str], passes: Sequence[int]) -> list[Block]:
    """Unbroken runs of forward tasks within one of `modules`."""
    tasks = graph.tasks
    owner: dict[int, str] = {}
    for number in distinct(tasks.module, len(graph.strings)).tolist():
        name = graph.string(number)
        inside = (one for one in modules if name == one or name.startswith(f"{one}."))
        owner[number] = next(inside, "")
    module = tasks.module.tolist()
    found: list[Block] = []
    current = ("", -1)
    for t in np.flatnonzero(tasks.phase == StepPhase.FORWARD).tolist():
        key = (owner[module[t]], passes[t])
        if key[0]:
            if key == current:
                found[-1].forward.append(t)
            else:
                found.append(Block(key[0], [t]))
        current = key
    return found


def _complete(
    graph: Graph,
    block: Block,
    passes: Sequence[int],
    nodes: Mapping[tuple[int, int], list[int]],
    made_in: _Made,
) -> None:
    """Find what the block saves, and so which of its tasks run again, and when."""
    tasks = graph.tasks
    last = -1
    readers: list[int] = []
    seen: set[int] = set()
    until: dict[int, int] = {}
    for i, t in enumerate(block.forward):
        seen.update(graph.storages(t).tolist())
        until[int(tasks.sequence[t])] = i
    for sequence, i in until.items():
        backward = nodes.get((passes[block.forward[0]], sequence), ()) if sequence >= 0 else ()
        t = block.forward[i]
        call = tasks.call[t]
        inputs = len(graph.calls[call].inputs) if call >= 0 else 0
        made = set(graph.storages(t)[inputs:].tolist()) - set(graph.storages(t)[:inputs].tolist())
        fresh: set[int] = set()
        saved: set[int] = set()
        for u in backward:
            call = tasks.call[u]
            count = len(graph.calls[call].inputs) if call >= 0 else 0
            inputs_of = graph.storages(u)[:count].tolist()
            read = set(inputs_of) - fresh
            # Numbers of storages are used again: what the backward pass made is none of ours.
            mine = read & seen
            known = mine - made_in.between(block.forward[-1], u, mine)
            block.saved += sum(storage in known for storage in inputs_of)
            saved |= known
            fresh |= set(graph.storages(u)[count:].tolist())
        if not saved:
            continue
        readers += backward
        # A result is saved once it is there; of inputs alone the last operator need not run.
        last = max(last, i + 1 if saved & made else i)
    if last > 0:
        block.again = block.forward[:last]
        block.resume, block.end = min(readers), max(readers)


class _Made:
    """By storage: the tasks that make something of its number, in order."""

    def __init__(self, graph: Graph) -> None:
        memory = graph.memory
        order = np.argsort(memory.producer, kind="stable")
        self._makers: dict[int, list[int]] = {}
        for storage, task in zip(
            memory.storage[order].tolist(), memory.producer[order].tolist(), strict=True
        ):
            self._makers.setdefault(storage, []).append(task)

    def between(self, first: int, last: int, storages: set[int]) -> set[int]:
        """Those of `storages` whose number is given to something after `first`, until `last`."""
        found = set()
        for storage in storages:
            makers = self._makers.get(storage, [])
            place = bisect_right(makers, first)
            if place < len(makers) and makers[place] <= last:
                found.add(storage)
        return found


def edit_memory(
    edit: Editor, graph: Graph, modules: tuple[str, ...], handles: NDArray[np.int64]
) -> None:
    """Free what blocks save after their forward; allocate it again when they run again.

    Args:
        handles: of all tasks that run again, block by block, what `Editor.repeat` gave for them.
    """
    released, allocated = _lifetimes(graph, modules)
    number = np.concatenate([np.arange(len(graph)), handles, [-1]])  # -1 stays -1
    edit.release_all(released[:, 0], number[released[:, 1]])
    nbytes, role, producer, release, storage = allocated.T
    edit.allocate_all(nbytes, role, number[producer], number[release], storage)


@kept
def _lifetimes(
    graph: Graph, modules: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of `Editor.release_after`, and of `Editor.allocate`.

    Tasks that run again are numbered from ``len(graph)`` on, block by block.
    """
    blocks = find_blocks(graph, modules)
    numbers = itertools.count(len(graph))
    handles = [{t: next(numbers) for t in block.again} for block in blocks]
    found = _Lifetimes(graph, blocks, handles)
    if len(graph.memory):
        found.run()
    return (
        np.array(found.released, np.int64).reshape(-1, 2),
        np.array(found.allocated, np.int64).reshape(-1, 5),
    )


class _Lifetimes:
    def __init__(
        self, graph: Graph, blocks: Sequence[Block], handles: Sequence[Mapping[int, int]]
    ) -> None:
        self.released: list[tuple[int, int]] = []
        self.allocated: list[tuple[int, int, int, int, int]] = []
        self._graph, self._blocks, self._handles = graph, blocks, handles
        self._block_of = {t: b for b, block in enumerate(blocks) for t in block.forward}
        passes = _passes(graph)
        self._nodes = _node_tasks(graph, passes)
        self._passes = passes
        tasks = graph.tasks
        self._uses = uses_of(graph)
        self._phase, self._sequence = tasks.phase.tolist(), tasks.sequence.tolist()
        for b, block in enumerate(blocks):
            for t in block.forward:
                key = (passes[t], self._sequence[t])
                for u in self._nodes.get(key, ()):
                    self._block_of[u] = b

    def run(self) -> None:
        """Go through the allocations made in the forward pass."""
        memory, phase = self._graph.memory, self._phase
        for a in np.flatnonzero(memory.producer >= 0).tolist():
            made = int(memory.producer[a])
            if phase[made] == StepPhase.FORWARD:
                self._again(a, made)
                release = int(memory.release[a])
                if release >= 0 and phase[release] == StepPhase.BACKWARD:
                    self._shorten(a, made, release)

    def _uses_of(self, a: int) -> Sequence[int]:
        memory = self._graph.memory
        made, release = int(memory.producer[a]), int(memory.release[a])
        until = release if release >= 0 else len(self._graph)
        storage = int(memory.storage[a])
        return self._uses.between(storage, made, until) if storage >= 0 else ()

    def _node_end(self, t: int) -> int:
        """Autograd frees what it saved after a whole node."""
        # They are in order.
        return self._nodes.get((self._passes[t], self._sequence[t]), [t])[-1]

    def _again(self, a: int, made: int) -> None:
        """Allocate `a` once more where its block runs again."""
        b = self._block_of.get(made, -1)
        if b < 0 or made not in self._handles[b]:
            return
        memory, phase = self._graph.memory, self._phase
        again, block = self._handles[b], self._blocks[b]
        release, storage = int(memory.release[a]), int(memory.storage[a])
        uses = self._uses_of(a)
        saved = [
            t for t in uses if phase[t] == StepPhase.BACKWARD and self._block_of.get(t, -1) == b
        ]
        if saved:
            until = max(self._node_end(t) for t in saved)
        elif storage < 0 and release >= block.resume:
            until = min(release, block.end)
        elif release in again:
            until = again[release]
        elif release in block.forward:
            until = again[block.again[-1]]
        else:
            # It leaves the block, or nothing but a name of Python's keeps it.
            used = [t for t in uses if t in again]
            until = again[used[-1] if used else made]
        role = Role.ACTIVATION if saved else Role.TEMPORARY
        self.allocated.append((int(memory.nbytes[a]), role, again[made], until, storage))

    def _shorten(self, a: int, made: int, release: int) -> None:
        """What only checkpointed blocks keep for the backward pass goes when they let go of it."""
        phase = self._phase
        home = self._block_of.get(made, -1)
        uses = self._uses_of(a)
        if home < 0 and not any(t in self._block_of for t in uses):
            return
        if int(self._graph.memory.storage[a]) < 0:
            if home >= 0 and release <= self._blocks[home].end:
                self.released.append((a, made))
            return
        until = made
        for t in uses:
            b = self._block_of.get(t, -1)
            if b == home and b >= 0:
                if phase[t] == StepPhase.FORWARD:
                    until = max(until, t)
            elif b >= 0:
                # An input of another block: kept until that one has run again and is done.
                until = max(until, self._blocks[b].end)
            else:
                until = max(until, t if phase[t] == StepPhase.FORWARD else self._node_end(t))
        self.released.append((a, until))
