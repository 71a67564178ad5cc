"""Where the bytes of a step go: what each operator moves, and what would have to move.

Operators without a contraction that agree in their iteration space can run in one kernel, in which
what one hands to the next never leaves the registers. What such a *region* reads from outside and
writes for others had to move; everything else its operators moved beside that was avoidable.

Source: Ivanov et al., "Data Movement Is All You Need: A Case Study on Optimizing Transformers",
MLSys 2021, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.durations.traffic import (
    OperatorClass,
    map_operations,
    operator_class,
    short_name,
    traffic,
)
from slipstream.durations.work import work
from slipstream.graph import Call, Graph

# Larger regions are not raised to a later level: that would take too long to check.
_RAISED = 64
_FUSED = (OperatorClass.ELEMENTWISE, OperatorClass.NORMALIZATION)
# Draw from the generator's stream in an order of their own, or call back into Python: left alone.
_EFFECTS = frozenset({"normal", "uniform", "random", "exponential", "randn", "rand", "randint"})


@dataclass(frozen=True)
class Operation:
    """An operator with the values it reads and writes.

    Attributes:
        task: where it comes from: a task's number, or a place in another list.
        call: what it calls.
        reads: (value, bytes), of every tensor read; a value is what one operator wrote once.
        writes: (value, bytes).
        part: of the step: forward, backward, optimizer; no kernel spans two.
    """

    task: int
    call: Call
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    part: int = 0

    @property
    def moved(self) -> int:
        """Bytes of the kernel by itself."""
        return sum(n for _, n in self.reads) + sum(n for _, n in self.writes)


@dataclass(frozen=True)
class Moved:
    """One operator's part of the step.

    Attributes:
        task: its number.
        kind: its class.
        moved_bytes: inputs read once and outputs written once by this kernel.
        needed_bytes: of these, what crosses the boundary of its region.
        operations: multiplications and additions count one each.
        region: number of the region it can run in with others.
    """

    task: int
    kind: OperatorClass
    moved_bytes: int
    needed_bytes: int
    operations: int
    region: int


def operations_of(graph: Graph) -> tuple[list[Operation], frozenset[int]]:
    """The operators of a recorded step in order, and the values that outlive it.

    A storage gets a new value whenever something is written to it; a view hands on the value.
    """
    current: dict[int, int] = {}
    known = -1

    def value(storage: int) -> int:
        nonlocal known
        if storage < 0 or storage not in current:
            known += 1
            current[storage] = known
        return current[storage]

    operations: list[Operation] = []
    # By value: its storage and the task that wrote it.
    written: dict[int, tuple[int, int]] = {}
    for task in range(len(graph)):
        call = graph.task(task).call
        if call is None:
            continue
        view = graph.task(task)
        inputs, outputs = view.operands
        moved = traffic(call)
        reads = tuple((value(s), n) for s, n in zip(inputs, moved.reads, strict=False) if n)
        writes = []
        for storage, nbytes in zip(outputs, moved.writes, strict=False):
            if nbytes and storage >= 0:
                known += 1
                current[storage] = known
                written[known] = storage, task
                writes.append((known, nbytes))
            elif nbytes:
                known += 1
                writes.append((known, nbytes))
        if moved.extra:
            # Written into inputs: the optimizer's fused kernels. Nobody reads it in this step.
            known += 1
            writes.append((known, moved.extra))
            written[known] = -1, task
        operations.append(Operation(task, call, reads, tuple(writes), int(graph.tasks.phase[task])))
    return operations, _outliving(graph, written)


def _outliving(graph: Graph, written: dict[int, tuple[int, int]]) -> frozenset[int]:
    """Values still in memory when the step ends; all of them where memory was not recorded."""
    memory = graph.memory
    if not len(memory):
        return frozenset(written)
    freed: dict[int, list[tuple[int, int]]] = {}
    for storage, born, end in zip(
        memory.storage.tolist(), memory.producer.tolist(), memory.release.tolist(), strict=True
    ):
        freed.setdefault(storage, []).append((born, end))
    lasting = set()
    for value, (storage, task) in written.items():
        spans = freed.get(storage, [(-1, -1)])
        holds = [end for born, end in spans if born <= task and (end < 0 or end >= task)]
        if not holds or any(end < 0 for end in holds):
            lasting.add(value)
    return frozenset(lasting)


def fusible(call: Call) -> bool:
    """Whether an operator can be a part of a region: it contracts nothing and has no effect."""
    return operator_class(call) in _FUSED and short_name(call) not in _EFFECTS


def iteration_size(call: Call) -> int:
    """Points of its iteration space: elements of its largest tensor."""
    return max((spec.numel for spec in (*call.inputs, *call.outputs)), default=0)


def find_regions(
    operations: Sequence[Operation],
    can: Sequence[bool] | None = None,
    agree: Callable[[int, int], bool] | None = None,
) -> list[int]:
    """The region of each operation, by number; what stands alone has one of its own.

    Two operations share a region where one hands to the other, or both read the same, both can be
    fused, belong to the same part of the step and iterate over as many points. The level of an
    operation is the number of edges on the longest path to it that cannot be fused; only equal
    levels share a region, so that no region waits for itself. What was begun early and is needed
    by nobody before is raised to the level of its first user. Linear in the number of edges.

    Args:
        can: of each operation, whether it can be fused; `fusible` where None.
        agree: whether two operations can share a kernel; `iteration_size` where None.
    """
    able = [fusible(one.call) for one in operations] if can is None else can
    same = agree if agree is not None else _same_size(operations)
    users: dict[int, list[int]] = {}
    for number, one in enumerate(operations):
        for v, _ in one.reads:
            users.setdefault(v, []).append(number)
    region = list(range(len(operations)))
    members = [[number] for number in range(len(operations))]
    level = [0] * len(operations)
    maker: dict[int, int] = {}
    # Readers of a value at a level: siblings.
    readers: dict[tuple[int, int], list[int]] = {}
    part = [one.part for one in operations]

    def fuses(a: int, b: int) -> bool:
        return able[a] and able[b] and part[a] == part[b] and same(a, b)

    def join(a: int, b: int) -> None:
        big, small = sorted((region[a], region[b]), key=lambda r: -len(members[r]))
        if big != small:
            for one in members[small]:
                region[one] = big
            members[big] += members[small]
            members[small] = []

    def raised(one: int, user: int) -> bool:
        """Raise the region of `one` to the level of `user`, where nobody needs it before."""
        inside = members[region[one]]
        if len(inside) > _RAISED:
            return False
        for member in inside:
            for v, _ in operations[member].writes:
                for other in users.get(v, ()):
                    if other >= user or region[other] == region[one]:
                        continue
                    if level[other] < level[user] + (not fuses(member, other)):
                        return False
        for member in inside:
            level[member] = level[user]
        return True

    for number, one in enumerate(operations):
        makers = sorted({maker[v] for v, _ in one.reads if v in maker})
        level[number] = max((level[m] + (not fuses(m, number)) for m in makers), default=0)
        for m in makers:
            if fuses(m, number) and (level[m] == level[number] or raised(m, number)):
                join(m, number)
        if able[number]:
            for v, _ in one.reads:
                siblings = readers.setdefault((v, level[number]), [])
                first = next((s for s in siblings[:4] if fuses(s, number)), None)
                if first is not None and level[first] == level[number]:
                    join(first, number)
                else:
                    siblings.append(number)
        for v, _ in one.writes:
            maker[v] = number
    return region


def _same_size(operations: Sequence[Operation]) -> Callable[[int, int], bool]:
    size = [iteration_size(one.call) for one in operations]
    return lambda a, b: size[a] == size[b]


def analyze(
    operations: Sequence[Operation], lasting: Iterable[int], regions: Sequence[int] | None = None
) -> list[Moved]:
    """What each operation moves and needs; the sum of what is needed is the fused step's traffic.

    Args:
        lasting: values that must be written though nothing here reads them.
        regions: of each operation; `find_regions` where None.
    """
    regions = find_regions(operations) if regions is None else regions
    outliving = set(lasting)
    maker: dict[int, int] = {}
    leaving = set(outliving)
    for number, one in enumerate(operations):
        for v, _ in one.reads:
            if v in maker and regions[maker[v]] != regions[number]:
                leaving.add(v)
        for v, _ in one.writes:
            maker[v] = number
    # The bytes of a value that a region reads: the most that one of its operators reads.
    most: dict[tuple[int, int], int] = {}
    for number, one in enumerate(operations):
        for v, n in one.reads:
            key = regions[number], v
            most[key] = max(most.get(key, 0), n)
    counted: set[tuple[int, int]] = set()
    moves = []
    for number, one in enumerate(operations):
        needed = 0
        for v, _ in one.reads:
            key = regions[number], v
            inside = v in maker and regions[maker[v]] == regions[number]
            if not inside and key not in counted:
                counted.add(key)
                needed += most[key]
        alone = not fusible(one.call)
        needed += sum(n for v, n in one.writes if alone or v in leaving)
        moves.append(
            Moved(
                one.task, operator_class(one.call), one.moved, min(needed, one.moved),
                _arithmetic(one.call), regions[number],
            )
        )  # fmt: skip
    return moves


def with_recomputation(operations: Sequence[Operation], lasting: Iterable[int]) -> list[Operation]:
    """The same operations where later regions compute again what is cheaper to make than to keep.

    A value that one region writes only for others is made again in each of these where what it is
    made from lies in memory anyway and has fewer bytes to read than the value to write and read.
    The masks of dropout are drawn again from a seed, and cost nothing. What contracts is never
    made again.

    Returns:
        Operations that read what is needed in place of what was kept; `analyze` takes them.
    """
    regions = find_regions(operations)
    outliving = set(lasting)
    maker = {v: number for number, one in enumerate(operations) for v, _ in one.writes}
    nbytes = {v: n for one in operations for v, n in (*one.reads, *one.writes)}
    reads = [dict(one.reads) for one in operations]
    users: dict[int, set[int]] = {}
    for number, one in enumerate(operations):
        for v, _ in one.reads:
            users.setdefault(v, set()).add(number)

    def leaves(v: int) -> bool:
        if v in outliving or v not in maker:
            return True
        return any(regions[u] != regions[maker[v]] for u in users.get(v, ()))

    def origins(v: int) -> set[int] | None:
        """Values in memory that `v` is made from; None where it cannot be made again."""
        one = operations[maker[v]]
        if not fusible(one.call):
            return None
        drawn = short_name(one.call) in ("native_dropout", "bernoulli")
        if drawn and v != one.writes[0][0]:
            return set()
        sources: set[int] = set()
        for source, _ in one.reads:
            kept = source not in maker or not fusible(operations[maker[source]].call)
            parts = {source} if kept or (leaves(source) and source != v) else origins(source)
            if parts is None:
                return None
            sources |= parts
        return sources

    for v in sorted(maker, key=lambda value: -nbytes[value]):
        home = regions[maker[v]]
        others = [u for u in users.get(v, ()) if regions[u] != home]
        if v in outliving or not others or not fusible(operations[maker[v]].call):
            continue
        parts = origins(v)
        if parts is None or not all(fusible(operations[u].call) for u in others):
            continue
        gain = nbytes[v]
        for region in {regions[u] for u in others}:
            there = {s for n, r in enumerate(reads) if regions[n] == region for s in r}
            gain += nbytes[v] - sum(nbytes[s] for s in parts - there)
        if gain <= 0:
            continue
        for u in others:
            del reads[u][v]
            reads[u].update({s: nbytes[s] for s in parts})
            users[v].remove(u)
            for s in parts:
                users.setdefault(s, set()).add(u)
    return [
        replace(one, reads=tuple(read.items())) for one, read in zip(operations, reads, strict=True)
    ]


def _arithmetic(call: Call) -> int:
    if operator_class(call) is not OperatorClass.CONTRACTION:
        return map_operations(call)
    known = work(call)
    return known.flops if known is not None else 0


def movement(graph: Graph) -> list[Moved]:
    """Every operator of a recorded step with its bytes and arithmetic, in the step's order."""
    operations, lasting = operations_of(graph)
    return analyze(operations, lasting)


def step_bytes(graph: Graph) -> tuple[int, int]:
    """(moved, needed) bytes of a recorded step."""
    rows = movement(graph)
    return sum(one.moved_bytes for one in rows), sum(one.needed_bytes for one in rows)


def ceiling(contraction_ns: float, total_ns: float) -> float:
    """How many times as fast the step would be if all but its contractions took no time.

    Source: Amdahl, "Validity of the single processor approach", AFIPS 1967.
    """
    return total_ns / contraction_ns if contraction_ns > 0 else float(np.inf)


__all__ = [
    "Moved",
    "Operation",
    "OperatorClass",
    "analyze",
    "ceiling",
    "find_regions",
    "fusible",
    "iteration_size",
    "movement",
    "operations_of",
    "step_bytes",
    "with_recomputation",
]
