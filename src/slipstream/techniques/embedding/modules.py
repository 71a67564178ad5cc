"""Base classes of the modules of all table formats, with the interface of torch's embeddings."""

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
"""Rows per chunk when a whole table is materialized."""


@runtime_checkable
class CompressedEmbedding(Protocol):
    """A compressed module with the interface of ``nn.Embedding`` or ``nn.EmbeddingBag``.

    Attributes:
        num_embeddings, embedding_dim: size of the represented table.
        nbytes: bytes of its parameters; each module counts shared parameters in full.
    """

    num_embeddings: int
    embedding_dim: int

    @property
    def nbytes(self) -> int: ...

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids, bit-identical to look-ups: [len(rows), embedding_dim]."""

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """Return the whole table: [num_embeddings, embedding_dim]."""


class Exportable(nn.Module, ABC):
    """A module that is replaced when a model is exported."""

    mode: str | None = None
    """Reduction of bags: sum, mean or max; None for look-ups of single rows."""

    @abstractmethod
    def for_export(self) -> nn.Module:
        """Return a module of operators in ONNX, which may be `self`.

        Raises:
            InvalidArgumentError: the dtype cannot be exported.
        """


class Rows(Exportable):
    """Rows looked up by their index."""

    @abstractmethod
    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the stored rows of `ids` [count]: [count, width]."""

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Map stored rows, or sums of them, linearly to [..., embedding_dim]; here the identity."""
        return rows

    def for_export(self) -> nn.Module:
        """Return `self`."""
        return self


class Table(Rows):
    """Rows over one parameter: `LowDimTable`, `QuantizedTable`, `HashedTable`.

    Attributes:
        parameter: a tensor with the device and dtype of the table.
    """

    num_embeddings: int
    embedding_dim: int

    @property
    @abstractmethod
    def parameter(self) -> torch.Tensor: ...


class CompressedModule(Exportable, CompressedEmbedding):
    """A table's module in any format; `ById` and `ByBag` define its interface.

    Attributes:
        num_embeddings, embedding_dim: size of the represented table.
        padding_idx: a non-negative id whose row is zero and gets no gradient, or None.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_row(padding_idx, num_embeddings)

    @property
    @abstractmethod
    def parameter(self) -> torch.Tensor:
        """A parameter with the device and dtype of the module."""

    @abstractmethod
    def look_up(
        self, bags: Bags, mode: str | None, padding_idx: int | None, counted: bool = True
    ) -> torch.Tensor:
        """Return bags of rows, [bags, embedding_dim], differentiable.

        Args:
            mode: sum, mean or max; None if each bag is one id.
            padding_idx: an id to ignore, or None.
            counted: whether look-ups count as the model's; False to inspect the table.

        Raises:
            InvalidArgumentError: an id is out of range.
        """

    @abstractmethod
    def exported_rows(self) -> nn.Module:
        """Return the table's `Rows` for export.

        Raises:
            InvalidArgumentError: the dtype cannot be exported.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and codes, with those shared by other tables."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids, padding included: [*rows.shape, embedding_dim].

        Args:
            rows: ids, int32 or int64.

        Raises:
            InvalidArgumentError: an id is out of range.
        """
        bags = each(rows, self.parameter.device)
        return self.look_up(bags, None, None, counted=False).view(*rows.shape, self.embedding_dim)

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """Return the whole table, [num_embeddings, embedding_dim], without a gradient.

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
        """Return the exported rows, with bags of equal size."""
        return ExportedBags(self.exported_rows(), self.mode, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        mode = "" if self.mode is None else f", mode={self.mode!r}"
        return f"{self.num_embeddings}, {self.embedding_dim}{self._format_repr()}{padding}{mode}"

    def _format_repr(self) -> str:
        """Return the part of `extra_repr` that the format adds, with a leading comma."""
        return ""


class ById(CompressedModule):
    """A module with the interface of ``nn.Embedding``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of `input`, int32 or int64 of any shape: [*input.shape, embedding_dim].

        Raises:
            InvalidArgumentError: an id is out of range or not an integer.
        """
        bags = each(input, self.parameter.device)
        return self.look_up(bags, None, self.padding_idx).view(*input.shape, self.embedding_dim)


class ByBag(CompressedModule):
    """A module with the interface of ``nn.EmbeddingBag``.

    Attributes:
        mode, include_last_offset: those of ``nn.EmbeddingBag``.
    """

    mode: str
    include_last_offset: bool

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return sums, means or maxima of bags, [bags, embedding_dim]; zeros for empty bags.

        Raises:
            InvalidArgumentError: an argument is invalid; the error names it.
        """
        bags = normalise(
            input, offsets, per_sample_weights, self.mode, self.parameter, self.include_last_offset
        )
        return self.look_up(bags, self.mode, self.padding_idx)


