"""sign and block_int: a scale per block of numbers, and 1, 4 or 8 bits for each of them.

Sources: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019; Alistarh et al., "QSGD", NeurIPS 2017, with rounding to the nearest in place of a random
one: error feedback takes care of the bias.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.distributed.compression.compressor import GatheringCompressor
from slipstream.techniques.distributed.compression.kernels import Blocks
from slipstream.techniques.distributed.compression.technique import LATE, CompressionTechnique

if TYPE_CHECKING:
    import torch

    from slipstream.techniques.distributed.compression.bucket import Layout

_SCALE_BYTES = 4


@functools.lru_cache(maxsize=1024)
def _blocks(layout: Layout, size: int, bits: int) -> Blocks:
    return Blocks.of(layout.spans, size, bits)


def _check_block(name: str, block: int) -> None:
    if not 32 <= block <= 1 << 20:
        raise InvalidArgumentError(f"{name}:block", f"{block} is not from 32 to 2^20")


class _Blocks(CompressionTechnique, GatheringCompressor):
    """What both share: scales float32 [blocks], then codes."""

    def _layout(self) -> tuple[int, int]:
        """Numbers in a block, and bits of a code."""
        raise NotImplementedError

    def payload_bytes(self, layout: Layout) -> int:
        blocks = _blocks(layout, *self._layout())
        return _SCALE_BYTES * len(blocks) + blocks.nbytes

    def encode(self, gradient: torch.Tensor, residual: torch.Tensor, layout: Layout,
               payload: torch.Tensor) -> None:  # fmt: skip
        blocks = _blocks(layout, *self._layout())
        scales, codes = self._parts(payload, blocks)
        blocks.encode(gradient, residual, scales, codes)

    def decode(self, payload: torch.Tensor, layout: Layout, out: torch.Tensor, weight: float,
               add: bool) -> None:  # fmt: skip
        blocks = _blocks(layout, *self._layout())
        scales, codes = self._parts(payload, blocks)
        blocks.decode(scales, codes, out, weight, add)

    def _parts(self, payload: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scales, codes = payload.split([_SCALE_BYTES * len(blocks), blocks.nbytes])
        return scales.view(torch.float32), codes


@dataclass(frozen=True)
class Sign(_Blocks):
    """The sign of every number, and the mean magnitude of each block of them.

    Attributes:
        block: numbers of one parameter that share a magnitude; up to 4096 of gradient and residual
            stay in the first-level cache between two passes.
        feedback: keep what is not sent. Without, training may never arrive (see the card), and
            `force` is asked for.
    """

    name: ClassVar[str] = "sign"
    advice: ClassVar[str] = LATE
    block: int = 4096
    feedback: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        _check_block(self.name, self.block)
        if not self.feedback and not self.force:
            raise InvalidArgumentError(
                "sign:feedback",
                "signs without error feedback may not converge, even on convex problems",
                remedy="leave it on, or sign:feedback=false,force=true to see it",
            )

    def _layout(self) -> tuple[int, int]:
        return self.block, 1

    def encode(self, gradient: torch.Tensor, residual: torch.Tensor, layout: Layout,
               payload: torch.Tensor) -> None:  # fmt: skip
        if not self.feedback:
            # Before, not after: what is taken back of a failed exchange relies on what is left.
            residual.zero_()
        super().encode(gradient, residual, layout, payload)


@dataclass(frozen=True)
class BlockInt(_Blocks):
    """Whole multiples of a scale per block: 8 or 4 bits a number.

    Attributes:
        bits: 4 or 8.
        block: numbers that share a scale.
    """

    name: ClassVar[str] = "block_int"
    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InvalidArgumentError("block_int:bits", f"{self.bits} is neither 4 nor 8")
        _check_block(self.name, self.block)

    def _layout(self) -> tuple[int, int]:
        return self.block, self.bits
