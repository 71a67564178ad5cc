"""Which kernels of a step could run side by side on a device, and what that would gain at most.

Two kernels that do not wait for each other, one bound by memory and one by arithmetic, share a
multiprocessor: together they take no less than the longer one, than all their bytes and than all
their arithmetic. Every kernel is in one pair at most, and no pairs may wait for each other.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; pairs are an assignment
(Kuhn, "The Hungarian method for the assignment problem", 1955) between the two kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from slipstream.durations.roofline import Limits
from slipstream.durations.work import work
from slipstream.graph import Graph, TaskView
from slipstream.graph.flow import flow_of
from slipstream.techniques.side_by_side.timing import MOST

MOST_KERNELS = 400
"""The longest so many of a step are looked at; the others would gain next to nothing."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step.

    Attributes:
        name: of its operator.
        alone_ns: how long it takes.
        memory_ns, compute_ns: what its bytes and its arithmetic alone would take; the longer says
            what it is bound by.
    """

    name: str
    alone_ns: float
    memory_ns: float
    compute_ns: float

    @property
    def computes(self) -> bool:
        """Whether arithmetic binds it."""
        return self.compute_ns > self.memory_ns


@dataclass(frozen=True)
class Match:
    """Two kernels by number, the first before the second in the step.

    Attributes:
        gain_ns: less than both one after the other, at most.
    """

    first: int
    second: int
    gain_ns: float


def together_ns(a: Kernel, b: Kernel) -> float:
    """The least time of both in one kernel."""
    both = a.memory_ns + b.memory_ns, a.compute_ns + b.compute_ns
    return max(a.alone_ns, b.alone_ns, *both)


def kernels_of(graph: Graph, limits: Limits) -> tuple[list[Kernel], list[frozenset[int]]]:
    """The operators of a recorded step as kernels of a device at its limits.

    Returns:
        Kernels in the step's order, and for each the numbers of those it waits for: that made
        what it reads, or read or made what it overwrites.
    """
    flow = flow_of(graph)
    tasks: list[int] = np.flatnonzero(flow.complete & ~flow.views).tolist()
    number = {task: n for n, task in enumerate(tasks)}
    kernels = [_kernel(graph.task(task), limits) for task in tasks]
    return kernels, [frozenset(number[one] for one in flow.waits[task]) for task in tasks]


def _kernel(task: TaskView, limits: Limits) -> Kernel:
    known = work(task.call) if task.call is not None else None
    if known is None:
        return Kernel(task.name, 0.0, 0.0, 0.0)
    rate = limits.flops_per_s.get(known.dtype)
    memory = known.nbytes / limits.bytes_per_s * 1e9
    compute = known.flops / rate * 1e9 if rate else 0.0
    return Kernel(task.name, max(memory, compute), memory, compute)


def match(kernels: Sequence[Kernel], needs: Sequence[Iterable[int]]) -> list[Match]:
    """Pairs that gain most together, by what they gain.

    Args:
        needs: of each kernel, numbers of earlier ones that it waits for.
    """
    before = _all_before(needs)
    longest = sorted(range(len(kernels)), key=lambda n: -kernels[n].alone_ns)[:MOST_KERNELS]
    gain = {
        (a, b): gained
        for a, b in itertools.combinations(sorted(longest), 2)
        if not before[b] >> a & 1 and (gained := _gain(kernels[a], kernels[b])) > 0
    }
    merged = _Merged(needs)
    chosen: list[Match] = []
    for a, b in (*_assigned(kernels, gain), *sorted(gain, key=lambda pair: -gain[pair])):
        if merged.join(a, b):
            chosen.append(Match(a, b, gain[a, b]))
    return sorted(chosen, key=lambda one: -one.gain_ns)


def _gain(a: Kernel, b: Kernel) -> float:
    """What both in one kernel would save, where that is worth it."""
    apart, together = a.alone_ns + b.alone_ns, together_ns(a, b)
    return apart - together if together <= MOST * apart else 0.0


def _assigned(
    kernels: Sequence[Kernel], gain: dict[tuple[int, int], float]
) -> list[tuple[int, int]]:
    """The best pairs of one kernel that computes and one that does not, the largest gain first."""
    sides: tuple[list[int], list[int]] = [], []
    for n in sorted({n for pair in gain for n in pair}):
        sides[kernels[n].computes].append(n)
    if not all(sides):
        return []
    gains = np.array([[gain.get((min(a, b), max(a, b)), 0.0) for b in sides[1]] for a in sides[0]])
    rows, columns = linear_sum_assignment(gains, maximize=True)
    pairs = [(sides[0][r], sides[1][c]) for r, c in zip(rows, columns, strict=True) if gains[r, c]]
    return sorted(((min(p), max(p)) for p in pairs), key=lambda pair: -gain[pair])


def _all_before(needs: Sequence[Iterable[int]]) -> list[int]:
    """Of each kernel, the set of all that it waits for, as the bits of a number."""
    before: list[int] = []
    for one in needs:
        bits = 0
        for n in one:
            bits |= before[n] | 1 << n
        before.append(bits)
    return before


class _Merged:
    """Kernels of which some are one: a graph that must stay without cycles."""

    def __init__(self, needs: Sequence[Iterable[int]]) -> None:
        self._needs = [tuple(one) for one in needs]
        self._partner: dict[int, int] = {}

    def join(self, a: int, b: int) -> bool:
        """Make one of two kernels; False where one is in a pair, or would wait for itself."""
        if a in self._partner or b in self._partner:
            return False
        if a in self._waited_for(b) or b in self._waited_for(a):
            return False
        self._partner |= {a: b, b: a}
        return True

    def _waited_for(self, kernel: int) -> set[int]:
        seen: set[int] = set()
        todo = list(self._needs[kernel])
        while todo:
            n = todo.pop()
            if n not in seen:
                seen.add(n)
                todo += self._sources(n)
        return seen

    def _sources(self, n: int) -> Iterator[int]:
        yield from self._needs[n]
        partner = self._partner.get(n)
        if partner is not None:
            # Whoever waits for one of a pair waits for all that the other waits for.
            yield partner
            yield from self._needs[partner]
