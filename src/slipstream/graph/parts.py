"""Cut a recorded step into parts that run on different ranks.

The forward pass can be cut where one tensor passes from earlier to later modules and no parameter
is used on both sides. Backward tasks follow their forward tasks, and updates the parameters,
gradients and states that they touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.graph.call import TensorSpec
from slipstream.graph.graph import Graph, cached_per_graph
from slipstream.graph.page_faults import page_fault_tasks
from slipstream.graph.values import Role, StepPhase

Indices = NDArray[np.int64]
_ALL = -1


@dataclass(frozen=True)
class Boundary:
    """A place where the forward pass can be cut.

    Attributes:
        task: the first forward task behind it.
        module: the outermost module that begins there.
        reader: the task that first reads the tensor that passes it.
        operand: the position of that tensor among the inputs of `reader`.
    """

    task: int
    module: str
    reader: int
    operand: int

    def spec(self, graph: Graph) -> TensorSpec:
        """Return the tensor that passes, for a graph with the same tasks."""
        return graph.task(self.reader).known_call.inputs[self.operand]


@dataclass(frozen=True, eq=False)
class Cut:
    """The tasks of each part of a step, in program order.

    Attributes:
        boundaries: between consecutive parts.
        begin: int64, tasks before the forward pass, of the first part.
        forward, inputs, weights: int64 by part; the backward pass is `inputs` and `weights`, where
            no other part waits for `weights`.
        update: int64 by part; a task that updates parameters of several parts is in each.
        end: int64, tasks after the backward pass, of the last part.
        share: float64 [parts, tasks], the share of each task that each part runs.
    """

    boundaries: tuple[Boundary, ...]
    begin: Indices
    forward: tuple[Indices, ...]
    inputs: tuple[Indices, ...]
    weights: tuple[Indices, ...]
    update: tuple[Indices, ...]
    end: Indices
    share: NDArray[np.float64]

    def backward(self, part: int) -> Indices:
        """Return the backward tasks of a part, int64, in program order."""
        return np.sort(np.concatenate([self.inputs[part], self.weights[part]]))


@cached_per_graph
def boundaries(graph: Graph) -> tuple[Boundary, ...]:
    """Return all places where the forward pass can be cut, in its order."""
    tasks = _forward(graph)
    parameters = set(graph.parameters.tolist())
    # By storage: the task that wrote an activation, or that first read a parameter.
    since: dict[int, int] = {}
    # Per position, the first readers of the tensors that pass it, by writer and storage.
    passing: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in range(len(tasks) + 1)]
    blocked = np.zeros(len(tasks) + 1, bool)
    for position, task in enumerate(tasks.tolist()):
        inputs, outputs = graph.task(task).operands
        for operand, storage in enumerate(inputs):
            if storage in parameters:
                first = since.setdefault(storage, position)
                blocked[first + 1 : position + 1] = True
            elif storage in since:
                for at in range(since[storage] + 1, position + 1):
                    passing[at].setdefault((since[storage], storage), (task, operand))
        for storage in outputs:
            if storage not in inputs:
                since[storage] = position
    found, seen = [], {"", *_prefixes(graph.task(int(tasks[0])).module)} if len(tasks) else {""}
    for position, task in enumerate(tasks.tolist()):
        names = _prefixes(graph.task(task).module)
        new = [name for name in names if name not in seen]
        seen.update(names)
        if position and new and len(passing[position]) == 1 and not blocked[position]:
            ((reader, operand),) = passing[position].values()
            found.append(Boundary(task, new[0], reader, operand))
    return tuple(found)


def balanced(graph: Graph, parts: int) -> tuple[str, ...]:
    """Return the modules that begin the second to last of `parts` parts of about equal time.

    Minimises the time of forward and backward pass of the slowest part.

    Raises:
        InvalidArgumentError: there are fewer than ``parts - 1`` boundaries.
    """
    found = boundaries(graph)
    if parts - 1 > len(found):
        raise InvalidArgumentError(
            "parts",
            f"the forward pass can be cut at {len(found)} modules, which makes at most "
            f"{len(found) + 1} parts, not {parts}",
            remedy=f"pass at most {len(found) + 1}",
        )
    owner = _owners(graph, [boundary.task for boundary in found])
    busy = graph.tasks.duration_ns + graph.tasks.gap_ns
    passes = owner >= 0
    cost = np.bincount(owner[passes], busy[passes], minlength=len(found) + 1)
    until = np.concatenate([[0.0], np.cumsum(cost)])
    pieces = len(cost)
    # best[j]: the slowest of the parts so far, if they hold the first j pieces.
    best = until.copy()
    choice = np.zeros((parts, pieces + 1), np.int64)
    best[0] = np.inf
    for part in range(1, parts):
        slowest = np.maximum(best[:, None], until[None, :] - until[:, None])
        slowest[np.tril_indices(pieces + 1)] = np.inf
        choice[part], best = slowest.argmin(axis=0), slowest.min(axis=0)
    at, begins = pieces, []
    for part in range(parts - 1, 0, -1):
        at = int(choice[part, at])
        begins.append(found[at - 1].module)
    return tuple(begins[::-1])


def cut(graph: Graph, modules: Sequence[str]) -> Cut:
    """Cut the step before the forward passes of `modules`.

    Raises:
        InvalidArgumentError: the forward pass cannot be cut before one of the modules, or they are
            not in its order.
    """
    by_module = {boundary.module: boundary for boundary in boundaries(graph)}
    chosen = []
    for module in modules:
        if module not in by_module:
            raise InvalidArgumentError(
                "modules",
                f"the step cannot be cut before '{module}': several tensors or a shared parameter "
                "would pass, or no such module begins in the forward pass",
                remedy="pass some of " + ", ".join(by_module),
            )
        chosen.append(by_module[module])
    starts = [boundary.task for boundary in chosen]
    if starts != sorted(set(starts)):
        raise InvalidArgumentError("modules", "they are not in the order of the forward pass")
    count, phase = len(starts) + 1, graph.tasks.phase
    owner = _owners(graph, starts)
    share = (owner == np.arange(count)[:, None]).astype(np.float64)
    update = np.flatnonzero(phase == StepPhase.OPTIMIZER)
    share[:, update] = _update_shares(graph, update, owner, count)
    forward = _forward(graph)
    others = np.flatnonzero(owner == _ALL)
    others = others[phase[others] != StepPhase.OPTIMIZER]
    last = count - 1
    before = others < (forward[0] if len(forward) else len(graph))
    share[:, others] = np.arange(count)[:, None] == np.where(before, 0, last)
    # Page faults are those of all parts.
    faults = np.array(page_fault_tasks(graph), np.int64)
    busy = np.array([graph.tasks.duration_ns[owner == part].sum() for part in range(count)])
    share[:, faults] = (busy / max(busy.sum(), 1.0))[:, None]
    weights = _weight_tasks(graph, owner, chosen)
    passes = [np.flatnonzero(owner == part) for part in range(count)]
    backward = [tasks[phase[tasks] == StepPhase.BACKWARD] for tasks in passes]
    rest = np.union1d(update, faults)
    return Cut(
        tuple(chosen),
        others[before],
        tuple(tasks[phase[tasks] != StepPhase.BACKWARD] for tasks in passes),
        tuple(tasks[~weights[tasks]] for tasks in backward),
        tuple(tasks[weights[tasks]] for tasks in backward),
        tuple(rest[share[part, rest] > 0] for part in range(count)),
        np.setdiff1d(others[~before], faults),
        share,
    )


def _forward(graph: Graph) -> Indices:
    return np.flatnonzero(graph.tasks.phase == StepPhase.FORWARD)


def _prefixes(module: str) -> list[str]:
    words = module.split(".") if module else []
    return [".".join(words[: n + 1]) for n in range(len(words))]


def _owners(graph: Graph, starts: Sequence[int]) -> Indices:
    """Return the part of each forward and backward task, int64 [tasks]; -1 for other tasks.

    A backward task follows the forward task with its sequence number, or the task before it.
    """
    phase, sequence = graph.tasks.phase, graph.tasks.sequence
    owner = np.full(len(graph), _ALL)
    forward = _forward(graph)
    owner[forward] = np.searchsorted(starts, forward, side="right")
    by_sequence = dict(zip(sequence[forward].tolist(), owner[forward].tolist(), strict=True))
    by_sequence.pop(-1, None)
    part = len(starts)
    for task in np.flatnonzero(phase == StepPhase.BACKWARD).tolist():
        part = by_sequence.get(int(sequence[task]), part)
        owner[task] = part
    return owner


def _update_shares(
    graph: Graph, update: Indices, owner: Indices, count: int
) -> NDArray[np.float64]:
    """Return the share of each update task that each part runs, float64 [parts, update].

    By the bytes of the parameters, gradients and states that it touches. Tasks that touch only
    temporaries belong to the next task that does not.
    """
    part_of = parameter_parts(graph, owner)
    memory = graph.memory
    gradients = (memory.role == Role.GRADIENT) & (memory.producer >= 0) & (memory.storage >= 0)
    for row in np.flatnonzero(gradients).tolist():
        part = int(owner[memory.producer[row]])
        if part >= 0:
            part_of[int(memory.storage[row])] = part
    lasting = set(memory.storage[(memory.producer < 0) & (memory.storage >= 0)].tolist())
    lasting |= set(graph.parameters.tolist())
    totals = np.zeros((count, len(update)))
    part_by_storage = dict(part_of)
    # A state is known from a task that also touches a parameter or gradient.
    for _ in range(2):
        totals[:] = 0.0
        for column, task in enumerate(update.tolist()):
            view = graph.task(task)
            specs = () if view.call is None else (*view.call.inputs, *view.call.outputs)
            storages = view.storages if len(view.storages) == len(specs) else []
            for storage, spec in zip(storages, specs, strict=False):
                if storage in part_by_storage:
                    totals[part_by_storage[storage], column] += max(spec.nbytes, 1)
            parts = np.flatnonzero(totals[:, column])
            if len(parts) == 1:
                for storage in storages:
                    if storage in lasting:
                        part_by_storage.setdefault(storage, int(parts[0]))
    empty = ~totals.any(axis=0)
    following = np.where(empty, len(update), np.arange(len(update)))[::-1]
    following = np.minimum.accumulate(following)[::-1]
    found = np.flatnonzero(~empty)
    if len(found):
        totals = totals[:, np.where(following < len(update), following, found[-1])]
    else:
        totals[:] = 1.0
    shares: NDArray[np.float64] = totals / totals.sum(axis=0, keepdims=True)
    return shares


def parameter_parts(graph: Graph, owner: Indices) -> dict[int, int]:
    """Return the part whose forward pass reads each parameter, by storage."""
    part_of: dict[int, int] = {}
    parameters = set(graph.parameters.tolist())
    for task in _forward(graph).tolist():
        for storage in graph.storages(task).tolist():
            if storage in parameters:
                part_of.setdefault(storage, int(owner[task]))
    return part_of


def _weight_tasks(graph: Graph, owner: Indices, chosen: Sequence[Boundary]) -> NDArray[np.bool_]:
    """Return which backward tasks no other part waits for, bool [tasks].

    These are the ones that the gradient of the part's input does not depend on.
    """
    phase = graph.tasks.phase
    backward = np.flatnonzero(phase == StepPhase.BACKWARD)
    weights = np.zeros(len(graph), bool)
    first = owner[backward].min(initial=len(chosen))
    # What earlier parts read; storages are reused, so tasks are visited backwards.
    needed: set[int] = set()
    for task in backward[::-1].tolist():
        inputs, outputs = graph.task(task).operands
        # No part waits for the first one.
        weights[task] = owner[task] == first or not needed.intersection(outputs)
        if owner[task] == first or not weights[task]:
            needed.difference_update(set(outputs) - set(inputs))
            needed.update(inputs)
    return weights
