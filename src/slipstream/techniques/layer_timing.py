"""Modules and passes for micro-benchmarks of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.graph import TensorSpec


def module_like(x: TensorSpec, layer: tuple[Any, ...]) -> Any:
    """Return a linear layer or convolution with these settings and random weights."""
    from torch import nn

    outputs, bias, *convolution = layer
    if not convolution:
        return nn.Linear(x.shape[-1], outputs, bias=bias)
    kernel, stride, padding, dilation, groups = convolution
    return nn.Conv2d(
        x.shape[1], outputs, tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups,
        bias,
    )  # fmt: skip


def pass_timer(module: Any, spec: TensorSpec, passing: str) -> Callable[[], object]:
    """Return a function without arguments that runs a layer's pass on random numbers.

    Args:
        module: `torch.nn.Module`.
        passing: ``forward``, or ``both`` to include the backward pass of a layer inside a model.
    """
    import torch

    x = torch.randn(spec.shape).requires_grad_(passing == "both")
    sources = [x, *module.parameters()]
    gradient = torch.ones_like(module(x))

    def forward() -> object:
        with torch.no_grad():
            return module(x)

    def both() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(module(x), sources, gradient)

    return both if passing == "both" else forward
