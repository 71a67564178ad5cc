"""Data movement of a step: bytes that each operator moves, and bytes that must move.

Operators without a contraction and with equal iteration spaces can run in one kernel, in which
intermediate values stay in registers. Such a *region* must move what it reads from outside and
writes for others; everything else that its operators move is avoidable.

Source: Ivanov et al., "Data Movement Is All You Need: A Case Study on Optimizing Transformers",
MLSys 2021, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.durations.work import work
from slipstream.graph import Call, Graph
from slipstream.graph.operations import Operation, operations_of
from slipstream.graph.traffic import (
    OperatorClass,
    map_operations,
    operator_class,
    short_name,
)

# Larger regions are not raised to a later level, which would take too long to check.
_MAX_RAISED = 64
_FUSED = (OperatorClass.ELEMENTWISE, OperatorClass.NORMALIZATION)
# Not fused, since the order of draws from the generator would change.
_EFFECTS = frozenset({"normal", "uniform", "random", "exponential", "randn", "rand", "randint"})


@dataclass(frozen=True)
class Moved:
    """Data movement and arithmetic of one operator.

    Attributes:
        task: number of the task.
        kind: class of the operator.
        moved_bytes: inputs read once and outputs written once by its own kernel.
        needed_bytes: the part that crosses the boundary of its region.
        operations: multiplications and additions count one each.
        region: number of the region that it can share with other operators.
    """

    task: int
    kind: OperatorClass
    moved_bytes: int
    needed_bytes: int
    operations: int
    region: int


def fusible(call: Call) -> bool:
    """Whether an operator can be part of a region: no contraction and no side effect."""
    return operator_class(call) in _FUSED and short_name(call) not in _EFFECTS


def iteration_size(call: Call) -> int:
    """Return the size of the iteration space: the elements of the largest tensor."""
    return max((spec.numel for spec in (*call.inputs, *call.outputs)), default=0)


def find_regions(
    operations: Sequence[Operation],
    can: Sequence[bool] | None = None,
    agree: Callable[[int, int], bool] | None = None,
) -> list[int]:
    """Assign each operation the number of its region; a lone operation has its own.

    Two operations share a region if one reads the other's output or both read the same value, both
    can be fused, and they have the same part of the step and the same iteration size. The level of
    an operation is the maximum number of edges that cannot be fused on a path to it. Only equal
    levels share a region, so that regions have no cycles. An operation without earlier users is
    raised to the level of its first user. Linear in the number of edges.

    Args:
        can: per operation, whether it can be fused; None for `fusible`.
        agree: whether two operations can share a kernel; None for equal `iteration_size`.
    """
    able = [fusible(operation.call) for operation in operations] if can is None else can
    same = agree if agree is not None else _same_size(operations)
    users: dict[int, list[int]] = {}
    for number, operation in enumerate(operations):
        for v, _ in operation.reads:
            users.setdefault(v, []).append(number)
    region = list(range(len(operations)))
    members = [[number] for number in range(len(operations))]
    level = [0] * len(operations)
    maker: dict[int, int] = {}
    # Readers of a value by its level.
    readers: dict[tuple[int, int], list[int]] = {}
    part = [operation.part for operation in operations]

    def fuses(a: int, b: int) -> bool:
        return able[a] and able[b] and part[a] == part[b] and same(a, b)

    def join(a: int, b: int) -> None:
        big, small = sorted((region[a], region[b]), key=lambda r: -len(members[r]))
        if big != small:
            for member in members[small]:
                region[member] = big
            members[big] += members[small]
            members[small] = []

    def raised(operation: int, user: int) -> bool:
        """Raise the operation's region to the level of `user` if it has no earlier users."""
        inside = members[region[operation]]
        if len(inside) > _MAX_RAISED:
            return False
        for member in inside:
            for v, _ in operations[member].writes:
                for other in users.get(v, ()):
                    if other >= user or region[other] == region[operation]:
                        continue
                    if level[other] < level[user] + (not fuses(member, other)):
                        return False
        for member in inside:
            level[member] = level[user]
        return True

    for number, operation in enumerate(operations):
        makers = sorted({maker[v] for v, _ in operation.reads if v in maker})
        level[number] = max((level[m] + (not fuses(m, number)) for m in makers), default=0)
        for m in makers:
            if fuses(m, number) and (level[m] == level[number] or raised(m, number)):
                join(m, number)
        if able[number]:
            for v, _ in operation.reads:
                siblings = readers.setdefault((v, level[number]), [])
                first = next((s for s in siblings[:4] if fuses(s, number)), None)
                if first is not None and level[first] == level[number]:
                    join(first, number)
                else:
                    siblings.append(number)
        for v, _ in operation.writes:
            maker[v] = number
    return region


def _same_size(operations: Sequence[Operation]) -> Callable[[int, int], bool]:
    size = [iteration_size(operation.call) for operation in operations]
    return lambda a, b: size[a] == size[b]


def analyze(
    operations: Sequence[Operation], lasting: Iterable[int], regions: Sequence[int] | None = None
) -> list[Moved]:
    """Return moved and needed bytes per operation; the needed ones are the fused step's traffic.

    Args:
        lasting: values that must be written even if no operation reads them.
        regions: per operation; None for `find_regions`.
    """
    regions = find_regions(operations) if regions is None else regions
    outliving = set(lasting)
    maker: dict[int, int] = {}
    leaving = set(outliving)
    for number, operation in enumerate(operations):
        for v, _ in operation.reads:
            if v in maker and regions[maker[v]] != regions[number]:
                leaving.add(v)
        for v, _ in operation.writes:
            maker[v] = number
    # Bytes of a value that a region reads: the maximum over its operators.
    max_bytes: dict[tuple[int, int], int] = {}
    for number, operation in enumerate(operations):
        for v, n in operation.reads:
            key = regions[number], v
            max_bytes[key] = max(max_bytes.get(key, 0), n)
    counted: set[tuple[int, int]] = set()
    moves = []
    for number, operation in enumerate(operations):
        needed = 0
        for v, _ in operation.reads:
            key = regions[number], v
            inside = v in maker and regions[maker[v]] == regions[number]
            if not inside and key not in counted:
                counted.add(key)
                needed += max_bytes[key]
        alone = not fusible(operation.call)
        needed += sum(n for v, n in operation.writes if alone or v in leaving)
        moves.append(
            Moved(
                operation.task, operator_class(operation.call), operation.moved,
                min(needed, operation.moved), _arithmetic(operation.call), regions[number],
            )
        )  # fmt: skip
    return moves


def _arithmetic(call: Call) -> int:
    if operator_class(call) is not OperatorClass.CONTRACTION:
        return map_operations(call)
    call_work = work(call)
    return call_work.flops if call_work is not None else 0


def movement(graph: Graph) -> list[Moved]:
    """Return bytes and arithmetic of every operator of a recorded step, in order."""
    operations, lasting = operations_of(graph)
    return analyze(operations, lasting)


def ceiling(contraction_ns: float, total_ns: float) -> float:
    """Return the speed-up of the step if everything but its contractions took no time.

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
]
