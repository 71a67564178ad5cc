"""acp: PowerSGD in turns: one of the two thin matrices a step, so that one all-reduce is enough.

In even steps the last right factor is made orthonormal and P = M Q is added up, in odd ones the
last left factor and Q = M^T P: each step's product is the mean gradient's projection on what the
step before found. Source: Zhang et al., "Evaluation and Optimization of Gradient Compression for
Distributed Deep Learning", ICDCS 2023 (ACP-SGD).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.ranks.requests import Exchange, Reduce
from slipstream.technique import Traits
from slipstream.techniques.distributed.compression.compressor import Message, sections
from slipstream.techniques.distributed.compression.powersgd import LowRank, Matrix, as_they_are
from slipstream.techniques.distributed.compression.technique import COMPRESSES

if TYPE_CHECKING:
    import torch

    from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory


@dataclass(frozen=True)
class ACP(LowRank):
    """Half of PowerSGD's bytes and messages a step; a product lags by half a power iteration.

    Attributes:
        rank: columns of the factors.
        start: steps at the beginning that are exchanged as they are, while gradients are large.
        seed: of the first factor; the same on all workers.
    """

    name: ClassVar[str] = "acp"
    traits: ClassVar[Traits] = replace(COMPRESSES, variants=("acp:4",))

    def messages(self, layout: Layout) -> list[Message]:
        """One factor with what is not compressed: the mean of even and odd steps."""
        matrices, plain = self.matrices(layout)
        rest = sum(count for _, count in plain)
        factors = sum(m.rank * (m.rows + m.columns) for m in matrices)
        count = rest + math.ceil(factors / 2)
        return [Message("all_reduce", 4 * count)] if count else []

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """One all-reduce."""
        import torch

        from slipstream.techniques.distributed.compression import kernels

        matrices, plain = self.matrices(bucket.layout)
        residual = memory.residual(bucket.layout)
        left = memory.step % 2 == 0
        sizes = [m.rank * (m.rows if left else m.columns) for m in matrices]
        sent = torch.empty(sum(sizes) + sum(count for _, count in plain))
        *factors, rest = sections(sent, [*sizes, sent.numel() - sum(sizes)])
        bases = [self._basis(matrix, memory, left) for matrix in matrices]
        if sound:
            for matrix, basis, factor in zip(matrices, bases, factors, strict=True):
                kept = matrix.of(residual)
                if left:
                    kernels.project(matrix.of(bucket.flat), kept, basis, matrix.thin(factor))
                else:
                    kept += matrix.of(bucket.flat)
                    kernels.project_back(kept, basis, matrix.thin(factor))
            for part, there in as_they_are(rest, plain, bucket.flat):
                part.copy_(there)
        else:
            sent.fill_(math.nan)
        sent = (yield Reduce(sent)).div_(workers)
        if not kernels.finite(sent):
            for matrix in matrices if sound else ():
                matrix.of(residual).sub_(matrix.of(bucket.flat))
            return False
        *factors, rest = sections(sent, [*sizes, sent.numel() - sum(sizes)])
        for matrix, basis, factor in zip(matrices, bases, factors, strict=True):
            found = matrix.thin(factor)
            p, q = (found, basis) if left else (basis, found)
            kernels.reconstruct(p, q, matrix.of(residual), matrix.of(bucket.flat))
            memory.vectors[matrix.name] = found
        for part, there in as_they_are(rest, plain, bucket.flat):
            there.copy_(part)
        return True

    def _basis(self, matrix: Matrix, memory: Memory, left: bool) -> torch.Tensor:
        """What the other factor is found with, orthonormal: [rank, columns or rows]."""
        from slipstream.techniques.distributed.compression import kernels

        basis = self.kept(matrix, memory, matrix.columns if left else matrix.rows).clone()
        kernels.orthonormalise(basis)
        return basis
