"""`Uses`: which tasks use a storage, and which allocation has a storage's number when.

All questions are asked of many storages at once: a step of 200 000 tasks has as many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.graph import Graph, kept

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Stretches of one list, asked for by several that may ask for the same.

    Attributes:
        asker: int64 [k], who asked, in ascending order.
        place: int64 [k], where in the list, in ascending order for each asker.
    """

    asker: _Numbers
    place: _Numbers

    @classmethod
    def of(cls, begin: _Numbers, end: _Numbers) -> Spans:
        """The places from `begin` until before `end`, int64 [askers] each; none where not less."""
        counts = np.maximum(end - begin, 0)
        # As far from the stretch's begin as from where its places are written.
        shift = begin - (np.cumsum(counts) - counts)
        return cls(
            np.repeat(np.arange(len(counts)), counts),
            np.repeat(shift, counts) + np.arange(counts.sum()),
        )


class Uses:
    """The tasks that use each storage, and the allocations that have its number.

    A storage's number is used again once it is freed: what counts is who uses it while it lives.

    Attributes:
        storage, task: int64 [k], every use once, by storage and then by task.
    """

    def __init__(self, graph: Graph) -> None:
        # With room for every task, and for what comes after the last.
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
        # By allocation the latest end of those of its storage that are born no later.
        self._latest = np.maximum.accumulate(self._key(storage, self._freed + 1))

    def _key(self, storage: NDArray[np.int32] | _Numbers, task: _Numbers) -> _Numbers:
        """In the order of storages, which may be -1, and then of tasks."""
        return (storage.astype(np.int64) + 1) * self._room + task

    def between(self, storages: _Numbers, first: _Numbers, last: _Numbers) -> Spans:
        """The uses of `storages` from the tasks `first` to `last`: places in `task`.

        Args:
            storages, first, last: int64 [askers].
        """
        return Spans.of(
            np.searchsorted(self._use, self._key(storages, first), side="left"),
            np.searchsorted(self._use, self._key(storages, last), side="right"),
        )

    def among(self, storages: _Numbers, tasks: _Numbers) -> NDArray[np.bool_]:
        """bool [k]: which of all uses are of these `storages` by these `tasks`, in pairs."""
        return np.isin(self._use, self._key(storages, tasks))

    def allocations(self, storages: _Numbers, tasks: _Numbers) -> _Numbers:
        """The first allocation that has each of `storages` while that of `tasks` runs; -1: none.

        Args:
            storages, tasks: int64 [askers].
        """
        first = np.full(len(storages), len(self._order))
        here = np.flatnonzero(storages >= 0)
        place = np.searchsorted(self._born, self._key(storages, tasks + 1)[here], side="right") - 1
        begins = self._key(storages, tasks + 1)
        # Lifetimes of one number may touch: the task that frees it may be followed at once.
        while len(here):
            there = (place >= 0) & (self._latest[place] >= begins[here])
            here, place = here[there], place[there]
            covers = self._freed[place] >= tasks[here]
            first[here[covers]] = np.minimum(first[here[covers]], self._order[place[covers]])
            place = place - 1
        return np.where(first < len(self._order), first, -1)


def sorted_once(numbers: _Numbers) -> _Numbers:
    """Each of `numbers` once, in ascending order."""
    # As `np.unique`, which hashes and is slower where most are distinct.
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


@kept
def uses_of(graph: Graph) -> Uses:
    """Those of `graph`."""
    return Uses(graph)
