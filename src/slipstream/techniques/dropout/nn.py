"""`Dropout`: a drop-in for ``torch.nn.Dropout`` on one fused kernel.

A call draws a seed of 128 bits from torch's generator (or `generator`), so that
``torch.manual_seed``, checkpointing and data loaders' workers do what they do with torch's own.
The forward pass drops and scales in one pass over memory; the backward pass draws the same random
numbers again from the seed. No mask is stored.

Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
JMLR 2014; random numbers: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.dropout import kernels as door

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Dropout(torch.nn.Dropout):
    """Zero each element with probability `p` while training, and scale the others by 1 / (1 - p).

    Takes what ``torch.nn.Dropout`` takes and keeps what it keeps: shape, dtype, strides, an empty
    ``state_dict``. On tensors that are not plain ones on a CPU (other devices, subclasses, inside
    ``torch.func``, forward-mode AD) it is torch's own. What is dropped becomes 0 even where it
    was infinite or not a number. bfloat16 and float16 are scaled in float32 and rounded once.

    Args:
        p: exact to 2^-32.
        inplace: overwrite the input.
        generator: where seeds are drawn; torch's default generator if None.

    Raises:
        InvalidArgumentError: `p` is not in [0, 1]; when called, an input that has no
            floating-point numbers.
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
        """`input` of any shape, with elements dropped; itself in eval mode."""
        return dropout(input, self.p, self.training, self.inplace, generator=self.generator)


def dropout(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.dropout`` in one pass; see `Dropout`."""
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
                "is for plain tensors on a CPU, outside torch.func and torch.compile",
                remedy="leave it out: torch's own generator is used",
            )
        return functional.dropout(input, p, True, inplace)
    dropped = _in_memory_order(input, door.draw_seed(generator), p)
    return input.copy_(dropped) if inplace else dropped


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise InvalidArgumentError("p", f"a probability lies between 0 and 1, not {p}")


def _is_plain(x: torch.Tensor) -> bool:
    """Whether it is an ordinary tensor in a processor's memory, and nothing transforms it."""
    if not x.is_cpu or x.layout is not torch.strided:
        return False
    if torch.compiler.is_compiling():
        return True
    return (
        type(x) in _PLAIN
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and forward_ad._current_level < 0
    )


def _in_memory_order(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Elements are numbered as they lie in memory, and the result lies as `x` does."""
    strides = x.stride()
    if x.is_contiguous() or 0 in strides:
        return _drop(x, seed, p)
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    back = sorted(range(x.dim()), key=lambda place: order[place])
    return _drop(x.permute(order), seed, p).permute(back)


def _drop(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    differentiable = torch.is_grad_enabled() and x.requires_grad
    dropped: torch.Tensor = (SeededDropout.apply if differentiable else door.dropout)(x, seed, p)
    return dropped


class SeededDropout(torch.autograd.Function):
    """Dropout of (x, seed, p): with the seed given it is linear, and its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        dropped: torch.Tensor = door.dropout(x, seed, p)
        return dropped

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        return _drop(gradients[0], seed, ctx.p), None, None
