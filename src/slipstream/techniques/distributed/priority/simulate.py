"""A step on the event engine: what each order and slice would take, from what was measured.

Computation is one lane, in the order in which it ran; the network is another, whose policy is the
order. A slice is ready when its unit's gradients are; a unit is needed in the next step when its
last slice and its update are done.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.native._program import Edges, Flows, Policy, Program
from slipstream.native.engine import simulate
from slipstream.techniques.distributed.priority.layout import Unit
from slipstream.techniques.distributed.priority.learning import Kind

_STEPS, _FIRST = 12, 4
# A link has to have an end to its rate.
_LEAST_BYTE_S = 1e-15
# So much of a rate is all of it, and what a transfer goes through.
_WHOLE = 0.98
_THREAD, _CORE, _LINK = range(3)
DDP = "ddp"
ORDERS = ("leader", "p2p", "static", "rs_ag")


@dataclass(frozen=True)
class Link:
    """What a message costs: seconds of its own, and a byte.

    Attributes:
        message_s: of each slice in a stream, by order.
        byte_s: of every byte of gradient.
        reduce_message_s, reduce_byte_s: of a whole all-reduce of gloo.
        beside: by order, and under ``ddp`` of an all-reduce: which share of its rate is left while
            all ranks compute on a core each; 1 where there are cores to spare, and by default.
    """

    message_s: dict[str, float]
    byte_s: dict[str, float]
    reduce_message_s: float
    reduce_byte_s: float
    beside: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What one step does, without the network.

    Attributes:
        segments: stretches of computation, each with what ends it.
        nbytes: of each unit.
        update_s: of each unit.
        elements: of each unit.
        busy: share of the computation in which it needs a core; the rest is slept, or elsewhere.
    """

    segments: Sequence[tuple[Kind, int, float]]
    nbytes: Sequence[int]
    update_s: Sequence[float]
    elements: Sequence[int]
    busy: float = 0.0

    @classmethod
    def of(
        cls, segments: Sequence[tuple[Kind, int, float]], units: Sequence[Unit],
        update_s: Sequence[float], busy: float = 0.0,
    ) -> Step:  # fmt: skip
        """From what was timed; updates of all units together are shared out by size."""
        elements = [unit.flat.numel() for unit in units]
        whole = statistics.median(update_s)
        shares = [whole * n / sum(elements) for n in elements]
        return cls(segments, [unit.nbytes for unit in units], shares, elements, busy)

    @property
    def compute_s(self) -> float:
        """Computation and updates."""
        return sum(s for *_, s in self.segments) + sum(self.update_s)

    def left(self, link: Link, how: str) -> float:
        """Share of the link's rate that is left while this step computes."""
        return 1.0 - self.busy * (1.0 - link.beside.get(how, 1.0))

    @property
    def released(self) -> list[int]:
        """Units in the order in which their gradients are complete."""
        return [unit for kind, unit, _ in self.segments if kind is Kind.READY]


@dataclass
class _Tasks:
    """Tasks of a step: computation on lane 0, slices on the other lanes, all over one link."""

    lane: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, lane: int, seconds: float, priority: int = 0, nbytes: float = 0.0) -> int:
        self.lane.append(lane)
        self.seconds.append(seconds)
        self.priority.append(priority)
        self.nbytes.append(nbytes)
        return len(self.lane) - 1

    def period_s(self, policy: Policy, byte_s: float, left: float) -> float:
        """Seconds from step to step, once they are all alike.

        Args:
            left: share of the link's rate while lane 0 computes.
        """
        src, dst, lag = (np.array(row) for row in zip(*self.edges, strict=True))
        lane, seconds, nbytes = np.array(self.lane), np.array(self.seconds), np.array(self.nbytes)
        rate = 1e-9 / max(byte_s, _LEAST_BYTE_S)
        computes = (lane == 0) & (left < _WHOLE)
        # A core is a link, too: computation, which goes first, has all of it but what is left.
        nbytes[computes] = 1e9 * rate * seconds[computes]
        seconds[computes] = 0.0
        paths = [
            [] if not moved else [_THREAD, _CORE] if of == 0 else [_CORE, _LINK]
            for of, moved in zip(lane.tolist(), (nbytes > 0.0).tolist(), strict=True)
        ]
        flows = Flows(
            np.array([rate, rate * (1.0 + left), rate]),
            np.cumsum([0, *map(len, paths)]),
            np.array([hop for path in paths for hop in path], np.int32),
            nbytes,
        )
        program = Program(
            lane, 1e9 * seconds, priority=np.array(self.priority) + (lane > 0),
            policies=np.array([Policy.FIXED, *[policy] * max(self.lane)]), steps=_STEPS,
            edges=Edges(src, dst, lag=lag), flows=flows,
        )  # fmt: skip
        ends = simulate(program).step_end_ns
        return float(ends[-1] - ends[_FIRST]) / (_STEPS - 1 - _FIRST) * 1e-9


