"""`Flow`: data dependencies of a recorded step; `Match`: a layer found in it, with its tasks.

The number of a freed storage is reused, so every write of a new tensor starts another *value*.
Views pass on the value that they refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.call import Call, TensorSpec
from slipstream.graph.graph import Graph, cached_per_graph
from slipstream.graph.uses import Spans, sorted_once
from slipstream.graph.values import StepPhase

_Numbers = NDArray[np.int64]


class TaskLists:
    """A list of tasks per task: ``lists[task]``.

    Attributes:
        start, item: int64 [tasks + 1] and [items]; the list of task t is
            ``item[start[t]:start[t + 1]]``.
    """

    def __init__(self, start: _Numbers, item: _Numbers) -> None:
        self.start, self.item = start, item

    @classmethod
    def of(cls, owner: _Numbers, item: _Numbers, tasks: int) -> TaskLists:
        """Return the distinct items of each owner, ascending.

        Args:
            owner, item: int64 [k], pairs of tasks below `tasks`.
        """
        owner, item = np.divmod(sorted_once(owner * (tasks + 1) + item), tasks + 1)
        return cls(np.searchsorted(owner, np.arange(tasks + 1)), item)

    @cached_property
    def _plain(self) -> tuple[list[int], list[int]]:
        # Several times as fast as arrays when tasks are followed one by one.
        return self.start.tolist(), self.item.tolist()

    def __getitem__(self, task: int) -> list[int]:
        start, item = self._plain
        return item[start[task] : start[task + 1]]


class Flow:
    """Values and views of a recorded step.

    Attributes:
        complete: bool [tasks], whether the storages of the task's tensors are known. A task that
            another technique inserted may have a call, but no storages.
        views: bool [tasks], whether the task only makes a view of its first input.
        makers: for every input of the task's call the task that wrote it last; -1 if it existed
            before the step.
        readers: the tasks, views apart, that read what the task made.
        views_of: the views of what the task made.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._n = n = len(graph)
        call, counts = graph.tasks.call, np.diff(graph.operand_start)
        # -1 is not a call.
        inputs = np.array([*(len(made.inputs) for made in graph.calls), 0])
        tensors = inputs + np.array([*(len(made.outputs) for made in graph.calls), 0])
        self.complete = (call >= 0) & (counts == tensors[call])
        self._writes_inputs = np.array([*("!" in made.op for made in graph.calls), False])[call]
        self._inputs = np.where(self.complete, inputs[call], 0)
        self._task = np.repeat(np.arange(n), counts)
        place = np.arange(len(self._task)) - graph.operand_start[self._task]
        complete = self.complete[self._task]
        self._read = complete & (place < self._inputs[self._task])
        self._made = complete & ~self._read
        self.views = self._find_views()
        self.makers = self._find_makers()
        reads = np.repeat(~self.views, self._inputs) & (self.makers.item >= 0)
        reader = self._task[self._read]
        self.readers = TaskLists.of(self.makers.item[reads], reader[reads], n)
        views = np.flatnonzero(self.views)
        of = self.makers.item[self.makers.start[views]]
        self.views_of = TaskLists.of(of[of >= 0], views[of >= 0], n)

    def _find_views(self) -> NDArray[np.bool_]:
        operands, start = self.graph.operands, self.graph.operand_start
        first = operands[np.minimum(start[:-1], len(operands) - 1)] if len(operands) else start[:-1]
        made = np.bincount(self._task[self._made], minlength=self._n)
        new = self._made & (operands != first[self._task])
        lies_elsewhere = np.bincount(self._task[new], minlength=self._n) > 0
        views: NDArray[np.bool_] = (self._inputs > 0) & (made > 0) & ~self._writes_inputs
        return views & ~lies_elsewhere

    def _find_makers(self) -> TaskLists:
        storage = self.graph.operands.astype(np.int64)
        writes = self._made & ~self.views[self._task] & (storage >= 0)
        key = storage * self._n + self._task
        written = sorted_once(key[writes])
        # The last write of the storage by an earlier task.
        last = np.searchsorted(written, key[self._read]) - 1
        written_to, maker = np.divmod(written[last] if len(written) else last, max(self._n, 1))
        made = (last >= 0) & (written_to == storage[self._read])
        start = np.concatenate([[0], np.cumsum(self._inputs)])
        return TaskLists(start, np.where(made, maker, -1))

    @cached_property
    def waits(self) -> TaskLists:
        """Tasks, views apart, that must be over before the task begins.

        They made what it reads, or read or made what it overwrites. An operator that works in place
        may write to any of its inputs, as fused updates do to most.
        """
        moves = ~self.views[self._task]
        storage = self.graph.operands.astype(np.int64)
        key = storage * self._n + self._task
        over = moves & (self._made | (self._read & self._writes_inputs[self._task]))
        reads, changes = sorted_once(key[moves & self._read]), sorted_once(key[over])
        uses = sorted_once(np.concatenate([reads, changes]))
        used, task = np.divmod(uses, max(self._n, 1))
        last = np.searchsorted(changes, uses) - 1
        before = changes[last] if len(changes) else uses
        changed = (last >= 0) & (before // max(self._n, 1) == used)
        # What a task overwrites was read since it was last written.
        begin = np.searchsorted(reads, np.where(changed, before, used * self._n))
        end = np.where(np.isin(uses, changes), np.searchsorted(reads, uses), begin)
        spans = Spans.of(begin, end)
        return TaskLists.of(
            np.concatenate([task[changed], task[spans.asker]]),
            np.concatenate([before[changed], reads[spans.place]]) % max(self._n, 1),
            self._n,
        )

    @cached_property
    def backward(self) -> TaskLists:
        """Tasks of the backward pass that autograd ties to the task.

        A number belongs to the last forward task that has it: operators that autograd does not
        follow carry the number of the next one that it does.
        """
        phase, number = self.graph.tasks.phase, self.graph.tasks.sequence
        ahead = np.flatnonzero((phase == StepPhase.FORWARD) & (number >= 0))[::-1]
        back = np.flatnonzero((phase == StepPhase.BACKWARD) & (number >= 0))
        # Reversed, so that the first of a number is its last task.
        numbers, last = np.unique(number[ahead], return_index=True)
        place = np.searchsorted(numbers, number[back])
        found = np.append(numbers, -1)[place] == number[back]
        return TaskLists.of(ahead[last[place[found]]], back[found], self._n)

    @cached_property
    def unused_storage(self) -> int:
        """The first number above those of all storages."""
        return int(self.graph.operands.max(initial=-1)) + 1

    @cached_property
    def parameters(self) -> frozenset[int]:
        """Storages of the model's parameters."""
        return frozenset(self.graph.parameters.tolist())

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int], list[int], list[bool]]:
        graph = self.graph
        columns = graph.tasks.call, graph.operand_start, self._inputs, graph.operands, self.complete
        call, start, inputs, operands, complete = (column.tolist() for column in columns)
        return call, start, inputs, operands, complete

    def call(self, task: int) -> Call | None:
        """Return the task's call; None if the storages of its tensors are unknown."""
        call, *_, complete = self._lists
        return self.graph.calls[call[task]] if complete[task] else None

    def name(self, task: int) -> str:
        """Return the name of the task's call; empty if it is unknown."""
        call = self.call(task)
        return "" if call is None else call.name

    def operands(self, task: int) -> tuple[list[int], list[int]]:
        """Return the storages of the task's inputs and outputs; empty if they are unknown."""
        _, start, inputs, operands, complete = self._lists
        if not complete[task]:
            return [], []
        first = start[task]
        return (
            operands[first : first + inputs[task]],
            operands[first + inputs[task] : start[task + 1]],
        )

    def calling(self, names: Iterable[str], *phases: StepPhase) -> _Numbers:
        """Return the tasks whose call has one of `names`, ascending; in any phase if none given."""
        names = frozenset(names)
        named = np.array([*(call.name in names for call in self.graph.calls), False])
        chosen = named[self.graph.tasks.call]
        return np.flatnonzero(
            chosen & np.isin(self.graph.tasks.phase, phases) if phases else chosen
        )

    def only_reader(self, task: int) -> int:
        """Return the task that alone reads what `task` made, which has no views; else -1."""
        readers = self.readers[task]
        return readers[0] if len(readers) == 1 and not self.views_of[task] else -1

    def behind(self, task: int, *kinds: Iterable[str]) -> list[int]:
        """Return the tasks that can become part of `task`: at most one of each kind, in order.

        Each alone reads what the one before it made, as its first input.

        Args:
            kinds: names of operators, such as norms and then activations.
        """
        followers: list[int] = []
        for names in kinds:
            last = followers[-1] if followers else task
            reader = self.only_reader(last)
            if reader >= 0 and self.name(reader) in names and self.makers[reader][0] == last:
                followers.append(reader)
        return followers

    def boundary(self, tasks: Iterable[int]) -> tuple[dict[int, TensorSpec], dict[int, TensorSpec]]:
        """Return the storages that `tasks` read from others and those that they write for others.

        Each has the largest tensor that lies in it.
        """
        inside = set(tasks)
        # A task outside may also use the number of a storage that `tasks` freed.
        needed = {
            storage
            for task in inside
            for user in (*self.readers[task], *self.views_of[task])
            if user not in inside
            for storage, maker in zip(self.operands(user)[0], self.makers[user], strict=True)
            if maker == task
        }
        read: dict[int, TensorSpec] = {}
        written: dict[int, TensorSpec] = {}
        for task in sorted(inside):
            call = self.call(task)
            if call is None:
                continue
            before, after = self.operands(task)
            for storage, spec in zip(before, call.inputs, strict=True):
                if storage not in written:
                    _widest(read, storage, spec)
            for storage, spec in zip(after, call.outputs, strict=True):
                if storage not in read:
                    _widest(written, storage, spec)
        return read, {s: spec for s, spec in written.items() if s in needed}


