"""`Dropout`: a drop-in replacement of ``torch.nn.Dropout`` with one fused kernel.

A call draws a seed of 128 bits from torch's generator (or `generator`), so that
``torch.manual_seed``, checkpointing and data loaders' workers behave as with torch's dropout. The
forward pass drops and scales in one pass over memory; the backward pass regenerates the random
numbers from the seed. No mask is stored.

Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
JMLR 2014; random numbers: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.dropout import kernels

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class Dropout(torch.nn.Dropout):
    """Zero each element with probability `p` while training, and scale the others by 1 / (1 - p).

    Accepts the input of ``torch.nn.Dropout`` and preserves shape, dtype, strides and the empty
    ``state_dict``. Calls torch's dropout for anything but a plain CPU tensor (other devices,
    subclasses, inside ``torch.func``, forward-mode AD). Dropped elements become 0 even if they
    were infinite or NaN. bfloat16 and float16 are scaled in float32 and rounded once.

    Args:
        p: probability of dropping, exact to 2^-32.
        inplace: overwrite the input.
        generator: source of seeds; torch's default generator if None.

    Raises:
        InvalidArgumentError: `p` is not in [0, 1], or the input of a call is not floating-point.
    """

    generator: torch.Generator | None = None

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_probability(p)
        super().__init__(p, inplace)
        self.generator = generator

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Drop elements of `input`, of any shape; return it unchanged in eval mode."""
        return dropout(input, self.p, self.training, self.inplace, generator=self.generator)


def dropout(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Replace ``torch.nn.functional.dropout`` by a single pass; see `Dropout`."""
    _check_probability(p)
    if not training or p == 0.0 or input.numel() == 0:
        return input
    if not input.is_floating_point():
        raise InvalidArgumentError(
            "input", f"is {input.dtype}; dropout needs floating-point numbers"
        )
    if p == 1.0 or not _is_plain(input):
        if generator is not None and p != 1.0:
            raise InvalidArgumentError(
                "generator",
                "needs a plain CPU tensor, outside torch.func and torch.compile",
                remedy="omit it to use torch's default generator",
            )
        return functional.dropout(input, p, True, inplace)
    dropped = _in_memory_order(input, kernels.draw_seed(generator), p)
    return input.copy_(dropped) if inplace else dropped


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise InvalidArgumentError("p", f"a probability must be between 0 and 1, not {p}")


def _is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is an ordinary CPU tensor without a functional transform."""
    if not x.is_cpu or x.layout is not torch.strided:
        return False
    if torch.compiler.is_compiling():
        return True
    return (
        type(x) in _PLAIN_TYPES
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and forward_ad._current_level < 0
    )


def _in_memory_order(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Drop elements numbered in memory order; the result has the strides of `x`."""
    strides = x.stride()
    if x.is_contiguous() or 0 in strides:
        return _drop(x, seed, p)
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    inverse = sorted(range(x.dim()), key=lambda dim: order[dim])
    return _drop(x.permute(order), seed, p).permute(inverse)


def _drop(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    differentiable = torch.is_grad_enabled() and x.requires_grad
    dropped: torch.Tensor = (SeededDropout.apply if differentiable else kernels.dropout)(x, seed, p)
    return dropped


class SeededDropout(torch.autograd.Function):
    """Dropout of (x, seed, p), which for a given seed is linear and its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        dropped: torch.Tensor = kernels.dropout(x, seed, p)
        return dropped

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        return _drop(gradients[0], seed, ctx.p), None, None
