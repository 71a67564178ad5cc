"""Tasks taken out of a graph: who allocates, frees and waits for what in their place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.memory import Allocations
from slipstream.graph.values import Edges

if TYPE_CHECKING:
    from slipstream.graph.graph import Graph

_Edge = tuple[int, int, int, float, int]


class Heirs:
    """Who allocates and frees what removed tasks did.

    Args:
        removed: bool [tasks].
        new_index: int64 [tasks and inserted ones], their numbers in the edited graph.
        order: int64 [edited tasks], the task each stands for or was put in beside.
    """

    def __init__(
        self,
        graph: Graph,
        removed: NDArray[np.bool_],
        new_index: NDArray[np.int64],
        order: NDArray[np.int64],
    ) -> None:
        self._graph = graph
        self._new_index = new_index
        self._anchor = order
        self._gone = np.zeros(len(new_index) + 1, bool)  # -1 is not a task
        self._gone[: len(removed)] = removed

    def hand_on(self, memory: Allocations) -> Allocations:
        """`memory` of the edited graph."""
        orphans = np.flatnonzero(self._gone[memory.producer])
        needed = np.ones(len(memory), bool)
        needed[orphans] = self._needed(memory.take(orphans))
        kept = memory.take(np.flatnonzero(needed))
        producer, release = self._after(kept.producer), self._before(kept.release)
        release = np.where(kept.release >= 0, np.maximum(release, producer), -1)
        return replace(kept, producer=producer.astype(np.int32), release=release.astype(np.int32))

    def _needed(self, orphans: Allocations) -> NDArray[np.bool_]:
        """Whether a kept task uses what these, whose producers are removed, hold."""
        graph, release, storage = self._graph, orphans.release, orphans.storage.astype(np.int64)
        wanted = np.zeros(max(graph.operands.max(initial=-1), storage.max(initial=-1)) + 2, bool)
        wanted[storage[storage >= 0]] = True
        found = np.flatnonzero(wanted[graph.operands])
        users = np.searchsorted(graph.operand_start, found, side="right") - 1
        # In ascending order, with room for every task behind each storage.
        room = len(graph) + 1
        uses = graph.operands[found].astype(np.int64) * room + users
        uses = np.sort(uses[~self._gone[users]])
        # A storage's number is used again once it is freed: only uses while it lives count.
        first = np.searchsorted(uses, storage * room + orphans.producer, side="left")
        last = np.searchsorted(uses, storage * room + release, side="right")
        unknown = ~self._gone[release] & (release != orphans.producer)
        return (release < 0) | np.where(storage < 0, unknown, first < last)

    def _after(self, tasks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Their numbers; of removed ones that of the next on the lane, or else of the last."""
        return self._numbers(tasks, "left", 0)

    def _before(self, tasks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Their numbers; of removed ones that of the one before on the lane, or of the first."""
        return self._numbers(tasks, "right", -1)

    def _numbers(
        self, tasks: NDArray[np.int32], side: Literal["left", "right"], step: int
    ) -> NDArray[np.int64]:
        numbers = np.append(self._new_index, -1)[tasks]  # -1 stays -1
        gone = np.flatnonzero(self._gone[tasks])
        lane_of = self._graph.tasks.lane
        for one in np.unique(lane_of[tasks[gone]]):
            here = gone[lane_of[tasks[gone]] == one]
            lane = np.flatnonzero(lane_of[self._anchor] == one)
            place = np.searchsorted(self._anchor[lane], tasks[here], side=side) + step
            numbers[here] = lane[np.clip(place, 0, len(lane) - 1)] if len(lane) else -1
        return numbers


class Links:
    """The edges at tasks that are to be removed, taken away one task at a time."""

    def __init__(self, edges: Edges, lane: NDArray[np.int32], removed: NDArray[np.bool_]) -> None:
        self._touched = removed[edges.source] | removed[edges.target]
        self._edges = edges
        self._removed = np.flatnonzero(removed).tolist()
        self._into: dict[int, list[_Edge]] = {}
        self._from: dict[int, list[_Edge]] = {}
        # By task the one before it on its lane, and the one after; -1 where there is none.
        self._before, self._after = np.full((2, len(lane)), -1)
        for e in np.flatnonzero(self._touched):
            self._add(
                (
                    int(edges.source[e]), int(edges.target[e]), int(edges.kind[e]),
                    float(edges.delay_ns[e]), int(edges.lag[e]),
                )
            )  # fmt: skip
        in_lanes = np.argsort(lane, kind="stable")
        earlier, later = in_lanes[:-1], in_lanes[1:]
        same = lane[earlier] == lane[later]
        self._before[later[same]], self._after[earlier[same]] = earlier[same], later[same]

    def _add(self, edge: _Edge) -> None:
        self._from.setdefault(edge[0], []).append(edge)
        self._into.setdefault(edge[1], []).append(edge)

    def bridged(self) -> Edges:
        """The edges without the removed tasks."""
        for task in self._removed:
            self._take_away(task)
        extra = [edge for found in self._from.values() for edge in found]
        kept = self._edges.take(np.flatnonzero(~self._touched))
        return kept.joined(Edges.of(*zip(*extra, strict=True))) if extra else kept

    def _take_away(self, task: int) -> None:
        causes = [edge for edge in self._into.pop(task, []) if edge[0] != task]
        effects = [edge for edge in self._from.pop(task, []) if edge[1] != task]
        for edge in causes:
            self._from[edge[0]].remove(edge)
        for edge in effects:
            self._into[edge[1]].remove(edge)
        before, after = int(self._before[task]), int(self._after[task])
        for source, _, in_kind, in_delay, in_lag in causes:
            for _, target, kind, delay, lag in effects:
                # Two steps of lag are more than an edge can say; one is the stricter.
                self._add((source, target, kind, in_delay + delay, in_lag | lag))
            if after >= 0:
                self._add((source, after, in_kind, in_delay, in_lag))
        if before >= 0:
            for _, target, kind, delay, lag in effects:
                self._add((before, target, kind, delay, lag))
            self._after[before] = after
        if after >= 0:
            self._before[after] = before