def _widest(specs: dict[int, TensorSpec], storage: int, spec: TensorSpec) -> None:
    if storage >= 0 and (storage not in specs or specs[storage].nbytes < spec.nbytes):
        specs[storage] = spec


@cached_per_graph
def flow_of(graph: Graph) -> Flow:
    """Return the data dependencies of `graph`."""
    return Flow(graph)


@dataclass(frozen=True, eq=False)
class Match:
    """A part of the step that a technique can replace.

    Attributes:
        kind: such as ``linear`` and ``conv2d``, which ``nn.Linear`` and ``nn.Conv2d`` run.
        module: qualified name of its module in the model; empty for the model itself.
        forward, backward: its tasks, ascending.
        x: its first input.
        y: its output.
        weights: its parameters, by storage.
        settings: arguments of its module.
        refusal: why it cannot be replaced; None if it can.
    """

    kind: str
    module: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    x: TensorSpec
    y: TensorSpec
    weights: Mapping[int, TensorSpec]
    settings: Any = None
    refusal: str | None = None

    @property
    def tasks(self) -> tuple[int, ...]:
        """Forward, then backward."""
        return self.forward + self.backward


_Found = TypeVar("_Found", bound=Match)


@cached_per_graph
def matches(graph: Graph, *rules: Callable[[Flow], Iterator[_Found]]) -> tuple[_Found, ...]:
    """Return the matches of `rules` in the step, in program order of the first task."""
    flow = flow_of(graph)
    found = [match for rule in rules for match in rule(flow)]
    return tuple(sorted(found, key=lambda match: match.forward[0]))
