"""Simulation of a step with each order and slice size, from measured costs.

All slices of a round arrive before the next round begins. So a step is simulated as one round, from
the first gradient of the backward pass through the next forward pass to that step's first gradient.
A link is first in, first out; a slice crosses it twice, to be summed and to return, and the next
one leaves when the credit allows. Computation and communication slow each other down as measured.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from slipstream.techniques.distributed.priority.layout import Unit
from slipstream.techniques.distributed.priority.learning import Kind

# Shorter remainders, in seconds, count as zero.
_EPSILON_S = 1e-12
AHEAD = 2
"""Slices in transit: while one is being summed, the next one uses the link."""
DDP = "ddp"
ORDERS = ("leader", "p2p", "static", "rs_ag")
# Number that denotes all units.
_ALL = -1


class Shares(NamedTuple):
    """Shares of the full rates while all ranks compute and communicate on one core each.

    Attributes:
        link: share of the link's rate without computation.
        core: share of the computation's rate without communication.
    """

    link: float = 1.0
    core: float = 1.0


@dataclass(frozen=True)
class Link:
    """Communication costs, in seconds per message and per byte.

    Attributes:
        message_s: cost of each slice in a stream, by order.
        byte_s: cost of each byte of gradients, by order.
        reduce_message_s, reduce_byte_s: costs of a gloo all-reduce.
        contention: shares of the rates that communication and computation retain together, by
            order and number of slices in transit, and by ``ddp`` and 1 for an all-reduce. Missing
            entries mean full rates, as with idle cores.
    """

    message_s: dict[str, float]
    byte_s: dict[str, float]
    reduce_message_s: float
    reduce_byte_s: float
    contention: dict[tuple[str, int], Shares] = field(default_factory=dict)


@dataclass(frozen=True)
class StepCosts:
    """Work of a step, without the network.

    Attributes:
        segments: intervals of computation, as (kind and unit of the event that ends it, seconds).
        nbytes: bytes of each unit.
        update_s: update time of each unit, in seconds.
        elements: elements of each unit.
        busy: share of the computation that occupies a core.
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
    ) -> StepCosts:  # fmt: skip
        """Build costs from timings; the time of a whole update is divided by size."""
        elements = [unit.flat.numel() for unit in units]
        update_total_s = statistics.median(update_s)
        shares = [update_total_s * numel / sum(elements) for numel in elements]
        return cls(segments, [unit.nbytes for unit in units], shares, elements, busy)

    @property
    def compute_s(self) -> float:
        return sum(s for *_, s in self.segments) + sum(self.update_s)

    def shares(self, link: Link, order: str, ahead: int = 1) -> Shares:
        """Return the rates that this step's computation and communication retain together.

        They are those measured for the nearest number of slices in transit.
        """
        measured = [count for name, count in link.contention if name == order]
        if not measured:
            return Shares()
        nearest = min(measured, key=lambda count: abs(count - ahead))
        return Shares(
            *(1.0 - self.busy * (1.0 - share) for share in link.contention[order, nearest])
        )

    @property
    def released(self) -> list[int]:
        """Units in the order in which their gradients become complete."""
        return [unit for kind, unit, _ in self.segments if kind is Kind.READY]


class Simulated(NamedTuple):
    """A simulated step.

    Attributes:
        step_s: time of the step, in seconds.
        order: numbers of slices, in the order in which they are sent.
    """

    step_s: float
    order: tuple[int, ...]


