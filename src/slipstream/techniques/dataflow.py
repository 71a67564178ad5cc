"""Who made what a task reads, and who reads what it made: the data dependencies of a step.

A storage's number is used again once it is freed, so that every write of a new tensor begins
another *value*; views are looked through.
"""

from __future__ import annotations

from slipstream.graph import Call, Graph


class Dataflow:
    """Values and views of a recorded step.

    Attributes:
        makers: by task: for every input of its call the task that wrote it last; -1 for what was
            there before the step.
        readers: by task: the tasks, views apart, that read what it made, in program order.
        views: by task: the views of what it made.
        looks: tasks that only look at their first input's storage and write nothing.
        waits: by task: those, views apart, that must be over before it begins: they made what it
            reads, or read or made what it writes over.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        n = len(graph)
        self.makers: list[tuple[int, ...]] = [()] * n
        self.readers: list[list[int]] = [[] for _ in range(n)]
        self.views: list[list[int]] = [[] for _ in range(n)]
        self.looks: set[int] = set()
        self.waits: list[set[int]] = [set() for _ in range(n)]
        written: dict[int, int] = {}
        changed: dict[int, int] = {}
        read: dict[int, set[int]] = {}
        for t in range(n):
            call = self.call(t)
            inputs, outputs = self.operands(t)
            if call is None:
                continue
            self.makers[t] = tuple(written.get(storage, -1) for storage in inputs)
            if is_view(call, inputs, outputs):
                self.looks.add(t)
                if self.makers[t][0] >= 0:
                    self.views[self.makers[t][0]].append(t)
                continue
            for maker in sorted(set(self.makers[t]) - {-1}):
                self.readers[maker].append(t)
            for storage in outputs:
                written[storage] = t
            # What writes in place may write to any of its inputs: fused updates do to most.
            over = {*outputs, *(inputs if "!" in call.op else ())}
            self.waits[t] = {changed[one] for one in (*inputs, *over) if one in changed}
            self.waits[t].update(*(read.pop(one, ()) for one in over))
            for storage in inputs:
                read.setdefault(storage, set()).add(t)
            changed.update(dict.fromkeys(over, t))

    def call(self, task: int) -> Call | None:
        """What `task` calls, or None where its tensors are not known."""
        call = self._graph.task(task).call
        if call is None:
            return None
        known = len(self._graph.storages(task)) == len(call.inputs) + len(call.outputs)
        # Tasks that another technique put in have a call, but no storages.
        return call if known else None

    def operands(self, task: int) -> tuple[list[int], list[int]]:
        """Storages of the task's inputs and of its outputs; empty where they are not known."""
        return self._graph.task(task).operands if self.call(task) is not None else ([], [])


def is_view(call: Call, inputs: list[int], outputs: list[int]) -> bool:
    """Whether the call only looks at its first input's storage and writes nothing."""
    return (
        bool(inputs)
        and bool(outputs)
        and "!" not in call.op
        and all(storage == inputs[0] for storage in outputs)
    )
