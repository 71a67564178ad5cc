"""`Operation`: an operator call with the values that it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.graph.call import Call
from slipstream.graph.graph import Graph
from slipstream.graph.traffic import traffic


@dataclass(frozen=True)
class Operation:
    """An operator with the values it reads and writes.

    Attributes:
        task: number of the task, or index in another list.
        call: the operator call.
        reads: (value, bytes) of every tensor read; each write of a tensor creates a new value.
        writes: (value, bytes) of every tensor written.
        part: phase of the step, such as forward or backward; no kernel spans two.
    """

    task: int
    call: Call
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    part: int = 0

    @property
    def moved(self) -> int:
        """Bytes read and written by the operator's own kernel."""
        return sum(n for _, n in self.reads) + sum(n for _, n in self.writes)


def operations_of(graph: Graph) -> tuple[list[Operation], frozenset[int]]:
    """Return the operators of a recorded step in order, and the values that outlive it.

    Every write to a storage creates a new value; a view has the value of its base.
    """
    current: dict[int, int] = {}
    last_value = -1

    def value(storage: int) -> int:
        nonlocal last_value
        if storage < 0 or storage not in current:
            last_value += 1
            current[storage] = last_value
        return current[storage]

    operations: list[Operation] = []
    # Storage and writing task of each value.
    written: dict[int, tuple[int, int]] = {}
    for task in range(len(graph)):
        call = graph.task(task).call
        if call is None:
            continue
        view = graph.task(task)
        inputs, outputs = view.operands
        moved = traffic(call)
        reads = tuple((value(s), n) for s, n in zip(inputs, moved.reads, strict=False) if n)
        writes = []
        for storage, nbytes in zip(outputs, moved.writes, strict=False):
            if nbytes and storage >= 0:
                last_value += 1
                current[storage] = last_value
                written[last_value] = storage, task
                writes.append((last_value, nbytes))
            elif nbytes:
                last_value += 1
                writes.append((last_value, nbytes))
        if moved.extra:
            # Fused optimizer kernels write into inputs, which are not read again in this step.
            last_value += 1
            writes.append((last_value, moved.extra))
            written[last_value] = -1, task
        operations.append(Operation(task, call, reads, tuple(writes), int(graph.tasks.phase[task])))
    return operations, _outliving(graph, written)


def _outliving(graph: Graph, written: dict[int, tuple[int, int]]) -> frozenset[int]:
    """Return the values in memory at the end of the step; all if memory was not recorded."""
    memory = graph.memory
    if not len(memory):
        return frozenset(written)
    freed: dict[int, list[tuple[int, int]]] = {}
    for storage, born, end in zip(
        memory.storage.tolist(), memory.producer.tolist(), memory.release.tolist(), strict=True
    ):
        freed.setdefault(storage, []).append((born, end))
    lasting = set()
    for value, (storage, task) in written.items():
        spans = freed.get(storage, [(-1, -1)])
        ends = [end for born, end in spans if born <= task and (end < 0 or end >= task)]
        if not ends or any(end < 0 for end in ends):
            lasting.add(value)
    return frozenset(lasting)
