"""Choose a layout for every tensor so that all operators together take the least time, exactly.

Tensors are variables whose values are layouts; operators are factors: what they take for every
combination of layouts of the tensors they touch. One variable after the other is eliminated: the
factors that mention it are added up and minimised over its layouts, for every choice of its
neighbours. Residual connections, weights that several operators share and layers that follow each
other are variables in several factors, not special cases. The cost is exponential only in how many
tensors meet at once, which is few in a network.

Source: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; the problem: Ivanov et al.,
"Data Movement Is All You Need: A Case Study on Optimizing Transformers", MLSys 2021, section 5,
whose shortest path gives the optimum of a chain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError

Costs = NDArray[np.float64]
# Entries of the largest table that is made: half a gigabyte.
_LARGEST = 1 << 26


@dataclass(frozen=True, eq=False)
class Factor:
    """An operator's cost.

    Attributes:
        tensors: distinct ones that it touches.
        cost: float64, an axis a tensor: what it takes, at its best configuration, for every
            combination of layouts; infinity for what it cannot do.
    """

    tensors: tuple[Hashable, ...]
    cost: Costs


@dataclass(frozen=True)
class Chosen:
    """A layout for every tensor.

    Attributes:
        layouts: by tensor, the number of its layout.
        cost: of all operators together; infinity where no choice is possible.
    """

    layouts: Mapping[Hashable, int]
    cost: float


def select(factors: Sequence[Factor]) -> Chosen:
    """The cheapest layouts of all tensors.

    Raises:
        InvalidArgumentError: a factor's axes are not its tensors', a tensor has no layout or
            different numbers of them, a cost is not a number, or so many tensors meet that the
            tables do not fit into memory.
    """
    layouts = _layouts(factors)
    left = list(factors)
    decided: list[tuple[Hashable, tuple[Hashable, ...], NDArray[np.int64]]] = []
    remaining = dict.fromkeys(layouts)
    constant = 0.0
    while remaining:
        tensor = min(remaining, key=lambda one: _fill(one, left, layouts))
        del remaining[tensor]
        mine = [one for one in left if tensor in one.tensors]
        left = [one for one in left if tensor not in one.tensors]
        others = tuple(dict.fromkeys(t for one in mine for t in one.tensors if t != tensor))
        table = _added(mine, (*others, tensor), layouts)
        decided.append((tensor, others, table.argmin(axis=-1)))
        least = table.min(axis=-1)
        if others:
            left.append(Factor(others, least))
        else:
            constant += float(least)
    chosen: dict[Hashable, int] = {}
    for tensor, others, best in reversed(decided):
        chosen[tensor] = int(best[tuple(chosen[one] for one in others)])
    return Chosen({tensor: chosen[tensor] for tensor in layouts}, constant)


def total(factors: Iterable[Factor], layouts: Mapping[Hashable, int]) -> float:
    """What all operators take with these layouts."""
    return sum(float(one.cost[tuple(layouts[t] for t in one.tensors)]) for one in factors)


def _layouts(factors: Sequence[Factor]) -> dict[Hashable, int]:
    """How many layouts each tensor has."""
    sizes: dict[Hashable, int] = {}
    for one in factors:
        if one.cost.ndim != len(one.tensors) or len(set(one.tensors)) != len(one.tensors):
            raise InvalidArgumentError("factors", f"{one.tensors} have {one.cost.ndim} axes")
        if np.isnan(one.cost).any():
            raise InvalidArgumentError("factors", f"a cost of {one.tensors} is not a number")
        for tensor, count in zip(one.tensors, one.cost.shape, strict=True):
            if not count or sizes.setdefault(tensor, count) != count:
                raise InvalidArgumentError(
                    "factors", f"'{tensor}' has {sizes.get(tensor, 0)} layouts here, {count} there"
                )
    return sizes


def _fill(
    tensor: Hashable, factors: Sequence[Factor], layouts: Mapping[Hashable, int]
) -> tuple[int, int]:
    """Entries of the table that eliminating a tensor makes, and pairs that it joins."""
    near = {t for one in factors if tensor in one.tensors for t in one.tensors}
    size = 1
    for one in near:
        size *= layouts[one]
    return size, len(near)


def _added(
    factors: Sequence[Factor], axes: tuple[Hashable, ...], layouts: Mapping[Hashable, int]
) -> Costs:
    shape = tuple(layouts[one] for one in axes)
    if int(np.prod(shape, dtype=np.float64)) > _LARGEST:
        raise InvalidArgumentError(
            "factors", f"{len(axes)} tensors meet, with {' x '.join(map(str, shape))} layouts",
            remedy="fewer layouts for the tensors that many operators touch",
        )  # fmt: skip
    table = np.zeros(shape)
    for one in factors:
        order = sorted(range(len(one.tensors)), key=lambda n: axes.index(one.tensors[n]))
        spread = [layouts[axis] if axis in one.tensors else 1 for axis in axes]
        table += one.cost.transpose(order).reshape(spread)
    return table
