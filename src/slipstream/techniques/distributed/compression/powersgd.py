"""powersgd: gradient matrices as a product of two thin ones, by one power iteration.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.errors import InvalidArgumentError
from slipstream.ranks.requests import Exchange, Gather, Reduce
from slipstream.technique import Traits
from slipstream.techniques.distributed.compression import kernels
from slipstream.techniques.distributed.compression.compressor import Message
from slipstream.techniques.distributed.compression.technique import COMPRESSES, CompressionTechnique

if TYPE_CHECKING:
    import torch

    from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory

# A matrix is compressed if its factors are at least this much smaller.
_MIN_RATIO = 2.0


@dataclass(frozen=True)
class Matrix:
    """A parameter as a matrix: its first dimension by all others."""

    name: str
    offset: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix in a bucket, [rows, columns]."""
        part = flat[self.offset : self.offset + self.rows * self.columns]
        return part.view(self.rows, self.columns)

    def thin(self, factor: torch.Tensor) -> torch.Tensor:
        """Return a flat factor as [rank, rows or columns]."""
        return factor.view(self.rank, -1)


@dataclass(frozen=True)
class LowRank(CompressionTechnique):
    """Base of low-rank compressors: selection of matrices, and their factors between steps.

    Attributes:
        rank: number of columns of the factors.
        start: number of initial steps without compression, while gradients are large.
        seed: seed of the first factor; the same on all workers.
    """

    rank: int = 4
    start: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidArgumentError(f"{self.name}:rank", f"{self.rank} is below 1")
        if self.start < 0:
            raise InvalidArgumentError(f"{self.name}:start", f"{self.start} is negative")

    def matrices(self, layout: Layout) -> tuple[list[Matrix], list[tuple[int, int]]]:
        """Return the matrices to compress, and (offset, length) of the other parameters."""
        compressed, plain = [], []
        for name, shape, span in zip(layout.names, layout.shapes, layout.spans, strict=True):
            offset, count = span
            rows = shape[0] if shape else 1
            columns = count // rows if rows else 0
            rank = min(self.rank, rows, columns)
            if rank and (rows + columns) * rank * _MIN_RATIO < count:
                compressed.append(Matrix(name, offset, rows, columns, rank))
            else:
                plain.append(span)
        return compressed, plain

    def last_factor(self, matrix: Matrix, memory: Memory, length: int) -> torch.Tensor:
        """Return the last factor, [rank, length]; redraw zero rows, which would remain zero."""
        import torch

        cached = memory.vectors.get(matrix.name)
        if cached is not None and cached.shape == (matrix.rank, length):
            if bool(cached[:, 0].all()):
                return cached
            lost = ~cached.any(1)
            if not bool(lost.any()):
                return cached
        else:
            cached, lost = None, torch.ones(matrix.rank, dtype=torch.bool)
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(matrix.name.encode()))
        fresh = torch.randn(matrix.rank, length, generator=generator)
        return fresh if cached is None else torch.where(lost[:, None], fresh, cached)

    def sum_factors(
        self, bucket: Bucket, residual: torch.Tensor, workers: int, sound: bool,
        sizes: Sequence[int], project: Callable[[Matrix, torch.Tensor], None],
    ) -> Generator[Reduce | Gather, torch.Tensor, list[torch.Tensor] | None]:  # fmt: skip
        """Sum a factor of each matrix over workers, and average the other parameters.

        Args:
            sizes: number of elements of each factor.
            project: adds a matrix to its residual, and fills its factor [rank, ...].

        Returns:
            The sums, [rank, ...] each; None, with no state changed, if a gradient of any worker is
            not finite.
        """
        import torch

        matrices, plain = self.matrices(bucket.layout)
        counts = [*sizes, *(count for _, count in plain)]
        sent = torch.empty(sum(counts))
        if sound:
            parts = sent.split(counts)
            for matrix, factor in zip(matrices, parts, strict=False):
                project(matrix, matrix.thin(factor))
            for (at, count), part in zip(plain, parts[len(sizes) :], strict=True):
                part.copy_(bucket.flat[at : at + count])
        else:
            sent.fill_(math.nan)
        sent = yield Reduce(sent)
        if not kernels.finite(sent):
            for matrix in matrices if sound else ():
                matrix.of(residual).sub_(matrix.of(bucket.flat))
            return None
        parts = sent.split(counts)
        for (at, count), part in zip(plain, parts[len(sizes) :], strict=True):
            torch.div(part, workers, out=bucket.flat.narrow(0, at, count))
        return [matrix.thin(factor) for matrix, factor in zip(matrices, parts, strict=False)]


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Sum P = M Q, orthonormalise its columns, sum Q = M^T P; the mean gradient is P Q^T.

    Q starts from that of the last step. Vectors and small matrices are sent uncompressed with P.

    Attributes:
        rank: number of columns of P and Q.
        start: number of initial steps without compression, while gradients are large.
        seed: seed of the first Q; the same on all workers.
    """

    name: ClassVar[str] = "powersgd"
    traits: ClassVar[Traits] = replace(
        COMPRESSES, variants=("powersgd:1", "powersgd:4", "powersgd:16")
    )

    def messages(self, layout: Layout) -> list[Message]:
        """Return two messages: P with the uncompressed parameters, then Q."""
        matrices, plain = self.matrices(layout)
        first = sum(m.rank * m.rows for m in matrices) + sum(count for _, count in plain)
        second = sum(m.rank * m.columns for m in matrices)
        return [Message("all_reduce", 4 * count) for count in (first, second) if count]

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """Run two all-reduces, or one if no matrix is large enough."""
        import torch

        matrices, _ = self.matrices(bucket.layout)
        residual = memory.residual(bucket.layout)

        def project(matrix: Matrix, p: torch.Tensor) -> None:
            q = self.last_factor(matrix, memory, matrix.columns)
            kernels.project(matrix.of(bucket.flat), matrix.of(residual), q, p)

        lefts = yield from self.sum_factors(
            bucket, residual, workers, sound, [m.rank * m.rows for m in matrices], project
        )
        if lefts is None:
            return False
        if matrices:
            sizes = [m.rank * m.columns for m in matrices]
            second = torch.empty(sum(sizes))
            for matrix, p, q in zip(matrices, lefts, second.split(sizes), strict=True):
                kernels.orthonormalise(p)
                kernels.project_back(matrix.of(residual), p, matrix.thin(q))
            second = (yield Reduce(second)).div_(workers)
            for matrix, p, factor in zip(matrices, lefts, second.split(sizes), strict=True):
                q = matrix.thin(factor)
                kernels.reconstruct(p, q, matrix.of(residual), matrix.of(bucket.flat))
                memory.vectors[matrix.name] = q
        return True