class _OverTable(CompressedModule):
    """A module over a table."""

    def __init__(self, table: Table, padding_idx: int | None = None) -> None:
        if not isinstance(table, nn.Module):
            raise InvalidArgumentError(
                "table", f"is a {type(table).__name__}, not a torch.nn.Module"
            )
        super().__init__(table.num_embeddings, table.embedding_dim, padding_idx)
        self.table = table
        self._rows = torch.tensor([table.num_embeddings])

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter of the table."""
        return self.table.parameter

    def look_up(
        self, bags: Bags, mode: str | None, padding_idx: int | None, counted: bool = True
    ) -> torch.Tensor:
        """Reduce, then widen the stored rows; for maxima, which are not linear, widen first."""
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
        """Return the table."""
        return self.table

    def _check(self, bags: Bags) -> None:
        """Raise InvalidArgumentError for invalid ids or offsets, or weights that are not finite."""
        if torch.compiler.is_compiling():
            # Traced ids cannot be read: the check becomes part of the graph.
            inside = (bags.ids >= 0) & (bags.ids < self.num_embeddings)
            torch._assert_async(inside.all(), "input: an id is not in [0, num_embeddings)")
            return
        check(bags.ids, bags.offsets, self._rows, bags.total)
        if bags.weights is not None:
            check_weights(bags.weights)


class TableEmbedding(_OverTable, ById):
    """``nn.Embedding`` over a table.

    Args:
        table: the table that holds the rows.
        padding_idx: an id whose row is zero and gets no gradient.

    Raises:
        InvalidArgumentError: the padding row is not in the table.
    """


class TableEmbeddingBag(_OverTable, ByBag):
    """``nn.EmbeddingBag`` over a table.

    Args:
        table: the table that holds the rows.
        mode, padding_idx, include_last_offset: those of ``nn.EmbeddingBag``.

    Raises:
        InvalidArgumentError: the mode is unknown, or the padding row is not in the table.
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
    """Return the class with the interface of `old`, and its arguments of padding and mode."""
    if type(old) is nn.Embedding:
        return by_id, {"padding_idx": old.padding_idx}
    return by_bag, {
        "mode": old.mode, "padding_idx": old.padding_idx,
        "include_last_offset": old.include_last_offset,
    }  # fmt: skip


def over(old: nn.Embedding | nn.EmbeddingBag, table: Table) -> nn.Module:
    """Return a module over `table` with the interface of `old`."""
    kind, arguments = called_as(old, TableEmbedding, TableEmbeddingBag)
    module: nn.Module = kind(table, **arguments)
    return module


class ExportedBags(nn.Module):
    """A module over rows with bags of equal size, in exportable operators."""

    def __init__(self, rows: nn.Module, mode: str | None, padding_idx: int | None) -> None:
        super().__init__()
        self.rows: Any = rows
        self.mode, self.padding_idx = mode, padding_idx

    def forward(self, input: torch.Tensor, offsets: None = None) -> torch.Tensor:
        if offsets is not None:
            raise InvalidArgumentError(
                "offsets", "bags with offsets cannot be exported",
                remedy="pass padded bags of equal size, as rows of a two-dimensional input",
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
