"""Random networks of operators with layouts to choose, and two other ways to choose them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable

import numpy as np

from slipstream.techniques.fusion.selection import Factor, total


def network(seed: int) -> list[Factor]:
    """A chain of operators with residual connections, shared weights, and ends of one layout."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(3, 7))
    layouts = {f"x{n}": int(rng.integers(2, 4)) for n in range(length + 1)}
    layouts |= {f"w{n}": 2 for n in range(2)}
    layouts[f"x{length}"] = layouts["x0"]
    found = []
    for n in range(length):
        tensors = [f"x{n}", f"x{n + 1}"]
        if rng.random() < 0.4:
            tensors.append(f"w{rng.integers(0, 2)}")
        if n > 1 and rng.random() < 0.5:
            tensors.append(f"x{rng.integers(0, n)}")
        cost = rng.exponential(1.0, [layouts[t] for t in tensors])
        cost[rng.random(cost.shape) < 0.1] = math.inf
        found.append(Factor(tuple(tensors), cost))
    same = np.where(np.eye(layouts["x0"], dtype=bool), 0.0, math.inf)
    return [*found, Factor(("x0", f"x{length}"), same)]


def exhaustive(factors: list[Factor]) -> float:
    """The least cost of all choices there are."""
    layouts = {t: n for one in factors for t, n in zip(one.tensors, one.cost.shape, strict=True)}
    every = itertools.product(*map(range, layouts.values()))
    return min(total(factors, dict(zip(layouts, choice, strict=True))) for choice in every)


def in_order(factors: list[Factor]) -> float:
    """What choosing operator by operator costs, each for what its tensors are bound to by then."""
    bound: dict[Hashable, int] = {}
    for one in factors:
        free = [n for n, t in enumerate(one.tensors) if t not in bound]
        place = tuple(slice(None) if n in free else bound[t] for n, t in enumerate(one.tensors))
        left = np.asarray(one.cost[place])
        best = np.unravel_index(int(left.argmin()), left.shape)
        bound |= {one.tensors[n]: int(k) for n, k in zip(free, best, strict=True)}
    return total(factors, bound)
