"""What modules of every table format have in common: they are called as torch's embeddings are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.bags import (
    Bags,
    check_mode,
    each,
    normalise,
    padding_row,
    reduced,
)
from slipstream.techniques.embedding.kernels.bags import check, check_weights
from slipstream.techniques.embedding.weighting import chunks

CHUNK_ROWS = 1 << 20
"""Rows that are made at once where a whole table is."""

_LINE_BYTES = 64


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
    @abstractmethod
    def reads_per_id(self) -> float: ...

    @property
    @abstractmethod
    def flops_per_id(self) -> int: ...

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, exactly as they are looked up: [len(rows), embedding_dim]."""

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """The whole table: [num_embeddings, embedding_dim]."""


class Exportable(nn.Module, ABC):
    """A module that has another one in its place where a model is exported."""

    mode: str | None = None
    """Of bags: sum, mean or max; None where rows are looked up by themselves."""

    @abstractmethod
    def for_export(self) -> nn.Module:
        """A module of operators that ONNX has; itself where its own are such.

        Raises:
            InvalidArgumentError: there is none for its dtype.
        """


class Rows(Exportable):
    """Rows that are found by their number."""

    @abstractmethod
    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` [count], each a row, as they are stored: [count, width]."""

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Stored rows, or sums of them, to [..., embedding_dim]: a linear map, here none."""
        return rows

    def for_export(self) -> nn.Module:
        """Itself."""
        return self


class Table(Rows):
    """Rows with their cost: `LowDimTable`, `QuantizedTable`, `HashedTable`.

    Attributes:
        parameter: tells device and dtype.
        row_bytes: of parameters that one id reads.
        flops_per_id: of arithmetic to make a row.
    """

    num_embeddings: int
    embedding_dim: int

    @property
    @abstractmethod
    def parameter(self) -> torch.Tensor: ...

    @property
    @abstractmethod
    def row_bytes(self) -> float: ...

    @property
    def flops_per_id(self) -> int:
        """None but the sum of the bag."""
        return 0


class CompressedModule(Exportable, CompressedEmbedding):
    """A table's module, whatever its format; `ById` and `ByBag` tell how it is called.

    Attributes:
        num_embeddings, embedding_dim: of the table it stands for.
        padding_idx: an id whose row is zeros and gets no gradient, counted from the front, or None.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_row(padding_idx, num_embeddings)

    @property
    @abstractmethod
    def parameter(self) -> torch.Tensor:
        """A parameter; tells device and dtype."""

    @abstractmethod
    def look_up(
        self, bags: Bags, mode: str | None, padding_idx: int | None, counted: bool = True
    ) -> torch.Tensor:
        """Bags of rows: [bags, embedding_dim], differentiable.

        Args:
            mode: sum, mean or max; None where each bag is one id.
            padding_idx: an id whose rows do not count; None for none.
            counted: whether the model reads the rows, and not somebody who looks at the table.

        Raises:
            InvalidArgumentError: an id that is no row.
        """

    @abstractmethod
    def exported_rows(self) -> nn.Module:
        """The table's `Rows` as they are exported.

        Raises:
            InvalidArgumentError: there is no form for their dtype.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and codes; what other tables share is counted, too."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, int32 or int64, padding too: [*rows.shape, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row.
        """
        bags = each(rows, self.parameter.device)
        return self.look_up(bags, None, None, counted=False).view(*rows.shape, self.embedding_dim)

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """The whole table: [num_embeddings, embedding_dim], without a gradient.

        Raises:
            InvalidArgumentError: `chunk_rows` is less than 1.
        """
        chunk_rows = as_integer("chunk_rows", chunk_rows)
        table = self.parameter.new_empty(self.num_embeddings, self.embedding_dim)
        with torch.no_grad():
            for part in chunks(self.num_embeddings, chunk_rows):
                table[part] = self.materialize(
                    torch.arange(part.start, part.stop, device=table.device)
                )
        return table

    def for_export(self) -> nn.Module:
        """Its rows, and bags of one size of them."""
        return ExportedBags(self.exported_rows(), self.mode, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        mode = "" if self.mode is None else f", mode={self.mode!r}"
        return f"{self.num_embeddings}, {self.embedding_dim}{self._format_repr()}{padding}{mode}"

    def _format_repr(self) -> str:
        """What the format adds to `extra_repr`, behind a comma."""
        return ""


class ById(CompressedModule):
    """Called as ``nn.Embedding``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of `input`, int32 or int64 of any shape: [*input.shape, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row, or no integer.
        """
        bags = each(input, self.parameter.device)
        return self.look_up(bags, None, self.padding_idx).view(*input.shape, self.embedding_dim)


class ByBag(CompressedModule):
    """Called as ``nn.EmbeddingBag``.

    Attributes:
        mode, include_last_offset: as ``nn.EmbeddingBag``.
    """

    mode: str
    include_last_offset: bool

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
        bags = normalise(
            input, offsets, per_sample_weights, self.mode, self.parameter, self.include_last_offset
        )
        return self.look_up(bags, self.mode, self.padding_idx)


class _OverTable(CompressedModule):
    """A module over a table."""

    def __init__(self, table: Table, padding_idx: int | None = None) -> None:
        if not isinstance(table, nn.Module):
            raise InvalidArgumentError("table", f"{type(table).__name__} is no module")
        super().__init__(table.num_embeddings, table.embedding_dim, padding_idx)
        self.table = table
        self._rows = torch.tensor([table.num_embeddings])

    @property
    def parameter(self) -> torch.Tensor:
        """The table's."""
        return self.table.parameter

    @property
    def reads_per_id(self) -> float:
        """Cache lines that one id reads: a row begins anywhere in one."""
        return lines_of(self.table.row_bytes)

    @property
    def flops_per_id(self) -> int:
        """To make a row and add it to a bag."""
        return self.table.flops_per_id + self.embedding_dim

    def look_up(
        self, bags: Bags, mode: str | None, padding_idx: int | None, counted: bool = True
    ) -> torch.Tensor:
        """Sums and means of stored rows, widened; maxima of widened ones: that is not linear."""
        self._check(bags)
        rows = self.table.look_up(bags.ids)
        if mode is None:
            wide = self.table.widen(rows)
            if padding_idx is not None:
                wide = wide.masked_fill((bags.ids == padding_idx)[:, None], 0)
            return wide
        if mode == "max":
            return reduced(self.table.widen(rows), bags, mode, padding_idx)
        return self.table.widen(reduced(rows, bags, mode, padding_idx))

    def exported_rows(self) -> nn.Module:
        """The table."""
        return self.table

    def _check(self, bags: Bags) -> None:
        """Raise InvalidArgumentError for ids or offsets that are wrong, or weights not finite."""
        if torch.compiler.is_compiling():
            # No look at the ids while they are traced: a check that stays in the graph.
            inside = (bags.ids >= 0) & (bags.ids < self.num_embeddings)
            torch._assert_async(inside.all(), "input: ids lie in [0, num_embeddings)")
            return
        check(bags.ids, bags.offsets, self._rows, bags.total)
        if bags.weights is not None:
            check_weights(bags.weights)


class TableEmbedding(_OverTable, ById):
    """``nn.Embedding`` over a table.

    Args:
        table: where rows are.
        padding_idx: an id whose row is zeros and gets no gradient.

    Raises:
        InvalidArgumentError: a padding row that the table lacks.
    """


class TableEmbeddingBag(_OverTable, ByBag):
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


def called_as(
    old: nn.Embedding | nn.EmbeddingBag, by_id: Any, by_bag: Any
) -> tuple[Any, dict[str, Any]]:
    """The class of the two that is called as `old` is, and its arguments of padding and mode."""
    if type(old) is nn.Embedding:
        return by_id, {"padding_idx": old.padding_idx}
    return by_bag, {
        "mode": old.mode, "padding_idx": old.padding_idx,
        "include_last_offset": old.include_last_offset,
    }  # fmt: skip


def over(old: nn.Embedding | nn.EmbeddingBag, table: Table) -> nn.Module:
    """A module over `table` that is called as `old` is."""
    kind, arguments = called_as(old, TableEmbedding, TableEmbeddingBag)
    module: nn.Module = kind(table, **arguments)
    return module


def lines_of(nbytes: float) -> float:
    """Cache lines that a run of bytes lies in, on average, when it begins anywhere."""
    return (nbytes - 1) / _LINE_BYTES + 1


class ExportedBags(nn.Module):
    """A module over rows, in operators that are exported well: bags of one size."""

    def __init__(self, rows: nn.Module, mode: str | None, padding_idx: int | None) -> None:
        super().__init__()
        self.rows: Any = rows
        self.mode, self.padding_idx = mode, padding_idx

    def forward(self, input: torch.Tensor, offsets: None = None) -> torch.Tensor:
        if offsets is not None:
            raise InvalidArgumentError(
                "offsets", "bags with offsets are not exported",
                remedy="give bags of one size as rows of a two-dimensional input, padded",
            )  # fmt: skip
        rows: torch.Tensor = self.rows.widen(self.rows.look_up(input.long().reshape(-1)))
        rows = rows.reshape(*input.shape, rows.shape[-1])
        if self.mode is None and self.padding_idx is None:
            return rows
        present = torch.ones_like(input, dtype=rows.dtype)
        if self.padding_idx is not None:
            present = (input != self.padding_idx).to(rows.dtype)
        rows = rows * present[..., None]
        if self.mode is None:
            return rows
        sums = rows.sum(1)
        return sums if self.mode == "sum" else sums / present.sum(1)[:, None].clamp(min=1)
