"""Grids: real values of a format's codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.quant.format import Format, Granularity

# For smaller scales, 1 / scale overflows float32.
MIN_SCALE = 1e-30
_WHOLE = Granularity()


@dataclass(frozen=True, eq=False)
class Grid:
    """Real values of codes: code q represents ``(q - zero) * scale``.

    Attributes:
        format: format of the codes.
        scale: float32 of `Granularity.scales_shape`, each at least 1e-30.
        zero: int32 of the same shape, each a code of the format.
        granularity: groups of values that share a scale.

    Raises:
        InvalidArgumentError: shapes differ, a scale is too small or not finite, or a zero point is
            not a code.
    """

    format: Format
    scale: torch.Tensor
    zero: torch.Tensor
    granularity: Granularity = _WHOLE

    def __post_init__(self) -> None:
        scale, zero = self.scale, self.zero
        if tuple(scale.shape) != tuple(zero.shape):
            raise InvalidArgumentError(
                "zero", f"has shape {tuple(zero.shape)}, but scales have {tuple(scale.shape)}"
            )
        dimensions = (self.granularity.axis is not None) + (self.granularity.block is not None)
        if scale.dim() != dimensions:
            raise InvalidArgumentError(
                "scale",
                f"has {scale.dim()} dimensions instead of {dimensions}, one scale per "
                f"{self.granularity}",
            )
        if not bool(((scale >= MIN_SCALE) & scale.isfinite()).all()):
            raise InvalidArgumentError(
                "scale", f"holds a value below {MIN_SCALE}, or one that is not finite"
            )
        low, high = self.format.low, self.format.high
        if not bool(((zero >= low) & (zero <= high)).all()):
            raise InvalidArgumentError(
                "zero", f"holds a value that is not a code from {low} to {high}"
            )

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is 0."""
        return not bool(self.zero.any())

    def spread(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales and zero points, both float32, that broadcast against `shape`.

        Raises:
            InvalidArgumentError: the grid has another shape.
        """
        expected = self.granularity.scales_shape(shape)
        if tuple(self.scale.shape) != expected:
            raise InvalidArgumentError(
                "grid", f"has scales of shape {tuple(self.scale.shape)}; a tensor of shape "
                f"{shape} needs {expected}",
            )  # fmt: skip
        spread = self.granularity.spread
        return spread(self.scale, shape), spread(self.zero.float(), shape)


def checked_floats(argument: str, tensor: object) -> torch.Tensor:
    """Return `tensor` in float32 without gradient.

    Raises:
        InvalidArgumentError: it is not a float tensor, is empty or not finite.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(argument, f"is a {type(tensor).__name__}, not a tensor")
    if not tensor.is_floating_point():
        raise InvalidArgumentError(
            argument, f"has dtype {tensor.dtype}", remedy="pass floating-point numbers"
        )
    if not tensor.numel():
        raise InvalidArgumentError(argument, f"is empty: its shape is {tuple(tensor.shape)}")
    if not bool(tensor.isfinite().all()):
        kind = "NaN" if bool(tensor.isnan().any()) else "infinity"
        raise InvalidArgumentError(
            argument, f"holds {kind}", remedy="find its origin before quantizing"
        )
    return tensor.detach().float()


def grid_of_range(
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    format: Format,
    *,
    symmetric: bool = False,
    granularity: Granularity | None = None,
) -> Grid:
    """Return the grid that covers `low` to `high`, and zero, which always has an exact code.

    Numbers within [low, high] have a quantization error of at most half a scale.

    Args:
        low, high: real numbers or float tensors of the scales' shape, ``low <= high``.
        symmetric: zero point 0 (signed format), or only non-negative values (unsigned format).
        granularity: groups of values of each range; a single scale by default.

    Raises:
        InvalidArgumentError: NaN, infinity, ``low > high``, or negative numbers with an unsigned
            symmetric format.
    """
    low = checked_floats("low", torch.as_tensor(low, dtype=torch.float32))
    high = checked_floats("high", torch.as_tensor(high, dtype=torch.float32))
    if low.shape != high.shape:
        raise InvalidArgumentError(
            "high", f"has shape {tuple(high.shape)}, low has {tuple(low.shape)}"
        )
    if bool((low > high).any()):
        raise InvalidArgumentError("low", "is greater than high")
    # Double precision, so that the zero point is rounded only once.
    low, high = low.double().clamp(max=0.0), high.double().clamp(min=0.0)
    if symmetric:
        if not format.signed and bool((low < 0).any()):
            raise InvalidArgumentError(
                "low", "is negative, but symmetric unsigned codes start at zero",
                remedy="use symmetric=False or a signed format",
            )  # fmt: skip
        # Two's complement has one more negative than positive code.
        down = low / format.low if format.low else torch.zeros_like(low)
        scale = torch.maximum(down, high / format.high)
        zero = torch.zeros_like(low)
    else:
        scale = (high - low) / (format.high - format.low)
        zero = format.low - low / scale.clamp(min=MIN_SCALE)
    # Any scale represents zeros exactly.
    scale = torch.where(scale < MIN_SCALE, torch.ones_like(scale), scale)
    zero = zero.round().clamp(format.low, format.high)
    return Grid(format, scale.float(), zero.int(), granularity or _WHOLE)
