"""Transfers as fluids with max-min fair rates: a readable form of `native/src/network.cpp`.

``native/src/network.h`` describes the algorithm and why it is exact. Both sum in the same order, so
that their results are bitwise equal.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from slipstream.native.inputs import Flows
from slipstream.native.results import RateChanges

if TYPE_CHECKING:
    from slipstream.native.program import Program

# As in network.cpp.
_EQUAL = 1e-11
_SAME_RATE = 1e-12
_NOTHING = 1e-12
_TOGETHER = 2.0**-42


@dataclass(eq=False)
class _Flow:
    instance: int
    path: list[int]
    left_bytes: float
    weight: float
    rank: int
    since_ns: float
    rate: float = 0.0
    level: float = 0.0  # rate / weight
    bottleneck: int = -1
    new_level: float = 0.0
    new_bottleneck: int = -1
    version: int = 0
    in_set: bool = False
    seeded: bool = False
    place: list[int] = field(default_factory=list)  # per hop: index among the flows of its link


@dataclass(eq=False)
class _Touched:
    """A link as seen by the set that is being solved."""

    link: int
    taken: float = 0.0  # by more urgent classes and by flows outside the set
    residual: float = 0.0  # remaining capacity for flows of the set that are not frozen
    weight: float = 0.0  # total weight of those flows
    old_load: float = 0.0  # of the whole set, at its current rates
    new_load: float = 0.0  # of the whole set, at its new rates
    outside_max: float = 0.0  # highest level of a flow outside the set
    bound_min: float = math.inf  # lowest level of a flow outside with its bottleneck here
    set_max: float = 0.0  # highest new level in the set
    set_min: float = math.inf  # lowest new level of a flow of the set with its bottleneck here
    open: int = 0  # flows of the set that are not frozen
    members: list[_Flow] = field(default_factory=list)


class Transfers:
    """A program's transfers, and those of them that are about to begin.

    Attributes:
        capacity, nbytes: as in `Flows`.
        path: links of each task.
        rank: rank of each task's priority among those of transfers, the most urgent first.
        ranks: number of such priorities.
    """

    def __init__(self, program: Program, flows: Flows) -> None:
        self.tasks = program.tasks
        self.capacity = flows.capacity.tolist()
        self.nbytes = flows.nbytes.tolist()
        hops, offset = flows.path_link.tolist(), flows.path_offset.tolist()
        self.path = [hops[offset[t] : offset[t + 1]] for t in range(self.tasks)]
        priorities = sorted(set(program.priority[flows.nbytes > 0.0].tolist()))
        rank_of = {value: rank for rank, value in enumerate(priorities)}
        self.rank = [rank_of.get(value, 0) for value in program.priority.tolist()]
        self.ranks = len(priorities)
        self.arrived: list[int] = []

    def begin(self, instance: int) -> None:
        """Start the instance at the time of the next `solve`."""
        self.arrived.append(instance)


class Network(Transfers):
    """The flows of one simulation."""

    def __init__(self, program: Program, flows: Flows) -> None:
        super().__init__(program, flows)
        self.weight = flows.weight.tolist()
        self.weighted = any(weight != 1.0 for weight in self.weight)
        self.on: list[list[tuple[_Flow, int]]] = [[] for _ in self.capacity]  # (flow, hop)
        self.ends: list[tuple[float, int, int, _Flow]] = []  # (time, instance, version, flow)
        self.seeds: list[list[_Flow]] = [[] for _ in range(self.ranks)] or [[]]
        self.recorded: list[tuple[float, float, int, int]] = []

    # ---- start and end of flows ---------------------------------------------------------------

    def next_end_ns(self) -> float:
        """Return the end of the next flow if nothing happens before; infinite without flows."""
        while self.ends and self.ends[0][3].version != self.ends[0][2]:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else math.inf

    def take_ended(self, now_ns: float) -> list[int]:
        """Return the instances that end by `now_ns` up to rounding, after removing their flows."""
        ended: list[_Flow] = []
        by_ns = now_ns + now_ns * _TOGETHER
        while self.next_end_ns() <= by_ns:
            ended.append(heapq.heappop(self.ends)[3])
        ended.sort(key=lambda flow: flow.instance)
        freed: dict[int, None] = {}
        for flow in ended:
            flow.version += 1
            for link, hole in zip(flow.path, flow.place, strict=True):
                flows = self.on[link]
                flows[hole] = flows[-1]
                moved, hop = flows[hole]
                moved.place[hop] = hole
                flows.pop()
                freed[link] = None
        for link in freed:
            for flow, _ in self.on[link]:
                if flow.bottleneck == link:
                    self._seed(flow)
        return [flow.instance for flow in ended]

    def changes(self) -> RateChanges:
        """Return every change of a rate or bottleneck."""
        columns = list(zip(*self.recorded, strict=True)) or [(), (), (), ()]
        return RateChanges(
            np.array(columns[0], np.float64),
            np.array(columns[1], np.float64),
            np.array(columns[2], np.int32),
            np.array(columns[3], np.int32),
        )

    def _attach(self, instance: int, now_ns: float) -> None:
        task = instance % self.tasks
        flow = _Flow(
            instance, self.path[task], self.nbytes[task], self.weight[task], self.rank[task], now_ns
        )
        for hop, link in enumerate(flow.path):
            flow.place.append(len(self.on[link]))
            self.on[link].append((flow, hop))
        self._seed(flow)

    def _seed(self, flow: _Flow) -> None:
        if not flow.seeded:
            flow.seeded = True
            self.seeds[flow.rank].append(flow)

    # ---- rates -------------------------------------------------------------------------------

    def solve(self, now_ns: float) -> None:
        """Update all rates after the starts and ends at `now_ns`."""
        for instance in sorted(self.arrived):
            self._attach(instance, now_ns)
        self.arrived.clear()
        for rank in range(len(self.seeds)):
            if self.seeds[rank]:
                self._solve_class(rank, now_ns)

    def _solve_class(self, rank: int, now_ns: float) -> None:
        chosen, self.seeds[rank] = self.seeds[rank], []
        for flow in chosen:
            flow.in_set, flow.seeded = True, False
        while True:
            touched = self._gather(chosen, rank)
            self._fill(chosen, touched)
            joining = self._violators(touched, rank)
            if not joining:
                break
            chosen.extend(joining)
        for flow in chosen:
            flow.in_set = False
            self._set_rate(flow, now_ns)
        if len(self.seeds) > 1:
            for link in touched.values():
                self._seed_below(link, rank)

    def _gather(self, chosen: list[_Flow], rank: int) -> dict[int, _Touched]:
        """Return the links of the set, and their use by other flows."""
        touched: dict[int, _Touched] = {}
        for flow in chosen:
            for link in flow.path:
                if link not in touched:
                    touched[link] = self._look_outside(link, rank)
                seen = touched[link]
                seen.open += 1
                seen.weight += flow.weight
                seen.old_load += flow.rate
                seen.members.append(flow)
        return touched

    def _look_outside(self, link: int, rank: int) -> _Touched:
        seen = _Touched(link)
        for flow, _ in self.on[link]:
            if flow.rank > rank or (flow.rank == rank and flow.in_set):
                continue
            seen.taken += flow.rate
            if flow.rank < rank:
                continue
            seen.outside_max = max(seen.outside_max, flow.level)
            if flow.bottleneck == link:
                seen.bound_min = min(seen.bound_min, flow.level)
        left = self.capacity[link] - seen.taken
        seen.residual = left if left > self.capacity[link] * _NOTHING else 0.0
        return seen

    def _fill(self, chosen: list[_Flow], touched: dict[int, _Touched]) -> None:
        """Fill the set progressively."""
        links = list(touched.values())
        filling = [(link.residual / link.weight, index) for index, link in enumerate(links)]
        heapq.heapify(filling)
        for flow in chosen:
            flow.new_bottleneck = -1
        unfrozen = len(chosen)
        while unfrozen:
            key, index = heapq.heappop(filling)
            full = links[index]
            if full.open == 0:
                continue
            if self.weighted:
                # Subtracting weights one by one leaves a rounding error as large as the heaviest.
                full.weight = 0.0
                for flow in full.members:
                    if flow.new_bottleneck < 0:
                        full.weight += flow.weight
            level = full.residual / full.weight
            if level > key:
                heapq.heappush(filling, (level, index))
                continue
            for flow in full.members:
                if flow.new_bottleneck >= 0:
                    continue
                flow.new_bottleneck, flow.new_level = full.link, level
                rate = level * flow.weight
                for link in flow.path:
                    seen = touched[link]
                    seen.residual = max(0.0, seen.residual - rate)
                    seen.weight -= flow.weight
                    seen.open -= 1
                unfrozen -= 1
        for flow in chosen:
            for link in flow.path:
                seen = touched[link]
                seen.new_load += flow.new_level * flow.weight
                seen.set_max = max(seen.set_max, flow.new_level)
                if flow.new_bottleneck == link:
                    seen.set_min = min(seen.set_min, flow.new_level)

    def _violators(self, touched: dict[int, _Touched], rank: int) -> list[_Flow]:
        """Return flows that lose their certificate by the new levels, or deny one to the set."""
        joining: list[_Flow] = []
        for seen in touched.values():
            load = seen.taken + seen.new_load
            full = load >= self.capacity[seen.link] * (1.0 - _EQUAL)
            top = max(seen.set_max, seen.outside_max) * (1.0 - _EQUAL)
            ceiling = seen.set_min * (1.0 + _EQUAL)
            unbound = seen.bound_min < math.inf and (not full or seen.bound_min < top)
            if not unbound and seen.outside_max <= ceiling:
                continue
            for flow, _ in self.on[seen.link]:
                if flow.rank != rank or flow.in_set:
                    continue
                lost = flow.bottleneck == seen.link and (not full or flow.level < top)
                if lost or flow.level > ceiling:
                    flow.in_set = True
                    joining.append(flow)
        return joining

    def _seed_below(self, seen: _Touched, rank: int) -> None:
        """Seed less urgent flows that have to reduce, or may increase, their rate."""
        slack = self.capacity[seen.link] * _SAME_RATE
        more = seen.new_load > seen.old_load + slack
        if not more and seen.new_load >= seen.old_load - slack:
            return
        for flow, _ in self.on[seen.link]:
            if flow.rank > rank and (more or flow.bottleneck == seen.link):
                self._seed(flow)

    def _set_rate(self, flow: _Flow, now_ns: float) -> None:
        rate = flow.new_level * flow.weight
        moved = flow.bottleneck != flow.new_bottleneck
        flow.bottleneck = flow.new_bottleneck
        unchanged = abs(rate - flow.rate) <= _SAME_RATE * max(rate, flow.rate)
        if not unchanged:
            flow.left_bytes -= flow.rate * (now_ns - flow.since_ns)
            flow.since_ns = now_ns
            flow.rate, flow.level = rate, flow.new_level
            flow.version += 1
            if rate > 0.0:
                end_ns = now_ns + max(0.0, flow.left_bytes) / rate
                heapq.heappush(self.ends, (end_ns, flow.instance, flow.version, flow))
        if moved or not unchanged:
            self.recorded.append((now_ns, flow.rate, flow.instance, flow.bottleneck))
