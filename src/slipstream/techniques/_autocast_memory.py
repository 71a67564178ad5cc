"""What autocast does to a step's memory: results in 16 bits, and the copies that casts make.

A copy is saved for the backward pass in place of what it copies, so that the original goes as
soon as nothing else needs it. Copies of parameters are kept until the region ends, and as long as
the backward pass needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import Changed, Durations
from slipstream.graph import ITEM_BYTES, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.graph.graph import kept
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
    changed: Changed,
    handles: NDArray[np.int64],
    durations: Durations,
) -> None:
    """Resize, shorten and add allocations; `handles` stand for the plan's casts in `edit`."""
    if not len(graph.memory):
        return
    _lower_results(edit, graph, changed, durations)
    change_lifetimes(edit, graph, handles, *_copies(graph, found))


@kept
def _copies(graph: Graph, found: AutocastPlan) -> tuple[_Numbers, _Numbers]:
    """Columns of `Editor.release_after`, and of `Editor.allocate`.

    The plan's casts are numbered from ``len(graph)`` on.
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
        # By use: whether it is of a copy in another dtype.
        self._copied = self._uses.among(np.array(read, np.int64), readers)
        in_model = np.array([text.partition(".")[0] == ROOT for text in graph.strings])
        inside = np.flatnonzero(in_model[tasks.module] & (tasks.phase == StepPhase.FORWARD))
        self._region_end = int(inside[-1]) if len(inside) else 0

    def run(self) -> tuple[_Numbers, _Numbers]:
        """Columns of all changes."""
        plan, memory = self._plan, self._memory
        casts = plan.table
        handle = len(self._graph) + np.arange(len(casts.task))
        allocation = self._uses.allocations(casts.storage, casts.task)
        replaced = casts.replaces & (allocation >= 0)
        size = np.array([copy.outputs[0].nbytes for copy in casts.calls], np.int64)[casts.call]
        # Where a copy is beside what it copies.
        last = self._last_readers(casts.task, casts.storage, allocation)
        freed, produced = self._backward[last], self._backward[casts.task]
        role = np.where(freed & ~produced, Role.ACTIVATION, Role.TEMPORARY)
        release = np.maximum(last, casts.task)
        storage = np.full(len(handle), -1)
        # Where it stands in for it.
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
        """Columns (allocation, task) of what the backward pass no longer reads itself.

        It goes after its last direct use.
        """
        memory, backward, uses = self._memory, self._backward, self._uses
        chosen = (memory.producer >= 0) & (memory.storage >= 0) & (memory.release >= 0)
        chosen &= backward[memory.release] & ~backward[memory.producer]
        allocation = np.flatnonzero(chosen)
        producer = memory.producer[allocation].astype(np.int64)
        release = memory.release[allocation].astype(np.int64)
        spans = uses.between(memory.storage[allocation].astype(np.int64), producer, release)
        task, through = uses.task[spans.place], self._copied[spans.place]
        # A view that a node of the backward pass makes of what its forward read in copy is one of
        # the copy.
        sequence = self._graph.tasks.sequence
        node = spans.asker * (int(sequence.max(initial=0)) + 1) + sequence[task]
        through |= backward[task] & (sequence[task] >= 0) & np.isin(node, node[through])
        # The last direct use, and after it those in the forward pass through a copy.
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
        self, task: _Numbers, allocation: _Numbers, beside: NDArray[np.bool_]
    ) -> _Numbers:
        """Which casts at `task` free the gradient they copy: nothing reads it itself any more.

        Args:
            allocation: int64 [casts], of what each copies; -1 unknown.
            beside: bool [casts], where the copy does not stand in for it.
        """
        memory, backward, uses = self._memory, self._backward, self._uses
        chosen = beside & (allocation >= 0) & backward[task]
        chosen &= (memory.producer[allocation] >= 0) & (memory.release[allocation] > task)
        chosen &= backward[memory.producer[allocation]]
        casts = np.flatnonzero(chosen)
        here = memory.take(allocation[casts])
        storage, release = here.storage.astype(np.int64), here.release.astype(np.int64)
        spans = uses.between(storage, task[casts], release)
        # A node of the backward pass gets the copy: so do its views and sums.
        sequence = self._graph.tasks.sequence
        same = sequence[uses.task[spans.place]] == sequence[task[casts]][spans.asker]
        itself = ~self._copied[spans.place] & ~same
        alone = ~np.isin(np.arange(len(casts)), spans.asker[itself])
        passed_on: _Numbers = casts[alone]
        return passed_on

    def _last_readers(self, task: _Numbers, storage: _Numbers, allocation: _Numbers) -> _Numbers:
        """The last task that needs the copy of each `storage` made at each `task`."""
        graph, uses = self._graph, self._uses
        kept_on = np.isin(storage, graph.parameters)
        last = np.where(kept_on, np.maximum(task, self._region_end), task)
        until = np.full(len(task), len(graph) - 1)
        known = allocation >= 0
        release = self._memory.release[allocation[known]]
        until[known] = np.where(release >= 0, release, until[known])
        spans = uses.between(storage, task, until)
        reader, asker = uses.task[spans.place], spans.asker
        sequence = graph.tasks.sequence
        needs = kept_on[asker] | (sequence[reader] == sequence[task[asker]])
        needs &= self._copied[spans.place]
        np.maximum.at(last, asker[needs], self._ends[reader[needs]])
        return last


@dataclass(frozen=True)
class _Results:
    """Where the results of changed calls lie.

    Attributes:
        allocation: int64 [k], of results that an allocation was made for.
        result: int64 [k], which of the results of all pairs it is, one pair after the other.
    """

    allocation: _Numbers
    result: _Numbers


@kept
def _results(graph: Graph, changed: Changed) -> _Results:
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


def _lower_results(edit: Editor, graph: Graph, changed: Changed, durations: Durations) -> None:
    """Resize what changed calls return, and what they need while they run."""
    if not len(changed):
        return
    memory, results = graph.memory, _results(graph, changed)
    answers = [durations.lookup(new) for _, new in changed.pairs]
    # By result: its bytes where its kernel was measured, or else its share of the recorded.
    measured: list[int] = []
    share: list[float] = []
    for (old, new), answer in zip(changed.pairs, answers, strict=True):
        # Another kernel than the recorded one: what it returns for the backward pass to read,
        # and what it needs while it runs, may be larger or smaller by anything.
        sizes = None if answer is None else answer.made
        known = sizes is not None and len(sizes) == len(new.outputs)
        measured += sizes if sizes is not None and known else [-1] * len(new.outputs)
        share += [_narrowed(*pair) for pair in zip(old.outputs, new.outputs, strict=True)]
    was, result = memory.nbytes[results.allocation], results.result
    nbytes = np.rint(was * np.array(share)[result]).astype(np.int64)
    of_kernel = np.array(measured, np.int64)[result]
    edit.resize(results.allocation, np.where(of_kernel >= 0, of_kernel, nbytes))
    # Copies of its tensors, in the order its kernel likes, where nothing was measured.
    ratio = np.array([new.moved_bytes / max(old.moved_bytes, 1) for old, new in changed.pairs])
    needs = measured_workspaces(durations, (new for _, new in changed.pairs))
    wanted, scratch = needs[changed.pair], workspaces(graph)[changed.tasks]
    guessed = (wanted < 0) & (scratch >= 0)
    wanted[guessed] = np.rint(memory.nbytes[scratch[guessed]] * ratio[changed.pair[guessed]])
    resize_workspaces(edit, graph, changed.tasks, wanted)


def _narrowed(old: TensorSpec, new: TensorSpec) -> float:
    """What becomes of a tensor's bytes in a narrower dtype; in a wider one nothing."""
    return min(ITEM_BYTES.get(new.dtype, 4) / ITEM_BYTES.get(old.dtype, 4), 1.0)
