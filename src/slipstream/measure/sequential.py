"""Looking at a running experiment without fooling oneself.

An interval that is right once is wrong more often when one keeps looking until it pleases. So
looks happen only at planned block counts, and the total error is shared out among them: the
interval printed at any look holds its level over *all* looks together.

`nominal_error` gives the error a single look may use. The planned looks share `_PLANNED` of it
equally in Pocock's manner (the same critical value at each). Whatever they have not used by the
time the budget is spent belongs to the last look, which is not planned: how many blocks fit into
the budget does not depend on which arm wins.

Source: S. J. Pocock, 1977; K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for
clinical trials", 1983; the recursion is that of Armitage, McPherson and Rowe, 1969.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Share of the error the planned looks may use; the rest waits for the end of the budget.
_PLANNED = 0.8
# Nodes of the numerical integration over the continuation region: 1e-7 of the error.
_NODES = 96
# A critical value that nothing exceeds: 1e-15 of the error.
_NEVER = 8.0
# Looks closer together than this fraction are treated as if that far apart, which errs on the
# safe side (they are less correlated) and keeps the step wider than the nodes' spacing.
_CLOSEST = 0.05


@lru_cache(maxsize=4096)
def nominal_error(
    blocks: int, looks: tuple[int, ...], error: float, *, at_planned_look: bool
) -> float:
    """Two-sided error that one interval at `blocks` may use, `error` being that of all looks.

    Args:
        blocks: paired blocks at this look.
        looks: the planned looks, ascending block counts.
        error: 1 - confidence over all looks together.
        at_planned_look: whether the experiment stopped (or may stop) here because of what it saw;
            False for the end of the budget, which may use all error still unspent.
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
    # The last look's critical value: the total with it reaches `error`. Soon after the looks that
    # used nearly all of it, that is above theirs.
    low, high = 0.0, _NEVER
    for _ in range(40):
        middle = (low + high) / 2
        if _crossing(passed, (critical,) * len(passed), blocks, middle) > error:
            low = middle
        else:
            high = middle
    return _two_sided(high)


@lru_cache(maxsize=256)
def _pocock(looks: tuple[int, ...], error: float) -> float:
    """The critical value that, used at every look, is crossed with probability `error`."""
    low, high = 0.0, _NEVER
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
    """P(|Z| exceeds its critical value at any look) when there is no difference.

    The sum over n blocks is a random walk with variance n; Z = sum / sqrt(n). The density of the
    walk inside all earlier boundaries is carried from look to look on Gauss-Legendre nodes.
    """
    unit_nodes, unit_weights = _gauss_legendre()
    nodes: NDArray[np.float64] = np.zeros(1)
    weights: NDArray[np.float64] = np.ones(1)
    crossed, before = 0.0, 0.0
    for at, critical in zip((*looks, last), (*criticals, last_critical), strict=True):
        look = max(float(at), before * (1 + _CLOSEST))
        bound, step = critical * math.sqrt(look), math.sqrt(look - before)
        outside = _upper((bound - nodes) / step) + _upper((bound + nodes) / step)
        crossed += float(weights @ outside)
        fresh = bound * unit_nodes
        spread = np.exp(-0.5 * ((fresh[:, None] - nodes[None, :]) / step) ** 2)
        density = spread @ weights / (step * math.sqrt(2 * math.pi))
        nodes, weights, before = fresh, density * bound * unit_weights, look
    return crossed


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
