"""What every compressed embedding can do, whatever its parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch

from slipstream.arguments import whole_number

CHUNK_ROWS = 1 << 20
"""Rows that are made at once where a whole table is."""


@runtime_checkable
class CompressedEmbedding(Protocol):
    """A module that is called as ``nn.Embedding`` or ``nn.EmbeddingBag`` and has fewer numbers.

    Attributes:
        num_embeddings, embedding_dim: of the table it stands for.
        nbytes: of its parameters; what several modules share counts for each of them.
        reads_per_id: cache lines of parameters that one id reads, on average.
        flops_per_id: of arithmetic to make a row and add it to a bag.
    """

    num_embeddings: int
    embedding_dim: int

    @property
    def nbytes(self) -> int: ...

    @property
    def reads_per_id(self) -> float: ...

    @property
    def flops_per_id(self) -> int: ...

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, exactly as they are looked up: [len(rows), embedding_dim]."""

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """The whole table: [num_embeddings, embedding_dim]."""


def dense(
    materialize: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, int],
    like: torch.Tensor,
    chunk_rows: int,
) -> torch.Tensor:
    """A whole table, made so many rows at once, without a gradient.

    Raises:
        InvalidArgumentError: `chunk_rows` is less than one.
    """
    chunk_rows = whole_number("chunk_rows", chunk_rows)
    table = like.new_empty(shape)
    with torch.no_grad():
        for rows in _chunks(shape[0], chunk_rows):
            table[rows[0] : rows[-1] + 1] = materialize(
                torch.arange(rows[0], rows[-1] + 1, device=like.device)
            )
    return table


def _chunks(rows: int, most: int) -> Iterator[range]:
    for begin in range(0, rows, most):
        yield range(begin, min(begin + most, rows))