class _SimulatedLink:
    """Slices of a round on a link, each direction of which is first in, first out.

    Attributes:
        order: numbers of slices, in the order in which they were sent.

    Args:
        slices: (unit, bytes, seconds on the link for both ways) by number.
        credit: maximum bytes in transit; at least one slice may always be sent.
        directions: 1: each slice takes half of its time to be summed and half to return, which it
            does immediately. 2: each slice uses one direction and returns over the other, each with
            a separate credit, unless a more urgent slice waits there.
        sequence: (slice, way) in the order of sending, each when the credit allows; by default the
            most urgent slice is sent first. Way 0 is to be summed, way 1 to return.
    """

    def __init__(
        self, slices: Sequence[tuple[int, float, float]], credit: float, directions: int = 1,
        sequence: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.order: list[int] = []
        self._slices, self._credit, self._sequence = slices, credit, deque(sequence)
        self._in_sequence = bool(sequence)
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in range(directions)]
        self._remaining_s = [0.0] * directions
        self._missing = Counter(unit for unit, *_ in slices)
        self._numbers: dict[int, list[int]] = {}
        for number, (unit, *_) in enumerate(slices):
            self._numbers.setdefault(unit, []).append(number)
        self._ready: set[tuple[int, int]] = set()
        self._waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(directions)]
        self._in_transit = [0.0] * directions

    def release(self, unit: int, way: int = 0) -> None:
        for number in self._numbers.get(unit, ()):
            self._ready.add((number, way))
            self._wait(number, way)
        self._move()

    def has_arrived(self, unit: int) -> bool:
        """Return whether a unit, or all units, have arrived."""
        return not (self._missing.total() if unit == _ALL else self._missing[unit])

    @property
    def next_s(self) -> float:
        """Seconds until the next arrival; infinite if nothing is in transit."""
        busy = [s for s, sent in zip(self._remaining_s, self._sent, strict=True) if sent]
        return min(busy, default=math.inf)

    def advance(self, seconds: float) -> None:
        """Advance each direction by `seconds`."""
        self._remaining_s = [s - seconds for s in self._remaining_s]
        for direction, sent in enumerate(self._sent):
            if sent and self._remaining_s[direction] <= _EPSILON_S:
                number, way = sent.popleft()
                self._begin(direction)
                self._arrived(number, way, direction)
        self._move()

    def _arrived(self, number: int, way: int, direction: int) -> None:
        unit, nbytes, _ = self._slices[number]
        if way:
            self._missing[unit] -= 1
        elif not self._in_sequence and len(self._sent) == 1:
            self._put(number, 1, direction)
            return
        else:
            self._ready.add((number, 1))
            self._wait(number, 1)
        self._in_transit[direction] -= nbytes

    def _wait(self, number: int, way: int) -> None:
        waiting = self._waiting[(number + way) % len(self._waiting)]
        heapq.heappush(waiting, (self._slices[number][0], number, way))

    def _move(self) -> None:
        for direction in range(len(self._sent)):
            while not self._in_transit[direction] or self._in_transit[direction] < self._credit:
                chosen = self._next(self._waiting[direction])
                if chosen is None:
                    break
                number, way = chosen
                self.order.append(number)
                self._in_transit[direction] += self._slices[number][1]
                self._put(number, way, direction)

    def _next(self, waiting: list[tuple[int, int, int]]) -> tuple[int, int] | None:
        if self._in_sequence:
            is_ready = self._sequence and self._sequence[0] in self._ready
            return self._sequence.popleft() if is_ready else None
        return heapq.heappop(waiting)[1:] if waiting else None

    def _put(self, number: int, way: int, direction: int) -> None:
        self._sent[direction].append((number, way))
        if len(self._sent[direction]) == 1:
            self._begin(direction)

    def _begin(self, direction: int) -> None:
        if self._sent[direction]:
            number, _ = self._sent[direction][0]
            self._remaining_s[direction] = self._slices[number][2] * len(self._sent) / 2


class _Action(IntEnum):
    COMPUTE = 0
    RELEASE = 1
    AWAIT = 2


_Work = list[tuple[_Action, float, int]]


def _run(work: _Work, simulated: _SimulatedLink, shares: Shares) -> float:
    """Return the seconds until all work is done, including waits."""
    now = 0.0
    for kind, seconds, unit in work:
        if kind is _Action.RELEASE:
            simulated.release(unit, int(seconds))
        remaining_s = seconds if kind is _Action.COMPUTE else 0.0
        while remaining_s > _EPSILON_S or (
            kind is _Action.AWAIT and not simulated.has_arrived(unit)
        ):
            arrival_s, rates = simulated.next_s, Shares()
            if remaining_s > _EPSILON_S and arrival_s < math.inf:
                rates = shares
            assert remaining_s > _EPSILON_S or arrival_s < math.inf
            elapsed = min(
                remaining_s / rates.core if remaining_s > _EPSILON_S else math.inf,
                arrival_s / rates.link,
            )
            now, remaining_s = now + elapsed, remaining_s - elapsed * rates.core
            simulated.advance(elapsed * rates.link)
    return now


