"""`Uses`: the tasks that use a storage, and the allocations that have its number over time.

All queries are vectorised over storages, since a step of 200,000 tasks has as many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.graph import Graph, cached_per_graph

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Intervals of one list, by query; they may overlap.

    Attributes:
        asker: int64 [k], the index of the query, ascending.
        place: int64 [k], the position in the list, ascending for each query.
    """

    asker: _Numbers
    place: _Numbers

    @classmethod
    def of(cls, begin: _Numbers, end: _Numbers) -> Spans:
        """Return the positions in [`begin`, `end`), int64 [queries] each; none if not less."""
        counts = np.maximum(end - begin, 0)
        # Positions in the list minus positions in the result.
        shift = begin - (np.cumsum(counts) - counts)
        return cls(
            np.repeat(np.arange(len(counts)), counts),
            np.repeat(shift, counts) + np.arange(counts.sum()),
        )


class Uses:
    """The tasks that use each storage, and the allocations that have its number.

    The number of a freed storage is reused, so only uses during a lifetime belong to an allocation.

    Attributes:
        storage, task: int64 [k], every use once, by storage and then by task.
    """

    def __init__(self, graph: Graph) -> None:
        # Keys have room for every task and for the end of the step.
        self._room = len(graph) + 2
        tasks = np.repeat(np.arange(len(graph)), np.diff(graph.operand_start))
        self._use = sorted_once(self._key(graph.operands, tasks))
        self.storage, self.task = np.divmod(self._use, self._room)
        self.storage -= 1
        memory = graph.memory
        self._order = np.lexsort((memory.producer, memory.storage))
        storage, freed = memory.storage[self._order], memory.release[self._order].astype(np.int64)
        self._born = self._key(storage, memory.producer[self._order].astype(np.int64) + 1)
        self._freed = np.where(freed < 0, len(graph), freed)
        # By allocation the latest end of the allocations of its storage that begin no later.
        self._latest = np.maximum.accumulate(self._key(storage, self._freed + 1))

    def _key(self, storage: NDArray[np.int32] | _Numbers, task: _Numbers) -> _Numbers:
        """Return sort keys by storage, which may be -1, and then by task."""
        return (storage.astype(np.int64) + 1) * self._room + task

    def between(self, storages: _Numbers, first: _Numbers, last: _Numbers) -> Spans:
        """Return the uses of `storages` from the tasks `first` to `last`: positions in `task`.

        Args:
            storages, first, last: int64 [queries].
        """
        return Spans.of(
            np.searchsorted(self._use, self._key(storages, first), side="left"),
            np.searchsorted(self._use, self._key(storages, last), side="right"),
        )

    def among(self, storages: _Numbers, tasks: _Numbers) -> NDArray[np.bool_]:
        """Return whether each use is one of these pairs of storage and task, bool [k]."""
        return np.isin(self._use, self._key(storages, tasks))

    def allocations(self, storages: _Numbers, tasks: _Numbers) -> _Numbers:
        """Return the first allocation of each storage that is live during each task; -1 for none.

        Args:
            storages, tasks: int64 [queries].
        """
        first = np.full(len(storages), len(self._order))
        open_ = np.flatnonzero(storages >= 0)
        place = np.searchsorted(self._born, self._key(storages, tasks + 1)[open_], side="right") - 1
        begins = self._key(storages, tasks + 1)
        # Lifetimes of one number may touch: the task that frees it may allocate it again.
        while len(open_):
            possible = (place >= 0) & (self._latest[place] >= begins[open_])
            open_, place = open_[possible], place[possible]
            covered = self._freed[place] >= tasks[open_]
            found = open_[covered]
            first[found] = np.minimum(first[found], self._order[place[covered]])
            place = place - 1
        return np.where(first < len(self._order), first, -1)


def sorted_once(numbers: _Numbers) -> _Numbers:
    """Return the distinct `numbers`, ascending."""
    # `np.unique` hashes and is slower if most numbers are distinct.
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


@cached_per_graph
def uses_of(graph: Graph) -> Uses:
    """Return the uses of storages in `graph`."""
    return Uses(graph)
