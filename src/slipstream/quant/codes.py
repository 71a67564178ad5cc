"""Numbers to codes and back.

The code of x is ``clamp(round(x / scale) + zero)`` in float32, ties to even: the arithmetic of the
compiled kernels, so that they agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.quant.format import Format, Granularity
from slipstream.quant.grid import Grid, grid_of_range, real_numbers

# Ranges that are tried for the smallest error.
_SHRINKS = 40


def round_nearest(values: torch.Tensor) -> torch.Tensor:
    """The nearest integer; of two as near, the even one. Same shape and dtype."""
    return values.round()


def round_stochastic(
    values: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """The integer below or above, so that the mean over draws is the value itself.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015.

    Args:
        values: float tensor of any shape.
        generator: for draws that can be repeated; default: torch's own.
    """
    drawn = torch.rand(values.shape, generator=generator, dtype=values.dtype, device=values.device)
    below = values.floor()
    return below + (drawn < values - below)


def quantize(
    values: Any,
    grid: Grid,
    *,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The codes of `values`, in the format's dtype (int8 or uint8) and the values' shape.

    Numbers beyond the grid's reach get its outermost code.

    Args:
        values: float tensor; computed in float32.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"``.
        generator: for stochastic rounding that can be repeated.

    Raises:
        InvalidArgumentError: not a tensor of numbers, empty, NaN or infinity; or the grid is for
            another shape.
    """
    if rounding not in ("nearest", "stochastic"):
        raise InvalidArgumentError("rounding", f"'{rounding}' is neither nearest nor stochastic")
    values = real_numbers("values", values)
    scale, zero = grid.spread(tuple(values.shape))
    low, high = grid.format.low, grid.format.high
    # Clamped before the zero point is added: beyond 2^24 float32 has no room for it.
    steps = values / scale
    steps = round_nearest(steps) if rounding == "nearest" else round_stochastic(steps, generator)
    return (steps.clamp(min=low - zero, max=high - zero) + zero).to(grid.format.dtype)


def dequantize(codes: Any, grid: Grid) -> Any:
    """The numbers that `codes` (of any integer dtype) stand for, in float32.

    Raises:
        InvalidArgumentError: the codes are floating-point numbers, or the grid is for another
            shape.
    """
    if codes.is_floating_point():
        raise InvalidArgumentError("codes", f"have dtype {codes.dtype}, codes are integers")
    scale, zero = grid.spread(tuple(codes.shape))
    return (codes.float() - zero) * scale


def binarize(
    weight: Any, granularity: Granularity | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` (float, any shape) as signs and scales: int8 of its shape, -1 or 1; float32 scales.

    A weight of zero counts as positive. The mean absolute weight is the scale of least squared
    error.

    Source: Rastegari et al., "XNOR-Net: ImageNet Classification Using Binary Convolutional Neural
    Networks", ECCV 2016.

    Raises:
        InvalidArgumentError: the weight is empty, or holds NaN or infinity.
    """
    weight = real_numbers("weight", weight)
    signs = torch.where(weight >= 0, 1, -1).to(torch.int8)
    return signs, (granularity or Granularity()).mean_sizes(weight)


def code_weights(
    weight: Any,
    bits: int,
    granularity: Granularity | None = None,
    *,
    least_error: bool = True,
    narrow: bool = False,
) -> tuple[Any, Any]:
    """`weight` as symmetric codes: int8 of its shape, and their float32 scales.

    With one bit the codes are -1 and 1 (`binarize`), else those of a signed format.

    Args:
        least_error: choose scales for the least squared error; else from the outermost weights.
        narrow: leave out the lowest code.

    Raises:
        InvalidArgumentError: the weight is empty, holds NaN or infinity, or bits are not 1 to 8.
    """
    granularity = granularity or Granularity()
    if bits == 1:
        return binarize(weight, granularity)
    grid = grid_of_weights(
        weight,
        Format(bits, signed=True, narrow=narrow),
        granularity,
        method="least_error" if least_error else "range",
    )
    return quantize(weight, grid), grid.scale


def grid_of_weights(
    weight: Any,
    format: Format,
    granularity: Granularity | None = None,
    *,
    method: Literal["range", "least_error"] = "range",
    symmetric: bool = True,
) -> Grid:
    """A grid for `weight` (float, any shape), one scale for all unless `granularity` says else.

    Args:
        method: ``"range"`` represents the outermost weights; ``"least_error"`` tries ranges down
            to a fifth of that, and takes for each scale the one of least squared error. At four
            bits and fewer that is a different range.

    Raises:
        InvalidArgumentError: the weight is empty, holds NaN or infinity, or has no such axis.
    """
    weight = real_numbers("weight", weight)
    granularity = granularity or Granularity()
    low, high = granularity.extremes(weight)
    if symmetric and format.signed:
        high = torch.maximum(high, -low)
        low = -high
    best = grid_of_range(low, high, format, symmetric=symmetric, granularity=granularity)
    if method == "range":
        return best
    if method != "least_error":
        raise InvalidArgumentError("method", f"'{method}' is neither range nor least_error")
    factors = [1 - 0.8 * step / _SHRINKS for step in range(_SHRINKS)]
    every = [best] + [
        grid_of_range(
            low * factor, high * factor, format, symmetric=symmetric, granularity=granularity
        )
        for factor in factors[1:]
    ]
    if symmetric and format.signed and granularity.block is None and weight.dim() == 2:
        scale = _least_scales(weight, [one.scale for one in every], format)
        return Grid(format, scale, best.zero, granularity)
    scale, zero = best.scale, best.zero

    def squared_error(grid: Grid) -> Any:
        again = dequantize(quantize(weight, grid), grid)
        return granularity.sums((weight - again).square().double())

    least = squared_error(best)
    for tried in every[1:]:
        error = squared_error(tried)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, tried.scale, scale)
        zero = torch.where(better, tried.zero, zero)
    return Grid(format, scale, zero, granularity)


def _least_scales(weight: torch.Tensor, tried: Sequence[torch.Tensor], format: Format) -> Any:
    """Of scales `tried` for a matrix (one, or one a row), those of least squared error.

    Symmetric grids only. Rows are taken a few at a time, which stay in a core's cache for all
    tries: an error is then a few passes over what is near.
    """
    scales = torch.stack([one.reshape(-1).expand(len(weight)) for one in tried])
    errors = torch.empty(len(tried), len(weight), dtype=torch.float64)
    together = max(1, _CACHED // weight.shape[1])
    for first in range(0, len(weight), together):
        rows = weight[first : first + together].contiguous()
        again = torch.empty_like(rows)
        for number in range(len(tried)):
            scale = scales[number, first : first + together, None]
            torch.div(rows, scale, out=again)
            again.round_().clamp_(format.low, format.high).mul_(scale).sub_(rows).square_()
            torch.sum(again, 1, dtype=torch.float64, out=errors[number, first : first + together])
    if tried[0].numel() == 1:
        return tried[int(errors.sum(1).argmin())]
    return scales.gather(0, errors.argmin(0, keepdim=True))[0].reshape(tried[0].shape)


# Numbers of a weight that are looked at together: half a MiB, and as much for what is lost of them.
_CACHED = 1 << 17
