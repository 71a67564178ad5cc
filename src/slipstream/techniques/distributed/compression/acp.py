"""acp: PowerSGD that alternates between its two factors, with one all-reduce per step.

Even steps orthonormalise the last right factor and sum P = M Q; odd ones orthonormalise the last
left factor and sum Q = M^T P. The result is the mean gradient's projection on the previous step's
factor. Source: Zhang et al., "Evaluation and Optimization of Gradient Compression for
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
    """Half of PowerSGD's bytes and messages per step, with half a power iteration.

    Attributes:
        rank: number of columns of the factors.
        start: number of initial steps without compression, while gradients are large.
        seed: seed of the first factor; the same on all workers.
    """

    name: ClassVar[str] = "acp"
    traits: ClassVar[Traits] = replace(COMPRESSES, variants=("acp:4",))

    def messages(self, layout: Layout) -> list[Message]:
        """Return one message: a factor, averaged over even and odd steps, and dense parameters."""
        matrices, plain = self.matrices(layout)
        dense = sum(count for _, count in plain)
        factors = sum(m.rank * (m.rows + m.columns) for m in matrices)
        count = dense + math.ceil(factors / 2)
        return [Message("all_reduce", 4 * count)] if count else []

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        matrices, _ = self.matrices(bucket.layout)
        residual = memory.residual(bucket.layout)
        left = memory.step % 2 == 0
        bases = {}
        for matrix in matrices:
            # The factor to project on, [rank, columns or rows].
            basis = self.last_factor(
                matrix, memory, matrix.columns if left else matrix.rows
            ).clone()
            kernels.orthonormalise(basis)
            bases[matrix] = basis

        def project(matrix: Matrix, factor: torch.Tensor) -> None:
            gradient, unsent = matrix.of(bucket.flat), matrix.of(residual)
            if left:
                kernels.project(gradient, unsent, bases[matrix], factor)
            else:
                unsent += gradient
                kernels.project_back(unsent, bases[matrix], factor)

        factors = yield from self.sum_factors(
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
