"""Pairs of kernels of a step that could be fused on a device, and their maximum gain.

Two independent kernels, one memory-bound and one compute-bound, share a multiprocessor: fused they
take at least the time of the longer one, of all their bytes and of all their arithmetic. Every
kernel is in at most one pair, and pairs must not depend on each other in a cycle.

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
from slipstream.techniques.side_by_side.timing import MAX_RATIO

MAX_KERNELS = 400
"""Number of longest kernels of a step that are considered; others gain hardly anything."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step.

    Attributes:
        name: name of its operator.
        alone_ns: its duration.
        memory_ns, compute_ns: minimum time of its bytes and of its arithmetic; the longer is its
            bottleneck.
    """

    name: str
    alone_ns: float
    memory_ns: float
    compute_ns: float

    @property
    def computes(self) -> bool:
        """Whether it is compute-bound."""
        return self.compute_ns > self.memory_ns


@dataclass(frozen=True)
class Match:
    """Two kernels by index, the first before the second in the step.

    Attributes:
        gain_ns: maximum time saved over running them sequentially.
    """

    first: int
    second: int
    gain_ns: float


def together_ns(a: Kernel, b: Kernel) -> float:
    """Return the minimum time of both kernels fused."""
    both = a.memory_ns + b.memory_ns, a.compute_ns + b.compute_ns
    return max(a.alone_ns, b.alone_ns, *both)


def kernels_of(graph: Graph, limits: Limits) -> tuple[list[Kernel], list[frozenset[int]]]:
    """Return the operators of a recorded step as kernels of a device at its limits.

    Returns:
        Kernels in the step's order, and for each the indices of its dependencies: those that wrote
        its inputs, or that read or wrote memory which it overwrites.
    """
    flow = flow_of(graph)
    tasks: list[int] = np.flatnonzero(flow.complete & ~flow.views).tolist()
    number = {task: n for n, task in enumerate(tasks)}
    kernels = [_kernel(graph.task(task), limits) for task in tasks]
    return kernels, [frozenset(number[source] for source in flow.waits[task]) for task in tasks]


def _kernel(task: TaskView, limits: Limits) -> Kernel:
    required = work(task.call) if task.call is not None else None
    if required is None:
        return Kernel(task.name, 0.0, 0.0, 0.0)
    rate = limits.flops_per_s.get(required.dtype)
    memory = required.nbytes / limits.bytes_per_s * 1e9
    compute = required.flops / rate * 1e9 if rate else 0.0
    return Kernel(task.name, max(memory, compute), memory, compute)


def match(kernels: Sequence[Kernel], needs: Sequence[Iterable[int]]) -> list[Match]:
    """Return pairs of nearly maximum total gain, the largest gain first.

    Args:
        needs: indices of the earlier kernels that each kernel depends on.
    """
    before = _all_before(needs)
    longest = sorted(range(len(kernels)), key=lambda n: -kernels[n].alone_ns)[:MAX_KERNELS]
    gain = {
        (a, b): saved_ns
        for a, b in itertools.combinations(sorted(longest), 2)
        if not before[b] >> a & 1 and (saved_ns := _gain(kernels[a], kernels[b])) > 0
    }
    fused = _FusedGraph(needs)
    chosen: list[Match] = []
    for a, b in (*_assigned(kernels, gain), *sorted(gain, key=lambda pair: -gain[pair])):
        if fused.join(a, b):
            chosen.append(Match(a, b, gain[a, b]))
    return sorted(chosen, key=lambda pair: -pair.gain_ns)


def _gain(a: Kernel, b: Kernel) -> float:
    """Return the time saved by fusion, in ns; 0 if it is below the threshold."""
    apart, together = a.alone_ns + b.alone_ns, together_ns(a, b)
    return apart - together if together <= MAX_RATIO * apart else 0.0


def _assigned(
    kernels: Sequence[Kernel], gain: dict[tuple[int, int], float]
) -> list[tuple[int, int]]:
    """Return the best pairs of a compute-bound and another kernel, the largest gain first."""
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
    """Return the transitive dependencies of each kernel as the bits of an integer."""
    before: list[int] = []
    for sources in needs:
        bits = 0
        for n in sources:
            bits |= before[n] | 1 << n
        before.append(bits)
    return before


class _FusedGraph:
    """A graph of kernels of which some are fused, kept acyclic."""

    def __init__(self, needs: Sequence[Iterable[int]]) -> None:
        self._needs = [tuple(sources) for sources in needs]
        self._partner: dict[int, int] = {}

    def join(self, a: int, b: int) -> bool:
        """Fuse two kernels; False if one is in a pair already or the graph would get a cycle."""
        if a in self._partner or b in self._partner:
            return False
        if a in self._dependencies(b) or b in self._dependencies(a):
            return False
        self._partner |= {a: b, b: a}
        return True

    def _dependencies(self, kernel: int) -> set[int]:
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
            # A kernel that depends on one of a pair also depends on the other's dependencies.
            yield partner
            yield from self._needs[partner]
