"""sign and block_int: a scale per block of elements, and 1, 4 or 8 bits per element.

Sources: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019; Alistarh et al., "QSGD", NeurIPS 2017, with rounding to nearest instead of random
rounding, since error feedback corrects the bias.
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
        raise InvalidArgumentError(f"{name}:block", f"{block} is not between 32 and 2^20")


class _Blocks(CompressionTechnique, GatheringCompressor):
    """Base of both, whose payload is scales float32 [blocks], then codes."""

    def _layout(self) -> tuple[int, int]:
        """Return the number of elements per block, and of bits per code."""
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
    """The sign of every element, and the mean magnitude of each block.

    Attributes:
        block: number of elements of one parameter that share a magnitude; up to 4096 of gradient
            and residual stay in the L1 cache between two passes.
        feedback: whether to use error feedback. Training may not converge without it (see the
            card), so that `force` is then required.
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
                remedy="keep it on, or pass sign:feedback=false,force=true to try it",
            )

    def _layout(self) -> tuple[int, int]:
        return self.block, 1

    def encode(self, gradient: torch.Tensor, residual: torch.Tensor, layout: Layout,
               payload: torch.Tensor) -> None:  # fmt: skip
        if not self.feedback:
            # Before encoding, not after: undoing a failed exchange needs its residual.
            residual.zero_()
        super().encode(gradient, residual, layout, payload)


@dataclass(frozen=True)
class BlockInt(_Blocks):
    """Integer multiples of a scale per block, with 8 or 4 bits per element.

    Attributes:
        bits: 4 or 8.
        block: number of elements that share a scale.
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
