"""A table of fewer columns, and a matrix that widens its rows.

It is the simplest compressed format, and the baseline of the others at equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.formats.codes import (
    QuantizedTable,
    rounding_error,
    table_bytes,
)
from slipstream.techniques.embedding.formats.format import (
    Choice,
    Exchange,
    Start,
    TableFacts,
    TableFormat,
    sizes,
    usual_energies,
    with_errors,
)
from slipstream.techniques.embedding.modules import Table, over
from slipstream.techniques.embedding.weighting import chunks, row_weights_of


class LowDimTable(Table):
    """Rows of `dim` numbers times a [dim, embedding_dim] matrix.

    Args:
        num_embeddings, embedding_dim: size of the represented table.
        dim: numbers stored per row.
        init_std: standard deviation of the widened initial rows, which are normal.

    Attributes:
        weight: the rows, [num_embeddings, dim]; None if they are codes, see `quantized`.
        codes: the rows as a `QuantizedTable`, or None.
        projection: [dim, embedding_dim].

    Raises:
        InvalidArgumentError: a size is below 1, or `dim` exceeds `embedding_dim`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dim: int,
        *,
        init_std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_embeddings = as_integer("num_embeddings", num_embeddings)
        dim = as_integer("dim", dim)
        if dim > embedding_dim:
            raise InvalidArgumentError("dim", f"{dim} exceeds the table's {embedding_dim}")
        self.num_embeddings, self.embedding_dim, self.dim = num_embeddings, embedding_dim, dim
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(num_embeddings, dim, device=device, dtype=dtype)
        )
        self.codes: QuantizedTable | None = None
        self.projection = nn.Parameter(torch.empty(dim, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters(init_std)

    @classmethod
    def from_dense(
        cls, weight: torch.Tensor, dim: int, row_weights: torch.Tensor | None = None
    ) -> LowDimTable:
        """Return the nearest such table, by squared errors weighted by `row_weights`.

        Args:
            weight: [num_embeddings, embedding_dim].
            row_weights: non-negative weights of the rows, [num_embeddings]; uniform if None.

        Raises:
            InvalidArgumentError: an argument of the class is invalid, or `row_weights` has another
                shape.
        """
        _, axes = principal(weight, row_weights)
        rows, columns = weight.shape
        table = cls(rows, columns, dim, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            basis = axes[:, :dim].to(weight.dtype)
            assert table.weight is not None
            table.weight.copy_(weight.detach() @ basis)
            table.projection.copy_(basis.T)
        return table

    def reset_parameters(self, init_std: float = 1.0) -> None:
        """Draw normal rows, and a matrix that preserves their norms on average."""
        assert self.weight is not None
        nn.init.normal_(self.weight, std=init_std)
        nn.init.normal_(self.projection, std=1 / math.sqrt(self.dim))

    def quantized(self, bits: int = 8) -> LowDimTable:
        """Return the table with its rows as codes of `bits` bits, which are not trainable.

        Raises:
            InvalidArgumentError: `bits` is not 4 or 8.
        """
        coded_table = LowDimTable(1, self.embedding_dim, self.dim)
        assert self.weight is not None
        coded_table.num_embeddings, coded_table.weight = self.num_embeddings, None
        coded_table.codes = QuantizedTable.from_dense(self.weight, bits)
        coded_table.projection = nn.Parameter(self.projection.detach().clone())
        return coded_table

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows before widening: [count, dim]."""
        if self.codes is not None:
            return self.codes.look_up(ids)
        assert self.weight is not None
        return nn.functional.embedding(ids, self.weight)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Widen rows [..., dim] to [..., embedding_dim]; linear, so that it applies to sums."""
        return rows @ self.projection

    @property
    def parameter(self) -> torch.Tensor:
        """A tensor with the device and dtype of the table."""
        return self.projection

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, dim={self.dim}"


def principal(
    weight: torch.Tensor, row_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return descending energies [columns] of weighted rows, and their axes [columns, columns].

    The sum of energies after the first k is the squared error of the best table of k columns.
    """
    row_shares = row_weights_of(weight, row_weights)
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    with torch.no_grad():
        for rows in chunks(len(weight)):
            double = weight[rows].double()
            gram += double.T @ (double * row_shares[rows, None])
    energy, axes = torch.linalg.eigh(gram)
    return energy.flip(0).clamp(min=0), axes.flip(1)


class LowDim(TableFormat):
    """`LowDimTable` of every useful dimension."""

    name: ClassVar[str] = "lowdim"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield dimensions below the table's, four per halving."""
        if table.weight is None:
            energy = usual_energies(table.dim)
        else:
            energy, _ = principal(table.weight, table.shares)
            energy = energy / energy.sum().clamp(min=1e-300)
        for dim in sizes(table.dim):
            nbytes = (table.rows + table.dim) * dim * table.item_bytes
            if nbytes < table.nbytes:
                yield Choice(self.name, {"dim": dim}, nbytes, float(energy[dim:].sum()))

    def module(self, exchange: Exchange, start: Start) -> Any:
        """Return a random table, or the nearest to the trained one."""
        return over(exchange.old, self._table(exchange, start))

    def _table(self, exchange: Exchange, start: Start) -> LowDimTable:
        table, dim = exchange.table, exchange.number("dim")
        if table.weight is not None:
            return LowDimTable.from_dense(table.weight, dim, table.shares)
        return LowDimTable(table.rows, table.dim, dim, init_std=start.std, **start.where)


class _LowDimCodes(LowDim):
    """`LowDimTable` with rows of `bits` bits."""

    trains: ClassVar[bool] = False
    bits: ClassVar[int]

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield the choices of `LowDim`, with the additional error of codes."""
        choices = list(super().choices(table))
        dims = [int(str(choice.settings["dim"])) for choice in choices]
        rounding = dict(with_errors(self._rounding_of(table), dims))
        for choice, dim in zip(choices, dims, strict=True):
            nbytes = table_bytes(table.rows, dim, self.bits) + dim * table.dim * table.item_bytes
            if nbytes < choice.nbytes:
                error = choice.error + (1 - choice.error) * rounding[dim]
                yield Choice(self.name, choice.settings, nbytes, error)

    def _rounding_of(self, table: TableFacts) -> Callable[[int], float]:
        """Return the error of codes as a function of the dimension of rows."""
        if table.weight is None:
            return lambda dim: rounding_error(replace(table, dim=dim), self.bits)
        weight, (_, axes) = table.weight.detach(), principal(table.weight, table.shares)
        axes = axes.to(weight.dtype)
        return lambda dim: rounding_error(
            replace(table, dim=dim, weight=weight @ axes[:, :dim]), self.bits
        )

    def module(self, exchange: Exchange, start: Start) -> Any:
        """Return codes of the nearest table of the chosen dimension."""
        return over(exchange.old, self._table(exchange, start).quantized(self.bits))


class LowDimInt8(_LowDimCodes):
    """`LowDimTable` with rows of eight bits."""

    name: ClassVar[str] = "lowdim_int8"
    bits: ClassVar[int] = 8


class LowDimInt4(_LowDimCodes):
    """`LowDimTable` with rows of four bits."""

    name: ClassVar[str] = "lowdim_int4"
    bits: ClassVar[int] = 4
