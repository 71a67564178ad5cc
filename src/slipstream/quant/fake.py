"""Fake quantisation: in the forward pass codes, in the backward pass nearly nothing.

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
from slipstream.quant.grid import LEAST_SCALE, Grid


def fake_quantize(values: Any, grid: Grid) -> Any:
    """`values` as they come back from their codes on `grid`; float32, same shape.

    The gradient passes unchanged to numbers within the grid's reach, and is 0 beyond it.

    Raises:
        InvalidArgumentError: the grid is for another shape.
    """
    scale, zero = grid.spread(tuple(values.shape))
    low, high = grid.format.low - zero, grid.format.high - zero
    return _through(values, scale, low, high)


class FakeQuantize(nn.Module):
    """A grid whose scale is learned with the weights (LSQ); its zero point stays.

    What is learned is the scale's logarithm: it stays positive, and an optimizer that normalises
    gradients, as Adam does, changes it relative to its size, whatever that is.

    Args:
        grid: where it starts.
        learn: whether the scale is learned; else it stays as well.

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
        """Float32 of the grid's shape."""
        return self.log_scale.exp().clamp(min=LEAST_SCALE)

    @property
    def grid(self) -> Grid:
        """Where the codes lie now."""
        return Grid(self.format, self.scale.detach(), self.zero.clone(), self.granularity)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """`values` rounded to the grid; float32, same shape."""
        shape = tuple(values.shape)
        zero = self.granularity.spread(self.zero.float(), shape)
        low, high = self.format.low - zero, self.format.high - zero
        scale = self.scale
        if scale.requires_grad:
            # Steps are few and each gathers the gradient of many values.
            shared = values.numel() / max(scale.numel(), 1)
            weight = 1.0 / math.sqrt(shared * max(self.format.high, 1))
            scale.register_hook(lambda gradient: gradient * weight)
        return _through(values, self.granularity.spread(scale, shape), low, high)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"bits={self.format.bits}, per {self.granularity}"


class BinaryWeights(nn.Module):
    """Weights as -1 or 1 times their mean size; the gradient passes where ``|w| <= 1``."""

    def __init__(self, granularity: Granularity | None = None) -> None:
        super().__init__()
        self.granularity = granularity or Granularity()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Float32 of the weight's shape."""
        shape = tuple(weight.shape)
        scale = self.granularity.spread(self.granularity.mean_sizes(weight), shape)
        signs = torch.where(weight.detach() >= 0, 1.0, -1.0)
        return _straight_through(weight.clamp(-1, 1), signs) * scale


def _through(values: Any, scale: Any, low: Any, high: Any) -> torch.Tensor:
    """Round to multiples of `scale` from `low` to `high`; gradients as if without the rounding.

    With the rounding taken as the identity, autograd gives LSQ's gradient of the scale: the
    rounding error within reach, the outermost code beyond.
    """
    reached = (values / scale).clamp(min=low, max=high)
    rounded: torch.Tensor = _straight_through(reached, reached.detach().round()) * scale
    return rounded


def _straight_through(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """`rounded`, with the gradient of `values`."""
    result: torch.Tensor = _StraightThrough.apply(values, rounded)
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
