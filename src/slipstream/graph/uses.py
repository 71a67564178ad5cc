"""`Uses`: which tasks use a storage, and which allocation has a storage's number when."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from slipstream.graph.graph import Graph, kept


class Uses:
    """The tasks that use each storage, and the allocations that have its number.

    A storage's number is used again once it is freed: what counts is who uses it while it lives.
    """

    def __init__(self, graph: Graph) -> None:
        tasks = np.repeat(np.arange(len(graph)), np.diff(graph.operand_start))
        storages = graph.operands.astype(np.int64)
        pairs = np.unique(storages * max(len(graph), 1) + tasks)
        storage_of, task_of = np.divmod(pairs, max(len(graph), 1))
        ends = np.flatnonzero(np.diff(storage_of, append=-2)) + 1
        self._tasks: dict[int, list[int]] = {
            int(storage_of[first]): task_of[first:end].tolist()
            for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False)
        }
        self._allocations = _allocations(graph)

    def between(self, storage: int, first: int, last: int) -> Sequence[int]:
        """Tasks from `first` to `last` that use `storage`, in order, each once."""
        found = self._tasks.get(storage, [])
        return found[bisect_left(found, first) : bisect_right(found, last)]

    def allocation(self, storage: int, task: int) -> int | None:
        """The first allocation that has this number while `task` runs."""
        if storage not in self._allocations:
            return None
        numbers, born, freed, latest = self._allocations[storage]
        found = None
        place = bisect_right(born, task) - 1
        # Lifetimes of one number may touch: the task that frees it may be followed at once.
        while place >= 0 and latest[place] >= task:
            if freed[place] >= task and (found is None or numbers[place] < found):
                found = numbers[place]
            place -= 1
        return found


_Lives = tuple[list[int], list[int], list[int], list[int]]


def _allocations(graph: Graph) -> dict[int, _Lives]:
    """By storage: allocations by the task that makes them, that, the one that frees, the latest."""
    memory = graph.memory
    freed = np.where(memory.release < 0, len(graph), memory.release)
    order = np.lexsort((memory.producer, memory.storage))
    ends = np.flatnonzero(np.diff(memory.storage[order], append=-2)) + 1
    found: dict[int, _Lives] = {}
    for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False):
        here = order[first:end]
        last = freed[here].tolist()
        lives = (here.tolist(), memory.producer[here].tolist(), last, list(accumulate(last, max)))
        found[int(memory.storage[here[0]])] = lives
    found.pop(-1, None)
    return found


@kept
def uses_of(graph: Graph) -> Uses:
    """Those of `graph`."""
    return Uses(graph)
