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

from slipstream.ranks.requests import Exchange
from slipstream.technique import Traits
from slipstream.techniques.distributed.compression import kernels
from slipstream.techniques.distributed.compression.compressor import Message
from slipstream.techniques.distributed.compression.powersgd import LowRank, Matrix
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
        matrices, _ = self.matrices(bucket.layout)
        residual = memory.residual(bucket.layout)
        left = memory.step % 2 == 0
        bases = {}
        for matrix in matrices:
            # What the other factor is found with: [rank, columns or rows].
            basis = self.kept(matrix, memory, matrix.columns if left else matrix.rows).clone()
            kernels.orthonormalise(basis)
            bases[matrix] = basis

        def project(matrix: Matrix, factor: torch.Tensor) -> None:
            gradient, kept = matrix.of(bucket.flat), matrix.of(residual)
            if left:
                kernels.project(gradient, kept, bases[matrix], factor)
            else:
                kept += gradient
                kernels.project_back(kept, bases[matrix], factor)

        factors = yield from self.added_up(
            bucket, residual, workers, sound,
            [m.rank * (m.rows if left else m.columns) for m in matrices], project,
        )  # fmt: skip
        if factors is None:
            return False
        for matrix, factor in zip(matrices, factors, strict=True):
            factor.div_(workers)
            p, q = (factor, bases[matrix]) if left else (bases[matrix], factor)
            kernels.reconstruct(p, q, matrix.of(residual), matrix.of(bucket.flat))
            memory.vectors[matrix.name] = factor
        return True
