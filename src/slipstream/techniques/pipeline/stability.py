"""The learning rates at which delayed gradients converge on a quadratic.

With a curvature c, weights w and gradients ``(c + d) u - d v``, where u are the weights of the
forward and v those of the backward pass, asynchronous training is a linear recurrence; it converges
if all roots of its characteristic polynomial are inside the unit circle.

Source: Yang et al., "PipeMare", MLSys 2021, arXiv 1910.05124, lemmas 1 and 2 and technique 2.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError

_GROWTH = 1.05
_BISECTIONS = 40
_TOLERANCE = 1e-9


def largest_stable_rate(
    delay: int, curvature: float = 1.0, discrepancy: float = 0.0, correction: float = 0.0
) -> float:
    """Return the learning rate below which all rates converge.

    Args:
        delay: age of the weights of the forward pass, in updates; those of the backward pass are
            current.
        curvature: largest eigenvalue of the Hessian.
        discrepancy: sensitivity of the gradient to the difference of the two weights.
        correction: decay of the extrapolated weights over the delay; 0 for no correction.

    Raises:
        InvalidArgumentError: a delay that is not an integer of at least 0, a curvature that is not
            positive, a negative discrepancy, or a correction outside [0, 1).
    """
    limits: tuple[tuple[str, Any, type, Callable[[Any], bool]], ...] = (
        ("delay", delay, numbers.Integral, lambda x: x >= 0),
        ("curvature", curvature, numbers.Real, lambda x: 0 < x < math.inf),
        ("discrepancy", discrepancy, numbers.Real, lambda x: 0 <= x < math.inf),
        ("correction", correction, numbers.Real, lambda x: 0 <= x < 1),
    )
    for name, value, kind, valid in limits:
        if not isinstance(value, kind) or not valid(value):
            raise InvalidArgumentError(name, f"{value!r} is outside its range")
    if not discrepancy or not delay:
        return 2.0 / curvature * math.sin(math.pi / (4 * delay + 2))
    rate = 1e-4 / (curvature + discrepancy) / (delay + 1)

    def stable(rate: float) -> bool:
        return _spectral_radius(rate, delay, curvature, discrepancy, correction) <= 1 + _TOLERANCE

    while stable(rate * _GROWTH):
        rate *= _GROWTH
    low, high = rate, rate * _GROWTH
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def _spectral_radius(
    rate: float, delay: int, curvature: float, discrepancy: float, correction: float
) -> float:
    """Return the largest root of the recurrence of w[t] .. w[t - delay] and its mean motion."""
    size = delay + 2
    step = np.zeros((size, size))
    gamma = correction ** (1.0 / delay) if correction else 0.0
    # w[t+1] = w[t] - rate ((c + d) w[t - delay] - d (w[t] - delay * motion)).
    step[0, 0] = 1.0 + rate * discrepancy
    step[0, delay] -= rate * (curvature + discrepancy)
    if correction:
        step[0, delay + 1] = -rate * discrepancy * delay
    step[np.arange(1, delay + 1), np.arange(delay)] = 1.0
    # motion[t+1] = gamma * motion[t] + (1 - gamma) (w[t+1] - w[t]).
    step[delay + 1] = (1 - gamma) * step[0]
    step[delay + 1, 0] -= 1 - gamma
    step[delay + 1, delay + 1] += gamma
    return float(np.abs(np.linalg.eigvals(step)).max())
