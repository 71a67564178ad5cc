"""``nn.Embedding`` and ``nn.EmbeddingBag`` over any way to keep a table's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.native.bags import check, check_weights
from slipstream.techniques.embedding.bags import (
    Bags,
    check_mode,
    each,
    normalise,
    padding_row,
    reduced,
)
from slipstream.techniques.embedding.protocol import CHUNK_ROWS, dense

_LINE_BYTES = 64


class Table(Protocol):
    """Rows that are found by their number: `LowDimTable`, `QuantizedTable`, `HashedTable`.

    Attributes:
        parameter: tells device and dtype.
        row_bytes: of parameters that one id reads.
        flops_per_id: of arithmetic to make a row.
    """

    num_embeddings: int
    embedding_dim: int

    @property
    def parameter(self) -> torch.Tensor: ...

    @property
    def row_bytes(self) -> float: ...

    @property
    def flops_per_id(self) -> int: ...

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` [count], each a row, as they are kept: [count, width]."""

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Kept rows, or sums of them, to [..., embedding_dim]: a linear map."""


class _Over(nn.Module):
    """A module over a table."""

    def __init__(self, table: Table, padding_idx: int | None) -> None:
        super().__init__()
        if not isinstance(table, nn.Module):
            raise InvalidArgumentError("table", f"{type(table).__name__} is no module")
        self.table = table
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = padding_row(padding_idx, table.num_embeddings)
        self._rows = torch.tensor([table.num_embeddings])

    @property
    def nbytes(self) -> int:
        """Bytes of the table's parameters and codes."""
        kept = [*self.table.parameters(), *self.table.buffers()]
        return sum(tensor.nbytes for tensor in kept)

    @property
    def reads_per_id(self) -> float:
        """Cache lines that one id reads: a row begins anywhere in one."""
        return (self.table.row_bytes - 1) / _LINE_BYTES + 1

    @property
    def flops_per_id(self) -> int:
        """To make a row and add it to a bag."""
        return self.table.flops_per_id + self.embedding_dim

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, int32 or int64 [n], padding too: [n, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row.
        """
        bags = each(rows, self.table.parameter.device)
        self._check(bags)
        made: torch.Tensor = self.table.widen(self.table.look_up(bags.ids))
        return made.view(*rows.shape, self.embedding_dim)

    def _check(self, bags: Bags) -> None:
        """
        Raises:
            InvalidArgumentError: an id that is no row, offsets out of order, weights not finite.
        """
        if torch.compiler.is_compiling():
            # No look at the ids while they are traced: a check that stays in the graph.
            inside = (bags.ids >= 0) & (bags.ids < self.num_embeddings)
            torch._assert_async(inside.all(), "input: ids lie in [0, num_embeddings)")
            return
        check(bags.ids, bags.offsets, self._rows, bags.total)
        if bags.weights is not None:
            check_weights(bags.weights)

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """The whole table: [num_embeddings, embedding_dim], without a gradient.

        Raises:
            InvalidArgumentError: `chunk_rows` is less than 1.
        """
        shape = (self.num_embeddings, self.embedding_dim)
        return dense(self.materialize, shape, self.table.parameter, chunk_rows)


class TableEmbedding(_Over):
    """``nn.Embedding`` over a table.

    Args:
        table: where rows are.
        padding_idx: an id whose row is zeros and gets no gradient.

    Raises:
        InvalidArgumentError: a padding row that the table lacks.
    """

    def __init__(self, table: Table, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of `input`, int32 or int64 of any shape: [*input.shape, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row, or no integer.
        """
        made = self.materialize(input)
        if self.padding_idx is not None:
            made = made.masked_fill((input == self.padding_idx)[..., None], 0)
        return made


class TableEmbeddingBag(_Over):
    """``nn.EmbeddingBag`` over a table.

    Args:
        table: where rows are.
        mode, padding_idx, include_last_offset: as ``nn.EmbeddingBag``.

    Raises:
        InvalidArgumentError: an unknown mode, or a padding row that the table lacks.
    """

    def __init__(
        self,
        table: Table,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__(table, padding_idx)
        check_mode(mode)
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
        parameter = self.table.parameter
        bags = normalise(
            input, offsets, per_sample_weights, mode=self.mode, dtype=parameter.dtype,
            device=parameter.device, include_last_offset=self.include_last_offset,
        )  # fmt: skip
        self._check(bags)
        rows = self.table.look_up(bags.ids)
        if self.mode == "max":  # of the rows as they are read, which is no linear map
            rows = self.table.widen(rows)
        made = reduced(rows, bags, self.mode, self.padding_idx)
        return made if self.mode == "max" else self.table.widen(made)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}"


if TYPE_CHECKING:
    from slipstream.techniques.embedding.low_dimension import LowDimTable
    from slipstream.techniques.embedding.protocol import CompressedEmbedding
    from slipstream.techniques.embedding.quantized_rows import QuantizedTable
    from slipstream.techniques.embedding.shared_rows import HashedTable

    def _conforms(one: TableEmbedding, other: TableEmbeddingBag) -> tuple[CompressedEmbedding, ...]:
        return one, other

    def _tables(one: LowDimTable, two: QuantizedTable, three: HashedTable) -> tuple[Table, ...]:
        return one, two, three
