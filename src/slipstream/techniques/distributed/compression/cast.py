"""cast: gradients sent and summed in 16-bit floating point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from slipstream.ranks.requests import Exchange, Reduce
from slipstream.technique import Quality, QualityKind, Traits
from slipstream.techniques.distributed.compression import kernels
from slipstream.techniques.distributed.compression.compressor import Message
from slipstream.techniques.distributed.compression.technique import COMPRESSES, CompressionTechnique

if TYPE_CHECKING:
    from slipstream.graph import Graph
    from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory


@dataclass(frozen=True)
class Cast(CompressionTechnique):
    """Half of the bytes. A sum that overflows in fp16 is repeated in float32."""

    name: ClassVar[str] = "cast"
    traits: ClassVar[Traits] = replace(COMPRESSES, variants=("cast:bf16",))
    keeps: ClassVar[bool] = False
    dtype: Literal["bf16", "fp16"] = "bf16"

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """Divide before the cast, so that the sum does not overflow."""
        import torch

        narrow = torch.bfloat16 if self.dtype == "bf16" else torch.float16
        # One pass each; the gradient must not change, in case the sum overflows.
        half = bucket.flat.to(narrow) if workers == 1 else bucket.flat.mul(1.0 / workers).to(narrow)
        summed = (yield Reduce(half)).to(torch.float32)
        if not kernels.finite(summed):
            return False
        bucket.flat.copy_(summed)
        return True

    def messages(self, layout: Layout) -> list[Message]:
        return [Message("all_reduce", 2 * layout.numel)]

    def quality(self, graph: Graph | None = None) -> Quality:
        """Return rounding, once per worker and once per addition."""
        digits = "8 bits" if self.dtype == "bf16" else "11 bits"
        return Quality(QualityKind.ROUNDING, f"gradients are summed with {digits} of precision")
