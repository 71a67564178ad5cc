"""Plan offsets of buffers with known lifetimes for minimum peak memory.

This is dynamic storage allocation. Greedy orders come first; if none reaches the lower bound,
branch and bound searches the order of offsets: placing the lowest buffer first, each as low as
those below it allow, yields every packing that cannot be pushed down. TensorFlow Lite Micro's plan
(largest first, lowest gap that fits) is among the candidates, so that no plan is worse.

Two live buffers need not be disjoint if an operator reads one in the order in which it writes the
other: `distances` gives the minimum distance between their starts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Distances = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Buffer:
    """Bytes in use from step `first` to step `last`, inclusive."""

    size: int
    first: int
    last: int

    def meets(self, other: Buffer) -> bool:
        """Return whether both are live at some step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets of buffers.

    Attributes:
        offsets: bytes from the start of the arena, per buffer.
        peak: bytes of the arena.
        bound: lower bound of any plan's bytes.
        optimal: whether `peak` is proved minimal, by the bound or by search.
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
) -> MemoryPlan:
    """Return the best plan found in `seconds` of CPU time.

    Args:
        align: alignment of offsets in bytes; sizes are rounded up to it.
        distances: (a, b) to bytes: minimum distance from a's start to b's, if less than a's size.
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
    return MemoryPlan(
        tuple(best), problem.top(best), problem.top(best) if proved else bound, proved
    )


def greedy_plan(buffers: Sequence[Buffer], *, align: int = 16) -> MemoryPlan:
    """Return TensorFlow Lite Micro's plan: largest first, each at the lowest offset that fits."""
    problem = _Problem(buffers, align, {})
    offsets = problem.place(problem.by_size())
    peak = problem.top(offsets)
    return MemoryPlan(tuple(offsets), peak, problem.bound, peak == problem.bound)


class _Problem:
    """Buffers, their conflicts, and the minimum distances between them."""

    def __init__(self, buffers: Sequence[Buffer], align: int, distances: Distances) -> None:
        self.sizes = [-(-buffer.size // align) * align for buffer in buffers]
        self.buffers = buffers
        self.steps = 1 + max((buffer.last for buffer in buffers), default=-1)
        # Per buffer: (other, distance of this above the other, of the other above this).
        self.meeting: list[list[tuple[int, int, int]]] = [[] for _ in buffers]
        # Per step: bytes that overlapping pairs can share.
        self.shared = [0] * self.steps
        by_start = sorted(range(len(buffers)), key=lambda index: buffers[index].first)
        live: list[int] = []
        for index in by_start:
            live = [other for other in live if buffers[other].last >= buffers[index].first]
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
        for size, buffer in zip(self.sizes, buffers, strict=True):
            for step in range(buffer.first, buffer.last + 1):
                self.live[step] += size
        largest = max(self.sizes, default=0)
        self.bound = max([largest, *(a - b for a, b in zip(self.live, self.shared, strict=True))])

    def top(self, offsets: Sequence[int]) -> int:
        return max((a + b for a, b in zip(offsets, self.sizes, strict=True)), default=0)

    def by_size(self) -> list[int]:
        return sorted(range(len(self.sizes)), key=lambda index: -self.sizes[index])

    def orders(self) -> Iterable[list[int]]:
        """Yield orders that often suit greedy placement."""
        every = range(len(self.sizes))
        durations = [buffer.last - buffer.first + 1 for buffer in self.buffers]
        # Breadth: bytes alive at the fullest step of a buffer's life.
        breadth = [
            max((self.live[step] for step in range(buffer.first, buffer.last + 1)), default=0)
            for buffer in self.buffers
        ]
        yield self.by_size()
        yield sorted(every, key=lambda index: (-breadth[index], -self.sizes[index]))
        yield sorted(every, key=lambda index: (-self.sizes[index] * durations[index], index))
        yield sorted(every, key=lambda index: (-durations[index], -self.sizes[index]))
        yield sorted(every, key=lambda index: (self.buffers[index].first, -self.sizes[index]))

    def place(self, order: Iterable[int]) -> list[int]:
        """Place each buffer at the lowest offset that fits among those placed before."""
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
            # [from, to): offsets excluded by each placed buffer.
            excluded = sorted((at - below + 1, at + above) for at, above, below in placed)
            lowest = 0
            for start, end in excluded:
                if lowest < start:
                    break
                lowest = max(lowest, end)
            offsets[index] = lowest
        return offsets


def _up(distance: int | None, align: int, default: int) -> int:
    return default if distance is None else -(-max(distance, 0) // align) * align


class _Search:
    """Branch and bound over the order of offsets, after greedy placement of shuffled orders."""

    def __init__(self, problem: _Problem, best: list[int], deadline: float) -> None:
        self._problem, self._best, self._deadline = problem, best, deadline
        self._top = problem.top(best)
        self._timed_out = False

    def run(self) -> tuple[list[int], bool]:
        now = time.process_time()
        self._shuffle(now + (self._deadline - now) / 4)
        count = len(self._problem.sizes)
        if self._top > self._problem.bound:
            self._branch([-1] * count, set(range(count)), 0)
        return self._best, not self._timed_out

    def _keep(self, offsets: list[int]) -> None:
        top = self._problem.top(offsets)
        if top < self._top:
            self._best, self._top = list(offsets), top

    def _shuffle(self, until: float) -> None:
        """Move single buffers in the order; keep orders that are not worse."""
        dice = random.Random(0)
        order = min(
            self._problem.orders(), key=lambda order: self._problem.top(self._problem.place(order))
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

    def _branch(self, offsets: list[int], remaining: set[int], lowest: int) -> None:
        """Place the next of the `remaining` buffers, which all begin at `lowest` or above."""
        problem = self._problem
        if not remaining:
            self._keep(offsets)
            return
        if self._top <= problem.bound:
            return
        if time.process_time() > self._deadline:
            self._timed_out = True
            return
        at = {index: self._lowest(offsets, index) for index in remaining}
        # Remaining buffers are above placed ones, and above each other.
        needed = [0] * problem.steps
        floor = [self._top] * problem.steps
        for index in remaining:
            buffer = problem.buffers[index]
            size, start = problem.sizes[index], max(at[index], lowest)
            for step in range(buffer.first, buffer.last + 1):
                needed[step] += size
                floor[step] = min(floor[step], start)
        for step, bytes_left in enumerate(needed):
            if bytes_left and floor[step] + bytes_left - problem.shared[step] >= self._top:
                return
        # A buffer that fits entirely below another comes before it.
        limit = min(at[index] + problem.sizes[index] for index in remaining)
        choices = sorted(
            (index for index in remaining if lowest <= at[index] < limit),
            key=lambda index: (at[index], -problem.sizes[index]),
        )
        for index in choices:
            offsets[index] = at[index]
            remaining.remove(index)
            self._branch(offsets, remaining, at[index])
            remaining.add(index)
            offsets[index] = -1
            if self._timed_out:
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
