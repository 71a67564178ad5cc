"""Select the operations of a step or a traced graph that become kernels.

These are the regions of `durations.movement` that can be lowered to loops. If lowering fails at an
operation, that operation is excluded and the regions are found again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.codegen.rows import UnsupportedError
from slipstream.durations.movement import find_regions, iteration_size
from slipstream.graph.operations import Operation
from slipstream.techniques.fusion.lowering import (
    DROPOUT,
    JOIN,
    Region,
    RegionOp,
    can_lower,
    lower,
    reduces_columns,
)

# For fewer elements, calling a kernel takes longer than the operators it replaces.
_MIN_ELEMENTS = 1 << 12
_ALONE = frozenset({
    DROPOUT, "gelu", "gelu_backward", "native_layer_norm_backward", "silu", "silu_backward",
})  # fmt: skip
_COPIES = frozenset({"clone", "_to_copy", "alias", "detach"})


@dataclass(frozen=True)
class Found:
    """Regions that can be lowered to loops.

    Attributes:
        members: per region, the indices of its operations.
        rejected: (operator, reason) of operators at which lowering failed.
    """

    regions: tuple[Region, ...]
    members: tuple[tuple[int, ...], ...]
    rejected: tuple[tuple[str, str], ...]


def find(
    operations: Sequence[Operation], steps: Sequence[RegionOp], leaving: Iterable[int]
) -> Found:
    """Find the regions of `operations` that can be lowered to loops.

    Args:
        steps: a step per operation.
        leaving: values that must be written even if no other operation reads them.
    """
    outside = set(leaving)
    can = [can_lower(step) for step in steps]
    rejected: list[tuple[str, str]] = []
    users: dict[int, set[int]] = {}
    for n, step in enumerate(steps):
        for v in step.inputs:
            users.setdefault(v, set()).add(n)
    alone = [iteration_size(step.call) for step in steps]
    # After a failure most groups stay the same.
    lowered: dict[tuple[tuple[int, ...], tuple[int, ...]], Region] = {}
    while True:
        sizes = _sizes(steps, alone, can, users)
        able = [ok and size >= _MIN_ELEMENTS for ok, size in zip(can, sizes, strict=True)]
        groups: dict[int, list[int]] = {}
        agree = partial(_agree, sizes)
        for n, number in enumerate(find_regions(operations, able, agree)):
            if able[n]:
                groups.setdefault(number, []).append(n)
        regions: list[tuple[Region, tuple[int, ...]]] = []
        failed = False
        for group in map(tuple, groups.values()):
            inside = set(group)
            if not worth_it([steps[n] for n in group]):
                continue
            outputs = [v for n in group for v in steps[n].outputs]
            makes = tuple(v for v in outputs if v in outside or users.get(v, set()) - inside)
            try:
                if (group, makes) not in lowered:
                    lowered[group, makes] = lower([steps[n] for n in group], makes)
                regions.append((lowered[group, makes], group))
            except UnsupportedError as error:
                culprit = group[error.operation if error.operation >= 0 else -1]
                can[culprit], failed = False, True
                rejected.append((steps[culprit].name, str(error)))
        if not failed:
            return Found(
                tuple(r for r, _ in regions), tuple(m for _, m in regions), tuple(rejected)
            )


def _agree(sizes: Sequence[int], a: int, b: int) -> bool:
    return sizes[a] == sizes[b]


def _sizes(
    steps: Sequence[RegionOp],
    alone: Sequence[int],
    can: Sequence[bool],
    users: Mapping[int, Collection[int]],
) -> list[int]:
    """Return the size of the iteration space that each operator shares.

    An operator on a value per row shares the space of the reduction that made it; one on a part of
    a tensor shares the space of the concatenation.

    Args:
        alone: `iteration_size` of each operator.
    """
    sizes = list(alone)
    maker = {v: n for n, step in enumerate(steps) if can[n] for v in step.outputs}
    for n, step in enumerate(steps):
        if not can[n]:
            continue
        for v, spec in zip(step.inputs, step.call.inputs, strict=True):
            m = maker.get(v, n)
            if spec.numel == alone[n] < sizes[m] and (
                sizes[m] > alone[m] or reduces_columns(steps[m])
            ):
                sizes[n] = sizes[m]
    for n in reversed(range(len(steps))):
        if not can[n]:
            continue
        after = {u for v in steps[n].outputs for u in users.get(v, ())}
        larger = {sizes[u] for u in after}
        grown = all(
            can[u] and sizes[u] > alone[n] and (alone[u] == alone[n] or steps[u].name == JOIN)
            for u in after
        )
        if grown and len(larger) == 1:
            sizes[n] = larger.pop()
    return sizes


def worth_it(steps: Sequence[RegionOp]) -> bool:
    """Whether a single kernel saves anything over these operators."""
    real = [step for step in steps if step.name not in _COPIES]
    alone = any(step.name in _ALONE for step in real)
    return len(real) > 1 or alone or (len(real) == 1 and len(steps) > 1)
