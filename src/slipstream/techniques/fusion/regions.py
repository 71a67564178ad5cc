"""Which operations of a step or of a traced graph become kernels.

The regions of `durations.movement` that have loops; an operation at which the loops of one fail is
left alone and the regions are found anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.durations.movement import Operation, find_regions, iteration_size
from slipstream.techniques.fusion.loops import UnsupportedError
from slipstream.techniques.fusion.lowering import (
    DROPOUT,
    JOIN,
    Region,
    RegionOp,
    can_lower,
    lower,
    reduces_columns,
)

# Below, calling a kernel takes longer than the operators it replaces.
_FEWEST_ELEMENTS = 1 << 12
_ALONE = frozenset({
    DROPOUT, "gelu", "gelu_backward", "native_layer_norm_backward", "silu", "silu_backward",
})  # fmt: skip
_COPIES = frozenset({"clone", "_to_copy", "alias", "detach"})


@dataclass(frozen=True)
class Found:
    """Regions with loops.

    Attributes:
        members: of each region, the numbers of its operations.
        left: operators that stay alone, with the reason, of those that were tried.
    """

    regions: tuple[Region, ...]
    members: tuple[tuple[int, ...], ...]
    left: tuple[tuple[str, str], ...]


def find(
    operations: Sequence[Operation], steps: Sequence[RegionOp], leaving: Iterable[int]
) -> Found:
    """The regions of `operations` that have loops.

    Args:
        steps: of each operation.
        leaving: values that must be written, whoever reads them here.
    """
    outside = set(leaving)
    can = [can_lower(step) for step in steps]
    left: list[tuple[str, str]] = []
    users: dict[int, set[int]] = {}
    for n, step in enumerate(steps):
        for v in step.inputs:
            users.setdefault(v, set()).add(n)
    alone = [iteration_size(step.call) for step in steps]
    # Most groups are the same again where one of them failed.
    lowered: dict[tuple[tuple[int, ...], tuple[int, ...]], Region] = {}
    while True:
        sizes = _sizes(steps, alone, can, users)
        able = [there and size >= _FEWEST_ELEMENTS for there, size in zip(can, sizes, strict=True)]
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
                guilty = group[error.operation if error.operation >= 0 else -1]
                can[guilty], failed = False, True
                left.append((steps[guilty].name, str(error)))
        if not failed:
            return Found(tuple(r for r, _ in regions), tuple(m for _, m in regions), tuple(left))


def _agree(sizes: Sequence[int], a: int, b: int) -> bool:
    return sizes[a] == sizes[b]


def _sizes(
    steps: Sequence[RegionOp],
    alone: Sequence[int],
    can: Sequence[bool],
    users: Mapping[int, Collection[int]],
) -> list[int]:
    """Points of the loops that each operator is a part of: its own, or more.

    What has a number for every row belongs to the loops that made it by reducing them, and what
    makes a part of a tensor to those that put the parts together.

    Args:
        alone: `iteration_size` of each.
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
    """Whether one kernel of these saves anything."""
    real = [step for step in steps if step.name not in _COPIES]
    alone = any(step.name in _ALONE for step in real)
    return len(real) > 1 or alone or (len(real) == 1 and len(steps) > 1)
