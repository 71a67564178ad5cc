"""Fake quantization: codes in the forward pass, straight-through gradients in the backward pass.

Sources: straight-through estimator: Bengio et al., "Estimating or Propagating Gradients Through
Stochastic Neurons for Conditional Computation", 2013; learned step: Esser et al., "Learned Step
Size Quantization", ICLR 2020.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from slipstream.quant.format import Granularity
from slipstream.quant.grid import MIN_SCALE, Grid


def fake_quantize(values: Any, grid: Grid) -> Any:
    """Round `values` to `grid`; float32, same shape.

    The gradient is 1 for numbers within the grid's range, and 0 outside.

    Raises:
        InvalidArgumentError: the grid has another shape.
    """
    scale, zero = grid.spread(tuple(values.shape))
    low, high = grid.format.low - zero, grid.format.high - zero
    return _round_to_grid(values, scale, low, high)


class FakeQuantize(nn.Module):
    """A grid whose scale is learned with the weights (LSQ); its zero point is fixed.

    The parameter is the scale's logarithm: the scale stays positive, and optimizers that normalize
    gradients, such as Adam, change it by a relative amount.

    Args:
        grid: initial grid.
        learn: whether the scale is learned.

    Attributes:
        log_scale: float32 of the grid's shape, natural logarithms.
        zero: int32 of the same shape.
    """

    log_scale: torch.Tensor
    zero: torch.Tensor

    def __init__(self, grid: Grid, *, learn: bool = True) -> None:
        super().__init__()
        self.format = grid.format
        self.granularity = grid.granularity
        start = grid.scale.detach().log()
        if learn:
            self.log_scale = nn.Parameter(start)
        else:
            self.register_buffer("log_scale", start)
        self.register_buffer("zero", grid.zero.detach().clone())

    @property
    def scale(self) -> torch.Tensor:
        """Scales, float32 of the grid's shape."""
        return self.log_scale.exp().clamp(min=MIN_SCALE)

    @property
    def grid(self) -> Grid:
        """The current grid."""
        return Grid(self.format, self.scale.detach(), self.zero.clone(), self.granularity)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Round `values` to the grid; float32, same shape."""
        shape = tuple(values.shape)
        zero = self.granularity.spread(self.zero.float(), shape)
        low, high = self.format.low - zero, self.format.high - zero
        scale = self.scale
        if scale.requires_grad:
            # LSQ's gradient scale: each step sums the gradients of many values.
            shared = values.numel() / max(scale.numel(), 1)
            weight = 1.0 / math.sqrt(shared * max(self.format.high, 1))
            scale.register_hook(lambda gradient: gradient * weight)
        return _round_to_grid(values, self.granularity.spread(scale, shape), low, high)

    def extra_repr(self) -> str:
        """Return the description for ``print(model)``."""
        return f"bits={self.format.bits}, per {self.granularity}"


class BinaryWeights(nn.Module):
    """Weights as -1 or 1 times their mean magnitude; gradients pass where ``|w| <= 1``."""

    def __init__(self, granularity: Granularity | None = None) -> None:
        super().__init__()
        self.granularity = granularity or Granularity()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return binary weights, float32 of the same shape."""
        shape = tuple(weight.shape)
        scale = self.granularity.spread(self.granularity.mean_magnitudes(weight), shape)
        signs = torch.where(weight.detach() >= 0, 1.0, -1.0)
        return _straight_through(weight.clamp(-1, 1), signs) * scale


def _round_to_grid(values: Any, scale: Any, low: Any, high: Any) -> torch.Tensor:
    """Round to multiples of `scale` from `low` to `high`; the gradient ignores the rounding.

    With rounding as the identity, autograd yields LSQ's gradient of the scale: the rounding error
    within the range, the outermost code outside.
    """
    steps = (values / scale).clamp(min=low, max=high)
    rounded: torch.Tensor = _straight_through(steps, steps.detach().round()) * scale
    return rounded


def _straight_through(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _StraightThrough.apply(values, rounded)
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
