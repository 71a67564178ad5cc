"""cast: gradients as 16-bit numbers on the wire, added up there as such."""

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
    """Half the bytes. A sum that overflows in fp16 is computed again as float32."""

    name: ClassVar[str] = "cast"
    traits: ClassVar[Traits] = replace(COMPRESSES, variants=("cast:bf16",))
    keeps: ClassVar[bool] = False
    dtype: Literal["bf16", "fp16"] = "bf16"

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """Divided before it is cast, so that the sum has room."""
        import torch

        narrow = torch.bfloat16 if self.dtype == "bf16" else torch.float16
        # One pass each; the gradient itself has to stay, in case the sum overflows.
        half = bucket.flat.to(narrow) if workers == 1 else bucket.flat.mul(1.0 / workers).to(narrow)
        summed = (yield Reduce(half)).to(torch.float32)
        if not kernels.finite(summed):
            return False
        bucket.flat.copy_(summed)
        return True

    def messages(self, layout: Layout) -> list[Message]:
        return [Message("all_reduce", 2 * layout.numel)]

    def quality(self, graph: Graph | None = None) -> Quality:
        """Rounded once per worker and once per addition."""
        digits = "8 bits" if self.dtype == "bf16" else "11 bits"
        return Quality(QualityKind.ROUNDING, f"gradients are added up with {digits} of precision")