def gated(step: StepCosts, link: Link, order: str, elements: int, ahead: int = AHEAD) -> Simulated:
    """Simulate a step in which each unit is awaited separately.

    Args:
        elements: elements per slice.
        ahead: number of slices in transit.
    """
    slices = []
    for unit, (numel, nbytes) in enumerate(zip(step.elements, step.nbytes, strict=True)):
        for start in range(0, numel, elements):
            part = min(elements, numel - start) / numel * nbytes
            slices.append((unit, part, link.message_s[order] + part * link.byte_s[order]))
    # Computation from the first gradient, and that of the next step up to its first gradient.
    before: _Work = []
    after: _Work = []
    # With several backward passes, the last one completes the gradients.
    last_ready = {unit: n for n, (kind, unit, _) in enumerate(step.segments) if kind is Kind.READY}
    for position, (kind, unit, seconds) in enumerate(step.segments):
        if kind is Kind.NEEDED:
            after += [(_Action.COMPUTE, seconds, unit), (_Action.AWAIT, 0.0, unit),
                      (_Action.COMPUTE, step.update_s[unit], unit)]  # fmt: skip
        else:
            before.append((_Action.COMPUTE, seconds, unit))
            if last_ready.get(unit) == position:
                before.append((_Action.RELEASE, 0.0, unit))
    before += [
        (_Action.RELEASE, 0.0, unit) for unit in range(len(step.nbytes)) if unit not in last_ready
    ]
    credit = ahead * elements * max(n / e for n, e in zip(step.nbytes, step.elements, strict=True))
    sequence: list[tuple[int, int]] = []
    if order == "rs_ag":
        numbers = range(len(slices))
        sequence = [
            (n, 0) for n in sorted(numbers, key=lambda n: last_ready.get(slices[n][0], math.inf))
        ]
        sequence += [(n, 1) for n in numbers]
    simulated = _SimulatedLink(slices, credit, 2 if order == "p2p" else 1, sequence)
    # Units that the forward pass does not use arrive before the next backward pass.
    step_s = _run(
        [*before, *after, (_Action.AWAIT, 0.0, _ALL)], simulated, step.shares(link, order, ahead)
    )
    return Simulated(step_s, tuple(simulated.order))


def barrier(step: StepCosts, link: Link, buckets: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return the seconds of a step with DistributedDataParallel.

    Args:
        buckets: parameters of each bucket, as (unit, bytes); those of a unit are ready together.
    """
    ready: set[int] = set()
    work: _Work = []
    unsent = list(range(len(buckets)))
    for kind, unit, seconds in step.segments:
        if kind is Kind.END:
            work += [(_Action.AWAIT, 0.0, _ALL), (_Action.COMPUTE, sum(step.update_s), _ALL)]
        work.append((_Action.COMPUTE, seconds, unit))
        if kind is Kind.READY:
            ready.add(unit)
            full = [n for n in unsent if ready.issuperset(u for u, _ in buckets[n])]
            unsent = [n for n in unsent if n not in full]
            work += [(_Action.RELEASE, 1.0, n) for n in full]
    sums = [sum(nbytes for _, nbytes in bucket) for bucket in buckets]
    # Twice the cost, because a bucket takes one way, each of which takes half of a slice's cost.
    slices = [
        (n, nbytes, 2 * (link.reduce_message_s + nbytes * link.reduce_byte_s))
        for n, nbytes in enumerate(sums)
    ]
    simulated = _SimulatedLink(slices, math.inf, sequence=[(n, 1) for n in range(len(buckets))])
    return _run(work, simulated, step.shares(link, DDP))
