"""Effect of autocast on a step's memory: results in 16 bits, and copies made by casts.

The backward pass saves a copy instead of the original, which is freed once nothing else needs it.
Copies of parameters live until the region ends and while the backward pass needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import CallChanges, Durations
from slipstream.graph import ITEM_BYTES, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.graph.graph import cached_per_graph
from slipstream.graph.uses import Spans, uses_of
from slipstream.techniques._recomputation import change_lifetimes, nodes_of
from slipstream.techniques._workspaces import (
    measured_workspaces,
    resize_workspaces,
    workspaces,
)
from slipstream.techniques.autocast import ROOT, AutocastPlan

_Numbers = NDArray[np.int64]


def edit_memory(
    edit: Editor,
    graph: Graph,
    found: AutocastPlan,
    changed: CallChanges,
    handles: NDArray[np.int64],
    durations: Durations,
) -> None:
    """Resize, shorten and add allocations; `handles` represent the plan's casts in `edit`."""
    if not len(graph.memory):
        return
    _lower_results(edit, graph, changed, durations)
    change_lifetimes(edit, graph, handles, *_copies(graph, found))


@cached_per_graph
def _copies(graph: Graph, found: AutocastPlan) -> tuple[_Numbers, _Numbers]:
    """Return the columns of `Editor.release_after` and of `Editor.allocate`.

    The plan's casts are numbered from ``len(graph)``.
    """
    return _Copies(graph, found).run()


class _Copies:
    def __init__(self, graph: Graph, plan: AutocastPlan) -> None:
        self._graph, self._plan = graph, plan
        self._memory, self._uses = graph.memory, uses_of(graph)
        tasks = graph.tasks
        self._backward = tasks.phase == StepPhase.BACKWARD
        self._ends = nodes_of(graph).ends()
        readers = np.repeat(
            np.fromiter(plan.through, np.int64, len(plan.through)),
            [len(storages) for storages in plan.through.values()],
        )
        read = [storage for storages in plan.through.values() for storage in storages]
        # By use: whether it reads a copy in another dtype.
        self._copied = self._uses.among(np.array(read, np.int64), readers)
        in_model = np.array([text.partition(".")[0] == ROOT for text in graph.strings])
        inside = np.flatnonzero(in_model[tasks.module] & (tasks.phase == StepPhase.FORWARD))
        self._region_end = int(inside[-1]) if len(inside) else 0

    def run(self) -> tuple[_Numbers, _Numbers]:
        """Return the columns of all changes."""
        plan, memory = self._plan, self._memory
        casts = plan.table
        handle = len(self._graph) + np.arange(len(casts.task))
        allocation = self._uses.allocations(casts.storage, casts.task)
        replaced = casts.replaces & (allocation >= 0)
        size = np.array([copy.outputs[0].nbytes for copy in casts.calls], np.int64)[casts.call]
        # Copies that coexist with the original.
        last = self._last_readers(casts.task, casts.storage, allocation)
        freed, produced = self._backward[last], self._backward[casts.task]
        role = np.where(freed & ~produced, Role.ACTIVATION, Role.TEMPORARY)
        release = np.maximum(last, casts.task)
        storage = np.full(len(handle), -1)
        # Copies that replace the original.
        here = allocation[replaced]
        role[replaced], release[replaced] = memory.role[here], memory.release[here]
        storage[replaced] = casts.storage[replaced]
        passed_on = self._passed_on(casts.task, allocation, ~replaced)
        released = [
            self._originals(),
            np.stack([here, handle[replaced]]),
            np.stack([allocation[passed_on], handle[passed_on]]),
        ]
        allocated = np.stack([size, role, handle, release, storage])
        return np.concatenate(released, axis=1), allocated

    def _originals(self) -> _Numbers:
        """Return columns (allocation, task): originals that the backward pass no longer reads.

        Each is freed after the task, its last direct use.
        """
        memory, backward, uses = self._memory, self._backward, self._uses
        chosen = (memory.producer >= 0) & (memory.storage >= 0) & (memory.release >= 0)
        chosen &= backward[memory.release] & ~backward[memory.producer]
        allocation = np.flatnonzero(chosen)
        producer = memory.producer[allocation].astype(np.int64)
        release = memory.release[allocation].astype(np.int64)
        spans = uses.between(memory.storage[allocation].astype(np.int64), producer, release)
        task, through = uses.task[spans.place], self._copied[spans.place]
        # If the forward operator read a copy, views made by its backward node are of the copy.
        sequence = self._graph.tasks.sequence
        node = spans.asker * (int(sequence.max(initial=0)) + 1) + sequence[task]
        through |= backward[task] & (sequence[task] >= 0) & np.isin(node, node[through])
        # The last direct use, then later uses of the copy in the forward pass.
        at = np.full(len(allocation), -1)
        direct = np.flatnonzero(~through)
        at[spans.asker[direct]] = direct
        until = np.where(at >= 0, self._ends[task[at]] if len(task) else 0, producer)
        later = through & ~backward[task] & (np.arange(len(task)) > at[spans.asker])
        np.maximum.at(until, spans.asker[later], task[later])
        copied = np.zeros(len(allocation), bool)
        copied[spans.asker[through & backward[task]]] = True
        shorter = copied & (until < release)
        return np.stack([allocation[shorter], until[shorter]])

    def _passed_on(
        self, task: _Numbers, allocation: _Numbers, coexists: NDArray[np.bool_]
    ) -> _Numbers:
        """Return the casts at `task` that free the gradient they copy, which has no other reader.

        Args:
            allocation: allocation that each cast copies, int64 [casts]; -1 if unknown.
            coexists: whether the copy does not replace it, bool [casts].
        """
        memory, backward, uses = self._memory, self._backward, self._uses
        chosen = coexists & (allocation >= 0) & backward[task]
        chosen &= (memory.producer[allocation] >= 0) & (memory.release[allocation] > task)
        chosen &= backward[memory.producer[allocation]]
        casts = np.flatnonzero(chosen)
        here = memory.take(allocation[casts])
        storage, release = here.storage.astype(np.int64), here.release.astype(np.int64)
        spans = uses.between(storage, task[casts], release)
        # All tasks of a backward node read the copy.
        sequence = self._graph.tasks.sequence
        same = sequence[uses.task[spans.place]] == sequence[task[casts]][spans.asker]
        direct = ~self._copied[spans.place] & ~same
        sole = ~np.isin(np.arange(len(casts)), spans.asker[direct])
        passed_on: _Numbers = casts[sole]
        return passed_on

    def _last_readers(self, task: _Numbers, storage: _Numbers, allocation: _Numbers) -> _Numbers:
        """Return the last task that needs the copy of each `storage` made at each `task`."""
        graph, uses = self._graph, self._uses
        is_parameter = np.isin(storage, graph.parameters)
        last = np.where(is_parameter, np.maximum(task, self._region_end), task)
        until = np.full(len(task), len(graph) - 1)
        has_allocation = allocation >= 0
        release = self._memory.release[allocation[has_allocation]]
        until[has_allocation] = np.where(release >= 0, release, until[has_allocation])
        spans = uses.between(storage, task, until)
        reader, asker = uses.task[spans.place], spans.asker
        sequence = graph.tasks.sequence
        needs = is_parameter[asker] | (sequence[reader] == sequence[task[asker]])
        needs &= self._copied[spans.place]
        np.maximum.at(last, asker[needs], self._ends[reader[needs]])
        return last


