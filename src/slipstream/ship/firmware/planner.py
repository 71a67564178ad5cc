"""Offsets for buffers that live for a while, so that the memory they need together is least.

Packing rectangles whose place in time is given (dynamic storage allocation). Greedy orders come
first; where none reaches the lower bound, the order of offsets is searched by branch and bound:
lowest buffer first, each as low as those below it allow, gives every packing that cannot be
pushed down. The greedy plan of TensorFlow Lite Micro (largest first, lowest gap that fits) is among
the candidates, so that no plan is above it.

Two buffers that live at once need not be disjoint where an operator reads one in the order in
which it writes the other: `distances` says how far above the start of one the start of the other
must be at least.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Distances = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Buffer:
    """Bytes that are needed from step `first` to step `last`, both included."""

    size: int
    first: int
    last: int

    def meets(self, other: Buffer) -> bool:
        """Whether there is a step at which both live."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Plan:
    """Where buffers lie.

    Attributes:
        offsets: bytes from the start of the arena, one a buffer.
        peak: bytes of the arena.
        bound: bytes that no plan can do without.
        optimal: proved so, by the bound or by search.
    """

    offsets: tuple[int, ...]
    peak: int
    bound: int
    optimal: bool


def plan_memory(
    buffers: Sequence[Buffer],
    *,
    align: int = 16,
    distances: Distances | None = None,
    seconds: float = 1.0,
) -> Plan:
    """The best plan found in `seconds` of the processor, and whether it is proved to be optimal.

    Args:
        align: bytes that offsets are multiples of; sizes are rounded up to it.
        distances: (a, b) to bytes: b may begin so far above a's start, or further, where it
            would else have to begin above a's end; at most a's size.
    """
    problem = _Problem(buffers, align, distances or {})
    plain = _Problem(buffers, align, {})
    deadline = time.process_time() + seconds
    best = min(
        [plain.place(plain.by_size()), *(problem.place(order) for order in problem.orders())],
        key=problem.top,
    )
    bound = problem.bound
    proved = problem.top(best) <= bound
    if not proved:
        best, proved = _Search(problem, best, deadline).run()
    return Plan(tuple(best), problem.top(best), problem.top(best) if proved else bound, proved)


def greedy_plan(buffers: Sequence[Buffer], *, align: int = 16) -> Plan:
    """What TensorFlow Lite Micro plans on the device: the largest first, each as low as it fits."""
    problem = _Problem(buffers, align, {})
    offsets = problem.place(problem.by_size())
    peak = problem.top(offsets)
    return Plan(tuple(offsets), peak, problem.bound, peak == problem.bound)


