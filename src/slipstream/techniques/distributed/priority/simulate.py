"""A step as it would be: what each order and slice would take, from what was measured.

Nothing of a round is on its way when the next one begins. So one round tells the length of a step:
it begins with the backward pass, goes through the forward pass of the next step, and ends where
that one's backward pass begins. A link sends what it was given first; a slice goes over it twice,
to be added up and back, and the next one may leave when there is room. While all ranks compute and
communicate, both are as slow as they were measured to be together.
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

# Seconds; less than this is left of nothing.
_NOTHING = 1e-12
AHEAD = 2
"""Slices on their way together: while the sum of one is awaited, the next one uses the link."""
DDP = "ddp"
ORDERS = ("leader", "p2p", "static", "rs_ag")
# In the place of a unit.
_ALL = -1


class Shares(NamedTuple):
    """What is left of two rates while all ranks compute and communicate on a core each.

    Attributes:
        link: of what the link carries while nobody computes.
        core: of what is computed while nothing is on its way.
    """

    link: float = 1.0
    core: float = 1.0


@dataclass(frozen=True)
class Link:
    """What a message costs: seconds of its own, and a byte.

    Attributes:
        message_s: of each slice in a stream, by order.
        byte_s: of every byte of gradient.
        reduce_message_s, reduce_byte_s: of a whole all-reduce of gloo.
        beside: by order and slices on their way together, and under ``ddp`` and 1 of an
            all-reduce: what communication and computation leave each other; by default all, as
            where there are cores to spare.
    """

    message_s: dict[str, float]
    byte_s: dict[str, float]
    reduce_message_s: float
    reduce_byte_s: float
    beside: dict[tuple[str, int], Shares] = field(default_factory=dict)


@dataclass(frozen=True)
class StepCosts:
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
    ) -> StepCosts:  # fmt: skip
        """From what was timed; updates of all units together are shared out by size."""
        elements = [unit.flat.numel() for unit in units]
        whole = statistics.median(update_s)
        shares = [whole * n / sum(elements) for n in elements]
        return cls(segments, [unit.nbytes for unit in units], shares, elements, busy)

    @property
    def compute_s(self) -> float:
        return sum(s for *_, s in self.segments) + sum(self.update_s)

    def shares(self, link: Link, how: str, ahead: int = 1) -> Shares:
        """What this step's computation and its communication leave each other.

        As measured for the nearest number of slices on their way together.
        """
        known = [of for name, of in link.beside if name == how]
        if not known:
            return Shares()
        near = min(known, key=lambda of: abs(of - ahead))
        return Shares(*(1.0 - self.busy * (1.0 - share) for share in link.beside[how, near]))

    @property
    def released(self) -> list[int]:
        """Units in the order in which their gradients are complete."""
        return [unit for kind, unit, _ in self.segments if kind is Kind.READY]


class Simulated(NamedTuple):
    """A step.

    Attributes:
        step_s: how long it takes.
        order: numbers of slices, as they leave.
    """

    step_s: float
    order: tuple[int, ...]


class _Line:
    """Slices of a round, and a link, each direction of which sends what it was given first.

    Attributes:
        order: numbers of slices, as they left.

    Args:
        slices: (unit, bytes, seconds on the link, both ways together) by number.
        credit: bytes that may be on their way at once, and at least one slice.
        directions: 1: both are alike, each slice takes half of its seconds to be added up and half
            to come back, which it does at once; 2: each slice goes over one of them and comes back
            over the other, each with room of its own, when nothing waits there that is more urgent.
        sequence: (slice, way) in the order in which they leave, each way when there is room; by
            default the most urgent slice leaves first.
    """

    def __init__(
        self, slices: Sequence[tuple[int, float, float]], credit: float, directions: int = 1,
        sequence: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.order: list[int] = []
        self._slices, self._credit, self._sequence = slices, credit, deque(sequence)
        self._in_sequence = bool(sequence)
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in range(directions)]
        self._left_s = [0.0] * directions
        self._left = Counter(unit for unit, *_ in slices)
        self._numbers: dict[int, list[int]] = {}
        for number, (unit, *_) in enumerate(slices):
            self._numbers.setdefault(unit, []).append(number)
        self._ready: set[tuple[int, int]] = set()
        self._waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(directions)]
        self._flying = [0.0] * directions

    def release(self, unit: int, way: int = 0) -> None:
        for number in self._numbers.get(unit, ()):
            self._ready.add((number, way))
            self._wait(number, way)
        self._move()

    def there(self, unit: int) -> bool:
        """Whether all of a unit has arrived, or all of all units."""
        return not (self._left.total() if unit == _ALL else self._left[unit])

    @property
    def next_s(self) -> float:
        """Seconds until something arrives; infinite where nothing is on its way."""
        busy = [s for s, sent in zip(self._left_s, self._sent, strict=True) if sent]
        return min(busy, default=math.inf)

    def send(self, seconds: float) -> None:
        """So many seconds of each direction pass."""
        self._left_s = [s - seconds for s in self._left_s]
        for direction, sent in enumerate(self._sent):
            if sent and self._left_s[direction] <= _NOTHING:
                number, way = sent.popleft()
                self._begin(direction)
                self._arrived(number, way, direction)
        self._move()

    def _arrived(self, number: int, way: int, direction: int) -> None:
        unit, nbytes, _ = self._slices[number]
        if way:
            self._left[unit] -= 1
        elif not self._in_sequence and len(self._sent) == 1:
            self._put(number, 1, direction)
            return
        else:
            self._ready.add((number, 1))
            self._wait(number, 1)
        self._flying[direction] -= nbytes

    def _wait(self, number: int, way: int) -> None:
        waiting = self._waiting[(number + way) % len(self._waiting)]
        heapq.heappush(waiting, (self._slices[number][0], number, way))

    def _move(self) -> None:
        for direction in range(len(self._sent)):
            while not self._flying[direction] or self._flying[direction] < self._credit:
                chosen = self._next(self._waiting[direction])
                if chosen is None:
                    break
                number, way = chosen
                self.order.append(number)
                self._flying[direction] += self._slices[number][1]
                self._put(number, way, direction)

    def _next(self, waiting: list[tuple[int, int, int]]) -> tuple[int, int] | None:
        if self._in_sequence:
            may = self._sequence and self._sequence[0] in self._ready
            return self._sequence.popleft() if may else None
        return heapq.heappop(waiting)[1:] if waiting else None

    def _put(self, number: int, way: int, direction: int) -> None:
        self._sent[direction].append((number, way))
        if len(self._sent[direction]) == 1:
            self._begin(direction)

    def _begin(self, direction: int) -> None:
        if self._sent[direction]:
            number, _ = self._sent[direction][0]
            self._left_s[direction] = self._slices[number][2] * len(self._sent) / 2


class _Do(IntEnum):
    COMPUTE = 0
    RELEASE = 1
    AWAIT = 2


_Work = list[tuple[_Do, float, int]]


def _take(work: _Work, line: _Line, shares: Shares) -> float:
    """Seconds until all is computed, each piece when what it waits for is there."""
    now = 0.0
    for what, seconds, unit in work:
        if what is _Do.RELEASE:
            line.release(unit, int(seconds))
        left = seconds if what is _Do.COMPUTE else 0.0
        while left > _NOTHING or (what is _Do.AWAIT and not line.there(unit)):
            coming, beside = line.next_s, Shares()
            if left > _NOTHING and coming < math.inf:
                beside = shares
            assert left > _NOTHING or coming < math.inf
            passed = min(left / beside.core if left > _NOTHING else math.inf, coming / beside.link)
            now, left = now + passed, left - passed * beside.core
            line.send(passed * beside.link)
    return now


def gated(step: StepCosts, link: Link, order: str, elements: int, ahead: int = AHEAD) -> Simulated:
    """A step in which each unit is awaited by itself.

    Args:
        elements: of a slice.
        ahead: slices that are on their way together.
    """
    slices = []
    for unit, (numel, nbytes) in enumerate(zip(step.elements, step.nbytes, strict=True)):
        for start in range(0, numel, elements):
            part = min(elements, numel - start) / numel * nbytes
            slices.append((unit, part, link.message_s[order] + part * link.byte_s[order]))
    # Computation from the first gradient on, and of the next step up to there.
    before: _Work = []
    after: _Work = []
    # Of several backward passes, the last one's are meant.
    last = {unit: n for n, (kind, unit, _) in enumerate(step.segments) if kind is Kind.READY}
    for place, (kind, unit, seconds) in enumerate(step.segments):
        if kind is Kind.NEEDED:
            after += [(_Do.COMPUTE, seconds, unit), (_Do.AWAIT, 0.0, unit),
                      (_Do.COMPUTE, step.update_s[unit], unit)]  # fmt: skip
        else:
            before.append((_Do.COMPUTE, seconds, unit))
            if last.get(unit) == place:
                before.append((_Do.RELEASE, 0.0, unit))
    before += [(_Do.RELEASE, 0.0, unit) for unit in range(len(step.nbytes)) if unit not in last]
    credit = ahead * elements * max(n / e for n, e in zip(step.nbytes, step.elements, strict=True))
    sequence: list[tuple[int, int]] = []
    if order == "rs_ag":
        numbers = range(len(slices))
        sequence = [(n, 0) for n in sorted(numbers, key=lambda n: last.get(slices[n][0], math.inf))]
        sequence += [(n, 1) for n in numbers]
    line = _Line(slices, credit, 2 if order == "p2p" else 1, sequence)
    # What no place asks for is there before the next backward pass.
    took = _take([*before, *after, (_Do.AWAIT, 0.0, _ALL)], line, step.shares(link, order, ahead))
    return Simulated(took, tuple(line.order))


def barrier(step: StepCosts, link: Link, buckets: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Seconds of a step of DistributedDataParallel.

    Args:
        buckets: parameters, as (unit, bytes); a unit's are ready together.
    """
    ready: set[int] = set()
    work: _Work = []
    waiting = list(range(len(buckets)))
    for kind, unit, seconds in step.segments:
        if kind is Kind.END:
            work += [(_Do.AWAIT, 0.0, _ALL), (_Do.COMPUTE, sum(step.update_s), _ALL)]
        work.append((_Do.COMPUTE, seconds, unit))
        if kind is Kind.READY:
            ready.add(unit)
            full = [n for n in waiting if ready.issuperset(of for of, _ in buckets[n])]
            waiting = [n for n in waiting if n not in full]
            work += [(_Do.RELEASE, 1.0, n) for n in full]
    sums = [sum(nbytes for _, nbytes in bucket) for bucket in buckets]
    # Each goes once, where a slice goes there and back.
    slices = [
        (n, nbytes, 2 * (link.reduce_message_s + nbytes * link.reduce_byte_s))
        for n, nbytes in enumerate(sums)
    ]
    line = _Line(slices, math.inf, sequence=[(n, 1) for n in range(len(buckets))])
    return _take(work, line, step.shares(link, DDP))