@dataclass(frozen=True)
class _Results:
    """Allocations of the results of changed calls.

    Attributes:
        allocation: int64 [k], index of the allocation.
        result: int64 [k], index among the results of all pairs, in order of pairs.
    """

    allocation: _Numbers
    result: _Numbers


@cached_per_graph
def _results(graph: Graph, changed: CallChanges) -> _Results:
    memory, tasks = graph.memory, changed.tasks
    inputs = np.array([len(old.inputs) for old, _ in changed.pairs], np.int64)[changed.pair]
    outputs = np.array([len(old.outputs) for old, _ in changed.pairs], np.int64)
    first = np.cumsum(outputs) - outputs
    begin = graph.operand_start[tasks] + inputs
    spans = Spans.of(begin, begin + outputs[changed.pair])
    task = tasks[spans.asker]
    allocation = uses_of(graph).allocations(graph.operands[spans.place].astype(np.int64), task)
    produced = (allocation >= 0) & (memory.producer[allocation] == task)
    result = first[changed.pair[spans.asker]] + spans.place - begin[spans.asker]
    return _Results(allocation[produced], result[produced])


def _lower_results(edit: Editor, graph: Graph, changed: CallChanges, durations: Durations) -> None:
    """Resize the results and workspaces of changed calls."""
    if not len(changed):
        return
    memory, results = graph.memory, _results(graph, changed)
    answers = [durations.lookup(new) for _, new in changed.pairs]
    # By result: measured bytes of the new kernel, and the ratio to the recorded ones otherwise.
    measured: list[int] = []
    share: list[float] = []
    for (old, new), answer in zip(changed.pairs, answers, strict=True):
        # The new kernel may differ arbitrarily in what it saves for the backward pass and in its
        # workspace.
        sizes = None if answer is None else answer.made
        complete = sizes is not None and len(sizes) == len(new.outputs)
        measured += sizes if sizes is not None and complete else [-1] * len(new.outputs)
        share += [_narrowed(*pair) for pair in zip(old.outputs, new.outputs, strict=True)]
    recorded, result = memory.nbytes[results.allocation], results.result
    nbytes = np.rint(recorded * np.array(share)[result]).astype(np.int64)
    measured_bytes = np.array(measured, np.int64)[result]
    edit.resize(results.allocation, np.where(measured_bytes >= 0, measured_bytes, nbytes))
    # An unmeasured workspace is assumed to hold reordered copies of the tensors.
    ratio = np.array([new.moved_bytes / max(old.moved_bytes, 1) for old, new in changed.pairs])
    needs = measured_workspaces(durations, (new for _, new in changed.pairs))
    needed, scratch = needs[changed.pair], workspaces(graph)[changed.tasks]
    guessed = (needed < 0) & (scratch >= 0)
    needed[guessed] = np.rint(memory.nbytes[scratch[guessed]] * ratio[changed.pair[guessed]])
    resize_workspaces(edit, graph, changed.tasks, needed)


def _narrowed(old: TensorSpec, new: TensorSpec) -> float:
    """Return the ratio of bytes in a narrower dtype; 1 for a wider one."""
    return min(ITEM_BYTES.get(new.dtype, 4) / ITEM_BYTES.get(old.dtype, 4), 1.0)
