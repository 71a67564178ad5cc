"""topk and randomk: exact values of some elements per bucket; the others are sent later.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017;
Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.errors import InvalidArgumentError
from slipstream.ranks.requests import Exchange, Reduce
from slipstream.technique import Traits
from slipstream.techniques.distributed.compression import kernels
from slipstream.techniques.distributed.compression.compressor import GatheringCompressor, Message
from slipstream.techniques.distributed.compression.technique import (
    COMPRESSES,
    LATE,
    CompressionTechnique,
)

if TYPE_CHECKING:
    import torch

    from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory


def _check_ratio(name: str, ratio: float) -> None:
    if not 0.0 < ratio <= 1.0:
        raise InvalidArgumentError(f"{name}:ratio", f"{ratio} is not in (0, 1]")


@dataclass(frozen=True)
class TopK(CompressionTechnique, GatheringCompressor):
    """The exact elements of largest magnitude in each bucket, with their indices.

    Attributes:
        ratio: fraction of the bucket's elements that are sent.
    """

    name: ClassVar[str] = "topk"
    advice: ClassVar[str] = LATE
    traits: ClassVar[Traits] = replace(COMPRESSES, variants=("topk:0.1", "topk:0.01"))
    ratio: float = 0.01

    def __post_init__(self) -> None:
        _check_ratio("topk", self.ratio)

    def count(self, layout: Layout) -> int:
        """Return the number of elements sent per bucket."""
        return min(layout.numel, max(1, math.ceil(self.ratio * layout.numel)))

    def payload_bytes(self, layout: Layout) -> int:
        """Return the bytes of values and indices, 4 each."""
        return 8 * self.count(layout)

    def encode(self, gradient: torch.Tensor, residual: torch.Tensor, layout: Layout,
               payload: torch.Tensor) -> None:  # fmt: skip
        kernels.top(gradient, residual, *self._parts(payload))

    def decode(self, payload: torch.Tensor, layout: Layout, out: torch.Tensor, weight: float,
               add: bool) -> None:  # fmt: skip
        if not add:
            out.zero_()
        kernels.scatter(*self._parts(payload), out, weight)

    @staticmethod
    def _parts(payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        indices, values = payload.chunk(2)
        return indices.view(torch.int32), values.view(torch.float32)


@dataclass(frozen=True)
class RandomK(CompressionTechnique):
    """Random runs of elements, the same on all workers, so that they need no indices to be summed.

    A bucket is split into as many intervals as runs are sent, and one run is drawn from each, so
    that neighbours are rarely sent together. Steps draw independently. Cycling through the runs
    would halve the mean delay, but requires a much lower learning rate: independent draws weight
    old gradients by (1 - ratio)^age, like momentum, and cycles weight all equally, which
    oscillates.

    Attributes:
        ratio: fraction of the bucket's elements that are sent.
        block: number of elements per run: longer runs are faster to draw and copy, but change more
            weights of a neuron at the same time, which requires a lower learning rate.
        seed: seed of the draws; the same on all workers.
    """

    name: ClassVar[str] = "randomk"
    advice: ClassVar[str] = LATE
    ratio: float = 0.01
    block: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        _check_ratio("randomk", self.ratio)
        if self.block < 1:
            raise InvalidArgumentError("randomk:block", f"{self.block} is below 1")

    def _runs(self, layout: Layout) -> tuple[int, int]:
        """Return the number of runs sent, and of all runs."""
        runs = -(-layout.numel // self.block)
        return min(runs, max(1, math.ceil(self.ratio * runs))), runs

    def messages(self, layout: Layout) -> list[Message]:
        """Return one all-reduce of the values; the last run may be shorter."""
        return [Message("all_reduce", 4 * min(layout.numel, self.block * self._runs(layout)[0]))]

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """All-reduce the drawn elements."""
        import torch

        indices = self._drawn(bucket.layout, memory.step)
        residual = memory.residual(bucket.layout)
        if sound:
            residual += bucket.flat
            drawn = residual[indices]
        else:
            drawn = torch.full((len(indices),), math.nan)
        summed = yield Reduce(drawn.clone())
        if not kernels.finite(summed):
            if sound:
                residual -= bucket.flat
            return False
        residual[indices] = 0.0
        bucket.flat.zero_()
        bucket.flat[indices] = summed / workers
        return True

    def _drawn(self, layout: Layout, step: int) -> torch.Tensor:
        """Draw ascending indices, int64, by seed, step and the bucket's first name."""
        import numpy as np
        import torch

        chosen, runs = self._runs(layout)
        edges = np.arange(chosen + 1) * runs // chosen
        drawn = np.random.default_rng([self.seed, step, zlib.crc32(layout.names[0].encode())])
        starts = drawn.integers(edges[:-1], edges[1:]) * self.block
        places = (starts[:, None] + np.arange(self.block)).reshape(-1)
        return torch.from_numpy(places[places < layout.numel])
