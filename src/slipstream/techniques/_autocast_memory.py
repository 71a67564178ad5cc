"""What autocast does to a step's memory: results in 16 bits, and the copies that casts make.

A copy is saved for the backward pass in place of what it copies, so that the original goes as
soon as nothing else needs it. Copies of parameters are kept until the region ends, and as long as
the backward pass needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import Answer, Durations
from slipstream.graph import ITEM_BYTES, Call, Editor, Graph, Role, StepPhase
from slipstream.graph.graph import kept
from slipstream.graph.uses import uses_of
from slipstream.techniques.autocast import ROOT, AutocastPlan


def edit_memory(
    edit: Editor, graph: Graph, found: AutocastPlan, handles: Sequence[int], durations: Durations
) -> None:
    """Resize, shorten and add allocations; `handles` stand for the plan's casts in `edit`."""
    if not len(graph.memory):
        return
    _lower_results(edit, graph, found, durations)
    released, allocated = _copies(graph, found)
    number = np.concatenate([np.arange(len(graph)), handles, [-1]]).astype(np.int64)  # -1 stays -1
    edit.release_all(released[:, 0], number[released[:, 1]])
    nbytes, role, producer, release, storage = allocated.T
    edit.allocate_all(nbytes, role, number[producer], number[release], storage)


@kept
def _copies(graph: Graph, found: AutocastPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of `Editor.release_after`, and of `Editor.allocate`.

    The plan's casts are numbered from ``len(graph)`` on.
    """
    copies = _Copies(graph, found)
    copies.run()
    return (
        np.array(copies.released, np.int64).reshape(-1, 2),
        np.array(copies.allocated, np.int64).reshape(-1, 5),
    )


def _nbytes(call: Call) -> int:
    return sum((spec.nbytes for spec in (*call.inputs, *call.outputs)), 0)


class _Copies:
    def __init__(self, graph: Graph, plan: AutocastPlan) -> None:
        self.released: list[tuple[int, int]] = []
        self.allocated: list[tuple[int, int, int, int, int]] = []
        self._graph, self._plan = graph, plan
        self._memory = graph.memory
        self._uses = uses_of(graph)
        tasks = graph.tasks
        backward = np.flatnonzero(tasks.phase == StepPhase.BACKWARD)
        # A later task of the same operator overwrites an earlier one.
        self._node_end: dict[int, int] = dict(
            zip(tasks.sequence[backward].tolist(), backward.tolist(), strict=True)
        )
        in_model = np.array([text.partition(".")[0] == ROOT for text in graph.strings])
        inside = np.flatnonzero(in_model[tasks.module] & (tasks.phase == StepPhase.FORWARD))
        self._region_end = int(inside[-1]) if len(inside) else 0
        self._phase, self._sequence = tasks.phase.tolist(), tasks.sequence.tolist()

    def run(self) -> None:
        """Make all changes."""
        self._shorten_originals()
        parameters = set(self._graph.parameters.tolist())
        for handle, ((t, _, copy), (storage, replaces)) in enumerate(
            zip(self._plan.casts, self._plan.cast_storages, strict=True), start=len(self._graph)
        ):
            size = copy.outputs[0].nbytes
            a = self._uses.allocation(storage, t)
            if replaces and a is not None:
                release = int(self._memory.release[a])
                role = Role(int(self._memory.role[a]))
                self.released.append((a, handle))
                self.allocated.append((size, role, handle, release, storage))
            else:
                release = self._last_reader(t, storage, storage in parameters)
                made, freed = (self._phase[one] == StepPhase.BACKWARD for one in (t, release))
                role = Role.ACTIVATION if freed and not made else Role.TEMPORARY
                self.allocated.append((size, role, handle, max(release, t), -1))

    def _shorten_originals(self) -> None:
        """Free what the backward pass no longer reads itself after its last direct use."""
        memory, phase = self._memory, self._graph.tasks.phase
        for a in np.flatnonzero((memory.producer >= 0) & (memory.storage >= 0)).tolist():
            release = int(memory.release[a])
            if release < 0 or phase[release] != StepPhase.BACKWARD:
                continue
            made = int(memory.producer[a])
            if phase[made] == StepPhase.BACKWARD:
                continue
            storage = int(memory.storage[a])
            direct, copied = made, False
            for t in self._uses.between(storage, made, release):
                if storage not in self._plan.through.get(t, ()):
                    direct = self._end_of(t)
                elif self._phase[t] == StepPhase.BACKWARD:
                    copied = True
                else:
                    direct = max(direct, t)
            if copied and direct < release:
                self.released.append((a, direct))

    def _last_reader(self, t: int, storage: int, kept: bool) -> int:
        """The last task that needs the copy made at `t`."""
        last = max(t, self._region_end) if kept else t
        until = len(self._graph) - 1
        a = self._uses.allocation(storage, t)
        if a is not None and self._memory.release[a] >= 0:
            until = int(self._memory.release[a])
        for u in self._uses.between(storage, t, until):
            if storage in self._plan.through.get(u, ()) and (
                kept or self._sequence[u] == self._sequence[t]
            ):
                last = max(last, self._end_of(u))
        return last

    def _end_of(self, t: int) -> int:
        """When what `t` reads can be freed: autograd frees what it saved after a whole node."""
        if self._phase[t] != StepPhase.BACKWARD or self._sequence[t] < 0:
            return t
        return max(t, self._node_end[self._sequence[t]])


def _lower_results(edit: Editor, graph: Graph, found: AutocastPlan, durations: Durations) -> None:
    memory, uses = graph.memory, uses_of(graph)
    answers: dict[int, Answer | None] = {}
    own = (memory.producer == memory.release) & (memory.storage < 0)
    workspace = {int(memory.producer[a]): a for a in np.flatnonzero(own).tolist()}
    for t, call in found.changed.items():
        recorded = graph.calls[graph.tasks.call[t]]
        outputs = graph.storages(t)[len(recorded.inputs) :].tolist()
        # A plan has one object for all calls that are alike.
        if id(call) not in answers:
            answers[id(call)] = durations.lookup(call)
        answer = answers[id(call)]
        # Another kernel than the recorded one: what it returns for the backward pass to read,
        # and what it needs while it runs, may be larger or smaller by anything.
        measured = None if answer is None else answer.made
        known = measured is not None and len(measured) == len(outputs)
        for i, (new, old, storage) in enumerate(
            zip(call.outputs, recorded.outputs, outputs, strict=True)
        ):
            a = uses.allocation(storage, t)
            if a is None or memory.producer[a] != t:
                continue
            if measured is not None and known:
                edit.resize(a, measured[i])
            elif ITEM_BYTES[new.dtype] < ITEM_BYTES[old.dtype]:
                ratio = ITEM_BYTES[new.dtype] / ITEM_BYTES[old.dtype]
                edit.resize(a, round(int(memory.nbytes[a]) * ratio))
        if answer is not None and answer.workspace is not None:
            if t in workspace:
                edit.resize(workspace[t], answer.workspace)
            elif answer.workspace:
                edit.allocate(answer.workspace, Role.TEMPORARY, t, t)
        elif t in workspace:
            # Copies of its tensors, in the order its kernel likes.
            ratio = _nbytes(call) / max(_nbytes(recorded), 1)
            a = workspace[t]
            edit.resize(a, round(int(memory.nbytes[a]) * ratio))
