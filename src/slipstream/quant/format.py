"""Which codes there are (`Format`), and how many values share a scale (`Granularity`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from slipstream.errors import InvalidArgumentError

MOST_BITS = 8
_BLOCKS = (32, 128)


@dataclass(frozen=True)
class Format:
    """Whole numbers of `bits` bits.

    Attributes:
        bits: 1 to 8.
        signed: two's complement, else from 0 up.
        narrow: leave the lowest signed code out, so that the codes are symmetric: int8 weights as
            [-127, 127].

    Raises:
        InvalidArgumentError: other bits; a signed format without room for a sign (binary weights
            are not on a grid that holds zero: see `slipstream.quant.binarize`); a narrow one
            that is unsigned.
    """

    bits: int
    signed: bool = False
    narrow: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 1 <= self.bits <= MOST_BITS:
            raise InvalidArgumentError("bits", f"{self.bits} is not an integer from 1 to 8")
        if self.signed and self.bits == 1:
            raise InvalidArgumentError(
                "bits", "one bit has no room for a sign", remedy="binarize(weight)"
            )
        if self.narrow and not self.signed:
            raise InvalidArgumentError("narrow", "only a signed format has a code to leave out")

    @property
    def low(self) -> int:
        """The least code."""
        if not self.signed:
            return 0
        return -(1 << (self.bits - 1)) + self.narrow

    @property
    def high(self) -> int:
        """The greatest code."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def dtype(self) -> torch.dtype:
        """``torch.int8`` or ``torch.uint8``: what holds one code."""
        return torch.int8 if self.signed else torch.uint8


@dataclass(frozen=True)
class Granularity:
    """How far one scale reaches: the whole tensor, a channel, or a block within a channel.

    Attributes:
        axis: the dimension with a scale of its own per index; None for one scale in all.
        block: how many consecutive values of a channel share a scale, 32 to 128; the last block of
            a channel may be shorter. None for the whole channel. Needs ``axis=0``; the channel's
            values are counted in the order of its flattened dimensions.

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
            raise InvalidArgumentError("axis", "blocks lie within the channels of axis 0")

    @classmethod
    def of(cls, text: str) -> Granularity:
        """``"tensor"``, ``"channel"`` (axis 0) or ``"block64"``.

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
            "scales", f"'{text}' is not tensor, channel or blockN", remedy="as block64"
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
        """The least and the greatest value behind each scale, of `scales_shape`."""
        return self._grouped(tensor, math.inf).amin(-1), self._grouped(tensor, -math.inf).amax(-1)

    def sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the values behind each scale, of `scales_shape`."""
        return self._grouped(tensor, 0.0).sum(-1)

    def mean_sizes(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean absolute value behind each scale, of `scales_shape`."""
        if self.block is None:
            return self._grouped(tensor.abs(), 0.0).mean(-1)
        return self.sums(tensor.abs()) / self.sums(torch.ones_like(tensor))

    def _grouped(self, tensor: torch.Tensor, filler: float) -> torch.Tensor:
        """The values behind each scale along the last dimension; a short block is filled up."""
        shape = self.scales_shape(tuple(tensor.shape))
        if self.axis is None:
            return tensor.flatten()
        rows = tensor.movedim(self.axis, 0).reshape(shape[0], -1)
        if self.block is None:
            return rows
        missing = shape[1] * self.block - rows.shape[1]
        return functional.pad(rows, (0, missing), value=filler).reshape(*shape, self.block)
