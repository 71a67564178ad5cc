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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import InvalidArgumentError, WorkloadError

if TYPE_CHECKING:
    from slipstream.cluster.orders import Order

_GROWTH = 1.05
_BISECTIONS = 40
_TOLERANCE = 1e-9
_POWER_ITERATIONS = 20
# Simulated runs on Fashion-MNIST with fewer updates than this, for each update of delay, ended more
# than 3 points below synchronous ones, at learning rates of 0.005 to 0.15.
_UPDATES_PER_DELAY = 150


@dataclass(frozen=True)
class StableRates:
    """Stable learning rates of the stages of a pipeline, near the present weights.

    Attributes:
        curvature: largest eigenvalue of the Hessian of the loss, by magnitude.
        delays: by stage, the mean age of the weights of a forward pass, in updates.
        rates: by stage, the largest stable rate of plain gradient descent with that delay.
    """

    curvature: float
    delays: tuple[float, ...]
    rates: tuple[float, ...]

    def stay_synchronous(self, updates: int) -> bool:
        """Whether a run of this many updates is expected to lose quality by its delays."""
        return updates < _UPDATES_PER_DELAY * max(self.delays)


def delay_advice(delay: float) -> str:
    """Return what a positive mean delay in updates requires of the training."""
    return (
        f"lower the learning rate: the first stage's stable one is {_sine(delay):.2g}x the "
        "synchronous one on a quadratic; stay synchronous in runs of fewer than "
        f"{math.ceil(_UPDATES_PER_DELAY * delay)} updates"
    )


def _sine(delay: float) -> float:
    return math.sin(math.pi / (4 * delay + 2))


def stable_rates(model: Any, batch: tuple[Any, Any], loss: Any, order: Order) -> StableRates:
    """Return the stable learning rates of a model in a pipeline, by power iteration on a batch.

    Args:
        model: its weights, buffers and gradients are unchanged.
        batch: inputs and targets.
        loss: mean loss of an output and targets.
        order: slots of the stages, for example ``Pipeline(4, 1, "async").order``.

    Raises:
        WorkloadError: the loss has no second derivative.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    curvature = 0.0
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            vector = [torch.randn_like(p) for p in parameters]
            value = loss(torch.func.functional_call(model, buffers, (batch[0],)), batch[1])
        gradients = torch.autograd.grad(value, parameters, create_graph=True)
        for _ in range(_POWER_ITERATIONS):
            norm = torch.stack([v.square().sum() for v in vector]).sum().sqrt().clamp_min(1e-30)
            vector = [v / norm for v in vector]
            products = torch.autograd.grad(
                gradients, parameters, vector, retain_graph=True, materialize_grads=True
            )
            pairs = zip(products, vector, strict=True)
            curvature = abs(sum(float((p * v).sum()) for p, v in pairs))
            vector = list(products)
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise WorkloadError(
            f"the curvature of {type(model).__name__} cannot be computed: {reason}",
            remedy="use operators with second derivatives, and parameters that require gradients",
        ) from error
    delays = tuple(order.delay(stage) for stage in range(order.stages))
    rates = tuple(2.0 / max(curvature, 1e-30) * _sine(delay) for delay in delays)
    return StableRates(curvature, delays, rates)


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
        return 2.0 / curvature * _sine(delay)
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
