"""Embeddings whose rows are hashed blocks of a `SharedArray`.

Source: Desai, Chou and Shrivastava, "Random Offset Block Embedding (ROBE) for compressed embedding
tables in deep learning recommendation systems", MLSys 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from slipstream.arguments import whole_number
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.techniques.embedding.bags import check_mode, each, normalise, padding_row
from slipstream.techniques.embedding.protocol import CHUNK_ROWS, dense
from slipstream.techniques.embedding.shared_array import SharedArray, tables_of

_LINE_BYTES = 64


class _Table(nn.Module):
    """A table of rows in a shared array.

    Attributes:
        pool: the array.
        table_id: the table's number in it: part of what its hashes depend on.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        pool: SharedArray,
        table_id: int | None,
        padding_idx: int | None,
    ) -> None:
        super().__init__()
        _expect_pool(pool)
        num_embeddings = whole_number("num_embeddings", num_embeddings)
        padding_idx = padding_row(padding_idx, num_embeddings)
        tables_of(pool.seed, [(0, num_embeddings, embedding_dim, padding_idx)])
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.pool = pool
        self.table_id = pool.take(table_id)
        described = tables_of(
            pool.seed, [(self.table_id, num_embeddings, embedding_dim, padding_idx)]
        )
        # Not buffers: they stay on the CPU, whatever the module is moved to.
        self._tables = described
        self._plain = torch.cat([described[:, :3], torch.full((1, 1), -1)], 1)

    @property
    def described(self) -> torch.Tensor:
        """The table as the operator takes it, without a padding row: int64 [1, 4]."""
        return self._plain

    @property
    def nbytes(self) -> int:
        """Bytes of the array, which other tables may share."""
        return self.pool.nbytes

    @property
    def reads_per_id(self) -> float:
        """Cache lines of the array that one id reads: blocks begin anywhere."""
        item = self.pool.array.element_size()
        each_block = min(self.pool.block, self.embedding_dim)
        blocks = self.embedding_dim / each_block
        return blocks * ((each_block - 1) * item / _LINE_BYTES + 1)

    @property
    def flops_per_id(self) -> int:
        """A sign and an addition for every number."""
        return self.embedding_dim * (2 if self.pool.sign else 1)

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, int32 or int64 [n], padding too: [n, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row.
        """
        bags = each(rows, self.pool.array.device)
        made = self.pool.look_up(
            bags.ids, None, None, self._plain, bags.total, self.embedding_dim, "sum"
        )
        return made.view(*rows.shape, self.embedding_dim)

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """The whole table: [num_embeddings, embedding_dim], without a gradient.

        Raises:
            InvalidArgumentError: `chunk_rows` is less than 1.
        """
        shape = (self.num_embeddings, self.embedding_dim)
        return dense(self.materialize, shape, self.pool.array, chunk_rows)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, table_id={self.table_id}{padding}"


class ROBEEmbedding(_Table):
    """``nn.Embedding`` with its rows in a shared array.

    Args:
        num_embeddings, embedding_dim: of the table it stands for.
        pool: where its numbers are, perhaps with other tables'.
        table_id: its number in `pool`, part of the checkpoint's meaning; the next free if None.
        padding_idx: an id whose row is zeros and gets no gradient.

    Raises:
        InvalidArgumentError: a size below 1, a padding row the table lacks, a number that is taken.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        pool: SharedArray,
        table_id: int | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, pool, table_id, padding_idx)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of `input`, int32 or int64 of any shape: [*input.shape, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row, or no integer.
        """
        bags = each(input, self.pool.array.device)
        made = self.pool.look_up(
            bags.ids, None, None, self._tables, bags.total, self.embedding_dim, "sum"
        )
        return made.view(*input.shape, self.embedding_dim)


class ROBEEmbeddingBag(_Table):
    """``nn.EmbeddingBag`` with its rows in a shared array.

    Args:
        num_embeddings, embedding_dim, mode, padding_idx, include_last_offset: as
            ``nn.EmbeddingBag``.
        pool, table_id: as `ROBEEmbedding`.

    Raises:
        InvalidArgumentError: as `ROBEEmbedding`; an unknown mode.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        pool: SharedArray,
        table_id: int | None = None,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        check_mode(mode)
        super().__init__(num_embeddings, embedding_dim, pool, table_id, padding_idx)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sums, means or maxima of bags of rows: [bags, embedding_dim]; zeros for empty bags.

        Raises:
            InvalidArgumentError: names the argument and what is wrong with it.
        """
        pool = self.pool
        array = pool.array
        bags = normalise(
            input, offsets, per_sample_weights, mode=self.mode, dtype=array.dtype,
            device=array.device, include_last_offset=self.include_last_offset,
        )  # fmt: skip
        return pool.look_up(
            bags.ids, bags.offsets, bags.weights, self._tables, bags.total, self.embedding_dim,
            self.mode,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


class ROBEEmbeddingCollection(nn.Module):
    """Several tables of one shared array, looked up in one call.

    Args:
        tables: rows and dimension of each by name; they are numbered from `table_id` on.
        pool: where their numbers are.
        mode: of all bags.
        table_id: the first table's number; the next free one if None.
        include_last_offset: offsets have one element more, the end of the last bag.

    Raises:
        InvalidArgumentError: no tables, or as `ROBEEmbeddingBag`.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[int, int]],
        pool: SharedArray,
        mode: str = "sum",
        table_id: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__()
        check_mode(mode)
        _expect_pool(pool)
        if not tables:
            raise InvalidArgumentError("tables", "there are none")
        try:
            shapes = [(rows, dimension, None) for rows, dimension in tables.values()]
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                "tables", "are not rows and dimensions by name", remedy='{"film": (10_000, 64)}'
            ) from error
        tables_of(pool.seed, [(0, *shape) for shape in shapes])
        numbers = [
            pool.take(None if table_id is None else table_id + place)
            for place in range(len(shapes))
        ]
        self.pool, self.mode, self.include_last_offset = pool, mode, include_last_offset
        self.tables = dict(tables)
        self.table_ids = dict(zip(tables, numbers, strict=True))
        self._tables = tables_of(
            pool.seed, [(number, *shape) for number, shape in zip(numbers, shapes, strict=True)]
        )
        self._width = sum(dimension for _, dimension in tables.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.pool.nbytes

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bags of all tables, side by side: [bags, sum of dimensions].

        Args:
            input: ids of the first table's bags, then those of the second and so on: [count] with
                `offsets` [tables * bags], or [tables * bags, n] for bags of n ids each.

        Raises:
            InvalidArgumentError: names the argument and what is wrong with it.
        """
        array = self.pool.array
        bags = normalise(
            input, offsets, per_sample_weights, mode=self.mode, dtype=array.dtype,
            device=array.device, include_last_offset=self.include_last_offset,
            tables=len(self.tables),
        )  # fmt: skip
        return self.pool.look_up(
            bags.ids, bags.offsets, bags.weights, self._tables, bags.total, self._width, self.mode
        )

    def split(self, made: torch.Tensor) -> dict[str, torch.Tensor]:
        """What `forward` returned by table: [bags, dimension] each, views."""
        sizes = [dimension for _, dimension in self.tables.values()]
        return dict(zip(self.tables, torch.split(made, sizes, 1), strict=True))

    def table(self, name: str) -> tuple[int, torch.Tensor]:
        """The number of a table, and its row of the operator's description.

        Raises:
            UnknownNameError: there is no such table.
        """
        if name not in self.table_ids:
            raise UnknownNameError("table", name, self.table_ids)
        place = list(self.table_ids).index(name)
        return self.table_ids[name], self._tables[place : place + 1]

    def materialize(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the table `name`: [len(rows), dimension].

        Raises:
            UnknownNameError: there is no such table.
            InvalidArgumentError: an id that is no row of it.
        """
        _, described = self.table(name)
        bags = each(rows, self.pool.array.device)
        width = self.tables[name][1]
        return self.pool.look_up(bags.ids, None, None, described, bags.total, width, "sum")

    def extra_repr(self) -> str:
        rows = sum(rows for rows, _ in self.tables.values())
        return f"{len(self.tables)} tables, {rows} rows, mode={self.mode!r}"


def _expect_pool(pool: object) -> None:
    """
    Raises:
        InvalidArgumentError: it is no `SharedArray`.
    """
    if not isinstance(pool, SharedArray):
        raise InvalidArgumentError(
            "pool", f"is a {type(pool).__name__}, not a SharedArray", remedy='SharedArray("64MiB")'
        )


if TYPE_CHECKING:
    from slipstream.techniques.embedding.protocol import CompressedEmbedding

    def _conforms(one: ROBEEmbedding, other: ROBEEmbeddingBag) -> tuple[CompressedEmbedding, ...]:
        return one, other
