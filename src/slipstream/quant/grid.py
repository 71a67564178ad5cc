"""`Grid`: where the codes of a format lie among the real numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.quant.format import Format, Granularity

# Below it 1 / scale is no float32 any more.
LEAST_SCALE = 1e-30
_WHOLE = Granularity()


@dataclass(frozen=True, eq=False)
class Grid:
    """A code q stands for ``(q - zero) * scale``.

    Attributes:
        format: which codes there are.
        scale: float32 of `Granularity.scales_shape`, each at least 1e-30.
        zero: int32 of the same shape, each a code of the format.
        granularity: how far each scale reaches.

    Raises:
        InvalidArgumentError: shapes differ, a scale is too small or no number, or a zero point is
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
                "zero", f"has shape {tuple(zero.shape)}, the scales {tuple(scale.shape)}"
            )
        dimensions = (self.granularity.axis is not None) + (self.granularity.block is not None)
        if scale.dim() != dimensions:
            raise InvalidArgumentError(
                "scale", f"has {scale.dim()} dimensions, scales per {self.granularity} {dimensions}"
            )
        if not bool(((scale >= LEAST_SCALE) & scale.isfinite()).all()):
            raise InvalidArgumentError("scale", f"holds a value that is not at least {LEAST_SCALE}")
        low, high = self.format.low, self.format.high
        if not bool(((zero >= low) & (zero <= high)).all()):
            raise InvalidArgumentError("zero", f"is not a code from {low} to {high}")

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is 0."""
        return not bool(self.zero.any())

    @property
    def reach(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest real number that has a code of its own, per scale."""
        low = (self.format.low - self.zero) * self.scale
        return low, (self.format.high - self.zero) * self.scale

    def spread(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points, both float32, so that they broadcast against that shape.

        Raises:
            InvalidArgumentError: the grid is for another shape.
        """
        wanted = self.granularity.scales_shape(shape)
        if tuple(self.scale.shape) != wanted:
            raise InvalidArgumentError(
                "grid", f"has scales of shape {tuple(self.scale.shape)}; a tensor of shape "
                f"{shape} needs {wanted}",
            )  # fmt: skip
        spread = self.granularity.spread
        return spread(self.scale, shape), spread(self.zero.float(), shape)


def real_numbers(argument: str, tensor: object) -> torch.Tensor:
    """`tensor` in float32 and without gradient, if it is not empty and all its numbers are finite.

    Raises:
        InvalidArgumentError: it is something else; names the argument.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(argument, f"is a {type(tensor).__name__}, not a tensor")
    if not tensor.is_floating_point():
        raise InvalidArgumentError(
            argument, f"has dtype {tensor.dtype}", remedy="give floating-point numbers"
        )
    if not tensor.numel():
        raise InvalidArgumentError(argument, f"is empty: its shape is {tuple(tensor.shape)}")
    if not bool(tensor.isfinite().all()):
        kind = "NaN" if bool(tensor.isnan().any()) else "infinity"
        raise InvalidArgumentError(
            argument, f"holds {kind}", remedy="find where it comes from before quantising"
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
    """The grid that covers the numbers from `low` to `high`, and zero, which always has a code.

    Numbers within [low, high] come back from their codes with an error of at most half a scale.

    Args:
        low, high: real numbers or float tensors of the scales' shape, ``low <= high``.
        symmetric: zero point 0 (of a signed format), or all non-negative (of an unsigned one).
        granularity: what each of the ranges is of; default: one for all.

    Raises:
        InvalidArgumentError: NaN, infinity, an empty range, or negative numbers to be covered by
            an unsigned symmetric format.
    """
    low = real_numbers("low", torch.as_tensor(low, dtype=torch.float32))
    high = real_numbers("high", torch.as_tensor(high, dtype=torch.float32))
    if low.shape != high.shape:
        raise InvalidArgumentError("high", f"has shape {tuple(high.shape)}, low {tuple(low.shape)}")
    if bool((low > high).any()):
        raise InvalidArgumentError("low", "is greater than high")
    # In double precision, so that the zero point is rounded once.
    low, high = low.double().clamp(max=0.0), high.double().clamp(min=0.0)
    if symmetric:
        if not format.signed and bool((low < 0).any()):
            raise InvalidArgumentError(
                "low", "is negative, and the unsigned codes are to start at zero",
                remedy="symmetric=False, or a signed format",
            )  # fmt: skip
        # A two's complement format reaches one code further down than up.
        down = low / format.low if format.low else torch.zeros_like(low)
        scale = torch.maximum(down, high / format.high)
        zero = torch.zeros_like(low)
    else:
        scale = (high - low) / (format.high - format.low)
        zero = format.low - low / scale.clamp(min=LEAST_SCALE)
    # All zeros: any scale represents them exactly.
    scale = torch.where(scale < LEAST_SCALE, torch.ones_like(scale), scale)
    zero = zero.round().clamp(format.low, format.high)
    return Grid(format, scale.float(), zero.int(), granularity or _WHOLE)