def gated(step: Step, link: Link, order: str, elements: int, ahead: int = 1) -> float:
    """Seconds of a step in which each unit is awaited by itself.

    Args:
        elements: of a slice.
        ahead: slices that are on their way together, and share the link.
    """
    tasks = _Tasks()
    message_s, byte_s = link.message_s[order], link.byte_s[order]
    ready: dict[int, int] = {}
    updates: dict[int, int] = {}
    for kind, unit, seconds in step.segments:
        made = tasks.add(0, seconds)
        if kind is Kind.NEEDED:
            updates[unit] = tasks.add(0, step.update_s[unit])
        elif kind is Kind.READY:
            ready[unit] = made
    slices = [
        (unit, n / step.elements[unit] * step.nbytes[unit])
        for unit in step.released
        for n in _cut(step.elements[unit], elements)
    ]
    # What no place asks for is updated before the next step begins.
    gate = {unit: updates.get(unit, 0) for unit in ready}
    if order == "rs_ag":
        first = [
            tasks.add(1 + n % ahead, message_s / 2, nbytes=nbytes / 2)
            for n, (_, nbytes) in enumerate(slices)
        ]
        needed = sorted(range(len(slices)), key=lambda n: slices[n][0])
        for place, n in enumerate(needed):
            unit, nbytes = slices[n]
            second = tasks.add(1 + place % ahead, message_s / 2, nbytes=nbytes / 2)
            tasks.edges += [(ready[unit], first[n], 0), (first[n], second, 0),
                            (second, gate[unit], 1)]  # fmt: skip
        return tasks.period_s(Policy.FIXED, byte_s, step.left(link, order))
    for n, (unit, nbytes) in enumerate(slices):
        one = tasks.add(1 + n % ahead, message_s, unit, nbytes)
        tasks.edges += [(ready[unit], one, 0), (one, gate[unit], 1)]
    return tasks.period_s(Policy.PRIORITY, byte_s, step.left(link, order))


def barrier(step: Step, link: Link, buckets: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Seconds of a step of DistributedDataParallel.

    Args:
        buckets: parameters, as (unit, bytes); a unit's are ready together.
    """
    tasks = _Tasks()
    ready: dict[int, int] = {}
    for kind, unit, seconds in step.segments[:-1]:
        made = tasks.add(0, seconds)
        if kind is Kind.READY:
            ready[unit] = made
    update = tasks.add(0, sum(step.update_s))
    tasks.add(0, step.segments[-1][2])
    for bucket in buckets:
        one = tasks.add(1, link.reduce_message_s, nbytes=sum(nbytes for _, nbytes in bucket))
        tasks.edges.append((one, update, 0))
        units = dict.fromkeys(unit for unit, _ in bucket)
        tasks.edges += [(ready[unit], one, 0) for unit in units if unit in ready]
    return tasks.period_s(Policy.FIXED, link.reduce_byte_s, step.left(link, DDP))


def static_order(
    step: Step, link: Link, slices: Sequence[tuple[int, float]], ahead: int = 1
) -> list[int]:
    """In which order slices (unit, bytes) leave if the most urgent that is ready always does."""
    now = 0.0
    coming: list[tuple[float, int]] = []
    for kind, unit, seconds in step.segments:
        now += seconds
        if kind is Kind.READY:
            coming += [(now, n) for n, (of, _) in enumerate(slices) if of == unit]
    order: list[int] = []
    waiting: list[tuple[int, int]] = []
    free = [0.0] * ahead
    place = 0
    while len(order) < len(coming):
        begin = heapq.heappop(free)
        if not waiting and place < len(coming):
            begin = max(begin, coming[place][0])
        while place < len(coming) and coming[place][0] <= begin:
            number = coming[place][1]
            heapq.heappush(waiting, (slices[number][0], number))
            place += 1
        _, number = heapq.heappop(waiting)
        order.append(number)
        taken = link.message_s["static"] + slices[number][1] * link.byte_s["static"]
        heapq.heappush(free, begin + ahead * taken)
    return order


def _cut(elements: int, most: int) -> list[int]:
    return [min(most, elements - start) for start in range(0, elements, most)]
