"""Group sequential testing: valid intervals for repeated looks at a running experiment.

Stopping a run as soon as an interval looks good inflates its error. Looks therefore happen only at
planned block counts and share the total error, so that the interval printed at any look holds its
level over *all* looks together.

`nominal_error` returns the error that a single look may use. The planned looks use `_PLANNED` of
the total with Pocock's boundary (the same critical value at each). The final look at the end of the
budget may use the unspent error. It is not planned, since the number of blocks that fit the budget
does not depend on which arm wins.

Source: S. J. Pocock, 1977; K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for
clinical trials", 1983; the recursion is that of Armitage, McPherson and Rowe, 1969.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Share of the error for the planned looks; the rest is reserved for the end of the budget.
_PLANNED = 0.8
# Nodes of the numerical integration over the continuation region; relative error 1e-7.
_NODES = 96
# Upper bound of critical values, exceeded with probability 1e-15.
_MAX_CRITICAL = 8.0
# Minimum relative distance of looks: closer ones are treated as this far apart, which is
# conservative (less correlation) and keeps the step wider than the nodes' spacing.
_MIN_DISTANCE = 0.05


@lru_cache(maxsize=4096)
def nominal_error(
    blocks: int, looks: tuple[int, ...], error: float, *, at_planned_look: bool
) -> float:
    """Return the two-sided error that one interval at `blocks` may use.

    Args:
        blocks: Paired blocks at this look.
        looks: Planned looks, ascending block counts.
        error: 1 - confidence over all looks together.
        at_planned_look: Whether the samples determine (or may determine) the stop at this look;
            False for the end of the budget, which may use all unspent error.
    """
    planned = tuple(look for look in looks if look > 0)
    if not planned:
        return error
    critical = _pocock(planned, _PLANNED * error)
    if at_planned_look:
        return _two_sided(critical)
    passed = tuple(look for look in planned if look < blocks)
    if not passed:
        return error
    # Solve for the last look's critical value, at which the total reaches `error`. Shortly after a
    # planned look it exceeds theirs.
    low, high = 0.0, _MAX_CRITICAL
    for _ in range(40):
        middle = (low + high) / 2
        if _crossing(passed, (critical,) * len(passed), blocks, middle) > error:
            low = middle
        else:
            high = middle
    return _two_sided(high)


@lru_cache(maxsize=256)
def _pocock(looks: tuple[int, ...], error: float) -> float:
    """Return the critical value that, used at every look, is crossed with probability `error`."""
    low, high = 0.0, _MAX_CRITICAL
    for _ in range(40):
        middle = (low + high) / 2
        total = _crossing(looks[:-1], (middle,) * (len(looks) - 1), looks[-1], middle)
        if total > error:
            low = middle
        else:
            high = middle
    return high


def _crossing(
    looks: tuple[int, ...], criticals: tuple[float, ...], last: int, last_critical: float
) -> float:
    """Return P(|Z| exceeds its critical value at any look) under the null hypothesis.

    The sum over n blocks is a random walk with variance n; Z = sum / sqrt(n). The density of the
    walk inside all earlier boundaries is propagated between looks on Gauss-Legendre nodes.
    """
    unit_nodes, unit_weights = _gauss_legendre()
    nodes: NDArray[np.float64] = np.zeros(1)
    weights: NDArray[np.float64] = np.ones(1)
    crossing_probability, before = 0.0, 0.0
    for at, critical in zip((*looks, last), (*criticals, last_critical), strict=True):
        look = max(float(at), before * (1 + _MIN_DISTANCE))
        bound, step = critical * math.sqrt(look), math.sqrt(look - before)
        outside = _upper((bound - nodes) / step) + _upper((bound + nodes) / step)
        crossing_probability += float(weights @ outside)
        fresh = bound * unit_nodes
        spread = np.exp(-0.5 * ((fresh[:, None] - nodes[None, :]) / step) ** 2)
        density = spread @ weights / (step * math.sqrt(2 * math.pi))
        nodes, weights, before = fresh, density * bound * unit_weights, look
    return crossing_probability


@lru_cache(maxsize=1)
def _gauss_legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return np.asarray(nodes, np.float64), np.asarray(weights, np.float64)


def _upper(z: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.special import ndtr

    tail: NDArray[np.float64] = ndtr(-z)
    return tail


def _two_sided(critical: float) -> float:
    return math.erfc(critical / math.sqrt(2))
