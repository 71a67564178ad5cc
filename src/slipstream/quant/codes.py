"""Quantize numbers to codes and back.

The code of x is ``clamp(round(x / scale) + zero)`` in float32, ties to even, bit-identical to the
compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.quant.format import Format, Granularity
from slipstream.quant.grid import Grid, checked_floats, grid_of_range

# Number of ranges tried for the smallest error.
_SHRINKS = 40


def round_nearest(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, ties to even; same shape and dtype."""
    return values.round()


def round_stochastic(
    values: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Round down or up at random, so that the mean over draws is the value.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015.

    Args:
        values: float tensor of any shape.
        generator: for reproducible draws; torch's default if None.
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
    """Return the codes of `values`, in the format's dtype (int8 or uint8) and the values' shape.

    Numbers outside the grid get its outermost code.

    Args:
        values: float tensor; computed in float32.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"``.
        generator: for reproducible stochastic rounding.

    Raises:
        InvalidArgumentError: `values` is not a float tensor, is empty or not finite, or the grid
            has another shape.
    """
    if rounding not in ("nearest", "stochastic"):
        raise InvalidArgumentError("rounding", f"'{rounding}' is neither nearest nor stochastic")
    values = checked_floats("values", values)
    scale, zero = grid.spread(tuple(values.shape))
    low, high = grid.format.low, grid.format.high
    # Clamp before adding the zero point, which float32 could not represent beyond 2^24.
    steps = values / scale
    steps = round_nearest(steps) if rounding == "nearest" else round_stochastic(steps, generator)
    return (steps.clamp(min=low - zero, max=high - zero) + zero).to(grid.format.dtype)


def dequantize(codes: Any, grid: Grid) -> Any:
    """Return the numbers of `codes` (of any integer dtype), in float32.

    Raises:
        InvalidArgumentError: the codes are floating-point, or the grid has another shape.
    """
    if codes.is_floating_point():
        raise InvalidArgumentError("codes", f"have dtype {codes.dtype}, but codes are integers")
    scale, zero = grid.spread(tuple(codes.shape))
    return (codes.float() - zero) * scale


def binarize(
    weight: Any, granularity: Granularity | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return signs (int8, -1 or 1) and float32 scales of `weight` (float, any shape).

    Zero counts as positive. The scale is the mean absolute weight, which minimizes squared error.

    Source: Rastegari et al., "XNOR-Net: ImageNet Classification Using Binary Convolutional Neural
    Networks", ECCV 2016.

    Raises:
        InvalidArgumentError: the weight is empty or not finite.
    """
    weight = checked_floats("weight", weight)
    signs = torch.where(weight >= 0, 1, -1).to(torch.int8)
    return signs, (granularity or Granularity()).mean_magnitudes(weight)


def code_weights(
    weight: Any,
    bits: int,
    granularity: Granularity | None = None,
    *,
    least_error: bool = True,
    narrow: bool = False,
) -> tuple[Any, Any]:
    """Return symmetric codes of `weight`, int8 of its shape, and their float32 scales.

    With one bit the codes are -1 and 1 (`binarize`), else those of a signed format.

    Args:
        least_error: whether scales minimize squared error instead of covering all weights.
        narrow: whether to omit the lowest code.

    Raises:
        InvalidArgumentError: the weight is empty or not finite, or bits are not 1 to 8.
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
    """Return a grid for `weight` (float, any shape), with one scale by default.

    Args:
        method: ``"range"`` covers all weights; ``"least_error"`` tries ranges down to a fifth of
            that and minimizes squared error per scale, which matters at four bits and fewer.

    Raises:
        InvalidArgumentError: the weight is empty or not finite, or has no such axis.
    """
    weight = checked_floats("weight", weight)
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
    candidates = [best] + [
        grid_of_range(
            low * factor, high * factor, format, symmetric=symmetric, granularity=granularity
        )
        for factor in factors[1:]
    ]
    if symmetric and format.signed and granularity.block is None and weight.dim() == 2:
        scale = _least_scales(weight, [candidate.scale for candidate in candidates], format)
        return Grid(format, scale, best.zero, granularity)
    scale, zero = best.scale, best.zero

    def squared_error(grid: Grid) -> Any:
        restored = dequantize(quantize(weight, grid), grid)
        return granularity.sums((weight - restored).square().double())

    least = squared_error(best)
    for candidate in candidates[1:]:
        error = squared_error(candidate)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, candidate.scale, scale)
        zero = torch.where(better, candidate.zero, zero)
    return Grid(format, scale, zero, granularity)


def _least_scales(weight: torch.Tensor, candidates: Sequence[torch.Tensor], format: Format) -> Any:
    """Return the scales of least squared error for a matrix, one in all or one per row.

    Only for symmetric grids. Rows are processed in blocks that stay in a core's cache.
    """
    scales = torch.stack([scale.reshape(-1).expand(len(weight)) for scale in candidates])
    errors = torch.empty(len(candidates), len(weight), dtype=torch.float64)
    block = max(1, _BLOCK_SIZE // weight.shape[1])
    for first in range(0, len(weight), block):
        rows = weight[first : first + block].contiguous()
        restored = torch.empty_like(rows)
        for number in range(len(candidates)):
            scale = scales[number, first : first + block, None]
            torch.div(rows, scale, out=restored)
            restored.round_().clamp_(format.low, format.high).mul_(scale).sub_(rows).square_()
            torch.sum(restored, 1, dtype=torch.float64, out=errors[number, first : first + block])
    if candidates[0].numel() == 1:
        return candidates[int(errors.sum(1).argmin())]
    return scales.gather(0, errors.argmin(0, keepdim=True))[0].reshape(candidates[0].shape)


# Number of weights per block: half a MiB, and as much for their errors.
_BLOCK_SIZE = 1 << 17
