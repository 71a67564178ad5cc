"""LARS and LAMB: updates proportional to the norm of each layer's weights, for large batches.

Both compare the norm of a layer's weights with that of a direction. Ranks that hold a part of every
layer sum their squares by `sum_squares`, so that the norms are those of whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.distributed.optimizers import loss_of


def _alone(squares: torch.Tensor) -> torch.Tensor:
    return squares


class Layerwise(torch.optim.Optimizer):
    """Base of optimizers with a separate rate per layer. A layer is a parameter.

    Attributes:
        sum_squares: maps float64 [layers, 2], squared norms of weights and directions, to their
            sums over all ranks that hold parts of these layers.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.sum_squares: Callable[[torch.Tensor], torch.Tensor] = _alone
        for name in ("lr", "weight_decay", "eps"):
            if not 0.0 <= defaults[name] < float("inf"):
                raise InvalidArgumentError(name, f"{defaults[name]} is negative or not finite")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient, and return the closure's loss."""
        loss = loss_of(closure)
        layers = [
            (group, p) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not layers:
            return loss
        directions = [self._direction(p, group) for group, p in layers]
        both = torch.stack(
            [squares(t) for (_, p), d in zip(layers, directions, strict=True) for t in (p, d)]
        ).view(-1, 2)
        norms = self.sum_squares(both).sqrt().tolist()
        for (group, p), direction, (weight, other) in zip(layers, directions, norms, strict=True):
            # Written so that a NaN norm makes the rate NaN, too.
            adapts = group["adapt"] and not (weight == 0.0 or other == 0.0)
            rate = self._rate(group, weight, other) if adapts else 1.0
            self._update(p, group, direction, group["lr"] * rate)
        return loss

    def _direction(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError

    def _rate(self, group: dict[str, Any], weight: float, other: float) -> float:
        """Return the rate of a layer, given the norms of its weights and its direction."""
        raise NotImplementedError

    def _update(
        self, p: torch.Tensor, group: dict[str, Any], direction: torch.Tensor, lr: float
    ) -> None:
        raise NotImplementedError


class Lars(Layerwise):
    """Momentum SGD with a separate rate per layer: LARS.

    With the norms |w| and |g| of a layer's weights and gradient, ``rate = trust |w| / (|g| +
    weight_decay |w| + eps)``, and 1 if a norm is 0; ``v = momentum v + lr rate (g +
    weight_decay w)``, ``w = w - v``. Biases and norms are commonly in a group with
    ``adapt=False`` and no decay.

    Args:
        params: parameters or groups of them.
        lr, momentum, weight_decay: see ``torch.optim.SGD``.
        trust: coefficient of the rate.
        eps: added to the denominator of the rate.
        adapt: whether to adapt the rate, which is 1 otherwise.

    Raises:
        InvalidArgumentError: a setting is negative or not finite.

    Source: You, Gitman, Ginsburg, 2017, arXiv 1708.03888.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0,
        trust: float = 0.001, eps: float = 1e-9, adapt: bool = True,
    ) -> None:  # fmt: skip
        for name, value in (("momentum", momentum), ("trust", trust)):
            if not 0.0 <= value < float("inf"):
                raise InvalidArgumentError(name, f"{value} is negative or not finite")
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust,
            "eps": eps, "adapt": adapt,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _direction(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert p.grad is not None
        return p.grad

    def _rate(self, group: dict[str, Any], weight: float, other: float) -> float:
        rate: float = (
            group["trust"] * weight / (other + group["weight_decay"] * weight + group["eps"])
        )
        return rate

    def _update(
        self, p: torch.Tensor, group: dict[str, Any], direction: torch.Tensor, lr: float
    ) -> None:
        velocity = self.state[p].get("momentum_buffer")
        if velocity is None:
            velocity = self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        velocity.mul_(group["momentum"]).add_(direction, alpha=lr)
        if group["weight_decay"]:
            velocity.add_(p, alpha=lr * group["weight_decay"])
        p.sub_(velocity)


class Lamb(Layerwise):
    """Adam with a separate rate per layer: LAMB.

    With Adam's bias-corrected means m and v, the direction is ``r = m / (sqrt(v) + eps) +
    weight_decay w``, the layer's rate |w| / |r|, and 1 if a norm is 0; ``w = w - lr rate r``.

    Args:
        params: parameters or groups of them.
        lr, betas, eps, weight_decay: see ``torch.optim.AdamW``.
        adapt: whether to adapt the rate, which is 1 otherwise, as for biases and norms.

    Raises:
        InvalidArgumentError: a setting is negative or not finite, or a beta is not below 1.

    Source: You et al., ICLR 2020, arXiv 1904.00962.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.0, adapt: bool = True,
    ) -> None:  # fmt: skip
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise InvalidArgumentError("betas", f"{betas} are not both in [0, 1)")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _direction(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        assert p.grad is not None
        state["step"] += 1
        first, second = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(p.grad, 1.0 - first)
        square.mul_(second).addcmul_(p.grad, p.grad, value=1.0 - second)
        root = square.sqrt().div_((1.0 - second ** state["step"]) ** 0.5).add_(group["eps"])
        direction = torch.div(mean, root, out=root).div_(1.0 - first ** state["step"])
        if group["weight_decay"]:
            direction.add_(p, alpha=group["weight_decay"])
        return direction

    def _rate(self, group: dict[str, Any], weight: float, other: float) -> float:
        return weight / other

    def _update(
        self, p: torch.Tensor, group: dict[str, Any], direction: torch.Tensor, lr: float
    ) -> None:
        p.sub_(direction, alpha=lr)


def squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, float64 []; in float64 so that shards barely change rounding."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square_()
