"""Formats of codes (`Format`), and groups of values that share a scale (`Granularity`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from slipstream.errors import InvalidArgumentError

MAX_BITS = 8
_BLOCKS = (32, 128)


@dataclass(frozen=True)
class Format:
    """Integers of `bits` bits.

    Attributes:
        bits: 1 to 8.
        signed: whether codes are two's complement; otherwise they start at 0.
        narrow: whether to omit the lowest signed code, so that codes are symmetric, such as int8
            weights in [-127, 127].

    Raises:
        InvalidArgumentError: `bits` is out of range, one bit is signed (for binary weights, see
            `slipstream.quant.binarize`), or a narrow format is unsigned.
    """

    bits: int
    signed: bool = False
    narrow: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 1 <= self.bits <= MAX_BITS:
            raise InvalidArgumentError("bits", f"{self.bits} is not an integer from 1 to 8")
        if self.signed and self.bits == 1:
            raise InvalidArgumentError(
                "bits", "one bit has no room for a sign", remedy="use binarize(weight)"
            )
        if self.narrow and not self.signed:
            raise InvalidArgumentError("narrow", "requires a signed format")

    @property
    def low(self) -> int:
        """The lowest code."""
        if not self.signed:
            return 0
        return -(1 << (self.bits - 1)) + self.narrow

    @property
    def high(self) -> int:
        """The highest code."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the codes, ``torch.int8`` or ``torch.uint8``."""
        return torch.int8 if self.signed else torch.uint8


@dataclass(frozen=True)
class Granularity:
    """Group of values that share a scale: the whole tensor, a channel, or a block of a channel.

    Attributes:
        axis: the dimension with a scale per index; None for a single scale.
        block: number of consecutive values of a channel that share a scale, 32 to 128; the last
            block may be shorter. None for the whole channel. Requires ``axis=0``; the channel's
            values are in the order of its flattened dimensions.

    Raises:
        InvalidArgumentError: a block of another size, or without ``axis=0``.
    """

    axis: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is None:
            return
        if not _BLOCKS[0] <= self.block <= _BLOCKS[1]:
            raise InvalidArgumentError("block", f"{self.block} is not from 32 to 128")
        if self.axis != 0:
            raise InvalidArgumentError("axis", f"{self.axis} has no blocks", remedy="axis=0")

    @classmethod
    def of(cls, text: str) -> Granularity:
        """Parse ``"tensor"``, ``"channel"`` (axis 0) or ``"block64"``.

        Raises:
            InvalidArgumentError: another text.
        """
        if text == "tensor":
            return cls()
        if text == "channel":
            return cls(axis=0)
        digits = text.removeprefix("block")
        if digits != text and digits.isdecimal():
            return cls(axis=0, block=int(digits))
        raise InvalidArgumentError(
            "scales", f"'{text}' is not tensor, channel or blockN", remedy="for example block64"
        )

    def __str__(self) -> str:
        if self.axis is None:
            return "tensor"
        return "channel" if self.block is None else f"block{self.block}"

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor: (), (channels,) or (channels, blocks)."""
        if self.axis is None:
            return ()
        if not -len(shape) <= self.axis < len(shape):
            raise InvalidArgumentError("axis", f"{self.axis} is none of the shape {shape}")
        if self.block is None:
            return (shape[self.axis],)
        return (shape[0], -(-math.prod(shape[1:]) // self.block))

    def spread(self, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """`scales` (of `scales_shape`) so that they broadcast against a tensor of `shape`."""
        if self.axis is None:
            return scales
        if self.block is None:
            axis = self.axis % len(shape)
            return scales.reshape([-1 if d == axis else 1 for d in range(len(shape))])
        each = scales.repeat_interleave(self.block, dim=1)[:, : math.prod(shape[1:])]
        return each.reshape(shape)

    def extremes(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the minimum and maximum of each scale's values, of `scales_shape`."""
        return self._grouped(tensor, math.inf).amin(-1), self._grouped(tensor, -math.inf).amax(-1)

    def sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of each scale's values, of `scales_shape`."""
        return self._grouped(tensor, 0.0).sum(-1)

    def mean_magnitudes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean absolute value of each scale's values, of `scales_shape`."""
        if self.block is None:
            return self._grouped(tensor.abs(), 0.0).mean(-1)
        return self.sums(tensor.abs()) / self.sums(torch.ones_like(tensor))

    def _grouped(self, tensor: torch.Tensor, filler: float) -> torch.Tensor:
        """Return each scale's values along the last dimension; short blocks are padded."""
        shape = self.scales_shape(tuple(tensor.shape))
        if self.axis is None:
            return tensor.flatten()
        rows = tensor.movedim(self.axis, 0).reshape(shape[0], -1)
        if self.block is None:
            return rows
        missing = shape[1] * self.block - rows.shape[1]
        return functional.pad(rows, (0, missing), value=filler).reshape(*shape, self.block)