class _Problem:
    """Buffers, who meets whom, and how far above whom each must begin."""

    def __init__(self, buffers: Sequence[Buffer], align: int, distances: Distances) -> None:
        self.sizes = [-(-one.size // align) * align for one in buffers]
        self.buffers = buffers
        self.steps = 1 + max((one.last for one in buffers), default=-1)
        # By buffer: (other, distance of this above the other, of the other above this).
        self.meeting: list[list[tuple[int, int, int]]] = [[] for _ in buffers]
        # By step: bytes that pairs which may overlap can have in common.
        self.shared = [0] * self.steps
        by_start = sorted(range(len(buffers)), key=lambda index: buffers[index].first)
        live: list[int] = []
        for index in by_start:
            live = [one for one in live if buffers[one].last >= buffers[index].first]
            for other in live:
                above = min(
                    self.sizes[other], _up(distances.get((other, index)), align, self.sizes[other])
                )
                below = min(
                    self.sizes[index], _up(distances.get((index, other)), align, self.sizes[index])
                )
                self.meeting[index].append((other, above, below))
                self.meeting[other].append((index, below, above))
                saved = max(self.sizes[other] - above, self.sizes[index] - below)
                if saved:
                    last = min(buffers[index].last, buffers[other].last)
                    for step in range(buffers[index].first, last + 1):
                        self.shared[step] += saved
            live.append(index)
        self.live = [0] * self.steps
        for size, one in zip(self.sizes, buffers, strict=True):
            for step in range(one.first, one.last + 1):
                self.live[step] += size
        largest = max(self.sizes, default=0)
        self.bound = max([largest, *(a - b for a, b in zip(self.live, self.shared, strict=True))])

    def top(self, offsets: Sequence[int]) -> int:
        """Bytes of an arena for these offsets."""
        return max((a + b for a, b in zip(offsets, self.sizes, strict=True)), default=0)

    def by_size(self) -> list[int]:
        """The largest first, as given among equals."""
        return sorted(range(len(self.sizes)), key=lambda index: -self.sizes[index])

    def orders(self) -> Iterable[list[int]]:
        """Orders in which greedy placing is often good."""
        every = range(len(self.sizes))
        lasting = [one.last - one.first + 1 for one in self.buffers]
        # Breadth: bytes alive at the fullest step of a buffer's life.
        breadth = [
            max((self.live[step] for step in range(one.first, one.last + 1)), default=0)
            for one in self.buffers
        ]
        yield self.by_size()
        yield sorted(every, key=lambda index: (-breadth[index], -self.sizes[index]))
        yield sorted(every, key=lambda index: (-self.sizes[index] * lasting[index], index))
        yield sorted(every, key=lambda index: (-lasting[index], -self.sizes[index]))
        yield sorted(every, key=lambda index: (self.buffers[index].first, -self.sizes[index]))

    def place(self, order: Iterable[int]) -> list[int]:
        """Each in turn at the lowest offset that fits among those placed before."""
        offsets = [-1] * len(self.sizes)
        for index in order:
            placed = [
                (offsets[other], above, below)
                for other, above, below in self.meeting[index]
                if offsets[other] >= 0
            ]
            if not placed:
                offsets[index] = 0
                continue
            # [from, to): where it cannot begin for each of them.
            barred = sorted((at - below + 1, at + above) for at, above, below in placed)
            lowest = 0
            for start, end in barred:
                if lowest < start:
                    break
                lowest = max(lowest, end)
            offsets[index] = lowest
        return offsets


def _up(distance: int | None, align: int, default: int) -> int:
    return default if distance is None else -(-max(distance, 0) // align) * align


class _Search:
    """Branch and bound over the order of offsets, with greedy placing of shuffled orders before."""

    def __init__(self, problem: _Problem, best: list[int], deadline: float) -> None:
        self._problem, self._best, self._deadline = problem, best, deadline
        self._top = problem.top(best)
        self._late = False

    def run(self) -> tuple[list[int], bool]:
        """The best offsets, and whether they are proved to be optimal."""
        now = time.process_time()
        self._shuffle(now + (self._deadline - now) / 4)
        count = len(self._problem.sizes)
        if self._top > self._problem.bound:
            self._branch([-1] * count, set(range(count)), 0)
        return self._best, not self._late

    def _keep(self, offsets: list[int]) -> None:
        top = self._problem.top(offsets)
        if top < self._top:
            self._best, self._top = list(offsets), top

    def _shuffle(self, until: float) -> None:
        """Move one buffer at a time to another place in the order; keep what is no worse."""
        dice = random.Random(0)
        order = min(
            self._problem.orders(), key=lambda one: self._problem.top(self._problem.place(one))
        )
        level = self._problem.top(self._problem.place(order))
        while time.process_time() < until and self._top > self._problem.bound:
            tried = list(order)
            tried.insert(dice.randrange(len(tried)), tried.pop(dice.randrange(len(tried))))
            offsets = self._problem.place(tried)
            top = self._problem.top(offsets)
            if top <= level:
                order, level = tried, top
                self._keep(offsets)

    def _branch(self, offsets: list[int], left: set[int], lowest: int) -> None:
        """Place what comes next in the order of offsets.

        Args:
            left: buffers not placed; all begin at `lowest` or above.
        """
        problem = self._problem
        if not left:
            self._keep(offsets)
            return
        if self._top <= problem.bound:
            return
        if time.process_time() > self._deadline:
            self._late = True
            return
        at = {index: self._lowest(offsets, index) for index in left}
        # All that is left lies above what is placed, and above each other.
        needed = [0] * problem.steps
        floor = [self._top] * problem.steps
        for index in left:
            one = problem.buffers[index]
            size, start = problem.sizes[index], max(at[index], lowest)
            for step in range(one.first, one.last + 1):
                needed[step] += size
                floor[step] = min(floor[step], start)
        for step, bytes_left in enumerate(needed):
            if bytes_left and floor[step] + bytes_left - problem.shared[step] >= self._top:
                return
        # One that would fit wholly below another comes before it.
        limit = min(at[index] + problem.sizes[index] for index in left)
        choices = sorted(
            (index for index in left if lowest <= at[index] < limit),
            key=lambda index: (at[index], -problem.sizes[index]),
        )
        for index in choices:
            offsets[index] = at[index]
            left.remove(index)
            self._branch(offsets, left, at[index])
            left.add(index)
            offsets[index] = -1
            if self._late:
                return

    def _lowest(self, offsets: list[int], index: int) -> int:
        return max(
            (
                offsets[other] + above
                for other, above, _ in self._problem.meeting[index]
                if offsets[other] >= 0
            ),
            default=0,
        )
