"""A table of fewer columns, and one matrix that widens its rows: the plainest smaller format.

It is what every other format has to beat at the same bytes.
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
        num_embeddings, embedding_dim: of the table it stands for.
        dim: numbers kept of each row.
        init_std: rows begin as normal numbers such that widened ones have this standard deviation.

    Attributes:
        weight: the rows, [num_embeddings, dim]; None once they are codes, see `quantized`.
        codes: the rows as a `QuantizedTable`, or None.
        projection: [dim, embedding_dim].

    Raises:
        InvalidArgumentError: a size below 1, or `dim` above `embedding_dim`.
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
            raise InvalidArgumentError("dim", f"{dim} is more than the table's {embedding_dim}")
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
        """The nearest such table: least sum of squared errors, rows weighted by `row_weights`.

        Args:
            weight: [num_embeddings, embedding_dim].
            row_weights: how much each row counts, not negative: [num_embeddings]; all alike if
                None.

        Raises:
            InvalidArgumentError: as the class, or weights of another shape.
        """
        _, axes = principal(weight, row_weights)
        rows, columns = weight.shape
        table = cls(rows, columns, dim, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            axes_kept = axes[:, :dim].to(weight.dtype)
            assert table.weight is not None
            table.weight.copy_(weight.detach() @ axes_kept)
            table.projection.copy_(axes_kept.T)
        return table

    def reset_parameters(self, init_std: float = 1.0) -> None:
        """Normal rows, and a matrix that keeps their lengths on average."""
        assert self.weight is not None
        nn.init.normal_(self.weight, std=init_std)
        nn.init.normal_(self.projection, std=1 / math.sqrt(self.dim))

    def quantized(self, bits: int = 8) -> LowDimTable:
        """The same table with its rows as codes of so many bits, which are no parameters.

        Raises:
            InvalidArgumentError: bits other than 4 and 8.
        """
        coded_table = LowDimTable(1, self.embedding_dim, self.dim)
        assert self.weight is not None
        coded_table.num_embeddings, coded_table.weight = self.num_embeddings, None
        coded_table.codes = QuantizedTable.from_dense(self.weight, bits)
        coded_table.projection = nn.Parameter(self.projection.detach().clone())
        return coded_table

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows before they are widened: [count, dim]."""
        if self.codes is not None:
            return self.codes.look_up(ids)
        assert self.weight is not None
        return nn.functional.embedding(ids, self.weight)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., dim] to [..., embedding_dim]; linear, so that sums of rows may be widened."""
        return rows @ self.projection

    @property
    def parameter(self) -> torch.Tensor:
        """What tells device and dtype."""
        return self.projection

    @property
    def flops_per_id(self) -> int:
        """Of widening a row."""
        return 2 * self.dim * self.embedding_dim

    @property
    def row_bytes(self) -> float:
        """Bytes of parameters that one id reads."""
        if self.codes is not None:
            return self.codes.row_bytes
        return float(self.dim * self.projection.element_size())

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, dim={self.dim}"


def principal(
    weight: torch.Tensor, row_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of weighted rows: energies in falling order [columns], and their axes [columns, columns].

    The energies after the first k are the squared error of the best table of k columns.
    """
    counted = row_weights_of(weight, row_weights)
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    with torch.no_grad():
        for rows in chunks(len(weight)):
            double = weight[rows].double()
            gram += double.T @ (double * counted[rows, None])
    energy, axes = torch.linalg.eigh(gram)
    return energy.flip(0).clamp(min=0), axes.flip(1)


class LowDim(TableFormat):
    """`LowDimTable` of every useful dimension."""

    name: ClassVar[str] = "lowdim"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Dimensions below the table's, four to a halving."""
        if table.weight is None:
            energy = usual_energies(table.dim)
        else:
            energy, _ = principal(table.weight, table.shares)
            energy = energy / energy.sum().clamp(min=1e-300)
        for dim in sizes(table.dim):
            nbytes = (table.rows + table.dim) * dim * table.item_bytes
            if nbytes < table.nbytes:
                yield Choice(self.name, {"dim": dim}, nbytes, float(energy[dim:].sum()))

    def module(self, one: Exchange, start: Start) -> Any:
        """Rows of a random table, or of the nearest to the trained one."""
        return over(one.old, self._table(one, start))

    def _table(self, one: Exchange, start: Start) -> LowDimTable:
        table, dim = one.table, one.number("dim")
        if table.weight is not None:
            return LowDimTable.from_dense(table.weight, dim, table.shares)
        return LowDimTable(table.rows, table.dim, dim, init_std=start.std, **start.where)


class _LowDimCodes(LowDim):
    """`LowDimTable` with rows of `bits` bits."""

    trains: ClassVar[bool] = False
    bits: ClassVar[int]

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Those of `LowDim`, with what codes of their rows lose besides."""
        choices = list(super().choices(table))
        dims = [int(str(choice.settings["dim"])) for choice in choices]
        rounding = dict(with_errors(self._rounding_of(table), dims))
        for choice, dim in zip(choices, dims, strict=True):
            nbytes = table_bytes(table.rows, dim, self.bits) + dim * table.dim * table.item_bytes
            if nbytes < choice.nbytes:
                error = choice.error + (1 - choice.error) * rounding[dim]
                yield Choice(self.name, choice.settings, nbytes, error)

    def _rounding_of(self, table: TableFacts) -> Callable[[int], float]:
        """What codes lose of rows of so many numbers: fewer ones are nearer to their largest."""
        if table.weight is None:
            return lambda dim: rounding_error(replace(table, dim=dim), self.bits)
        weight, (_, axes) = table.weight.detach(), principal(table.weight, table.shares)
        axes = axes.to(weight.dtype)
        return lambda dim: rounding_error(
            replace(table, dim=dim, weight=weight @ axes[:, :dim]), self.bits
        )

    def module(self, one: Exchange, start: Start) -> Any:
        """Codes of the nearest table of that dimension."""
        return over(one.old, self._table(one, start).quantized(self.bits))


class LowDimInt8(_LowDimCodes):
    """`LowDimTable` with rows of eight bits."""

    name: ClassVar[str] = "lowdim_int8"
    bits: ClassVar[int] = 8


class LowDimInt4(_LowDimCodes):
    """`LowDimTable` with rows of four bits."""

    name: ClassVar[str] = "lowdim_int4"
    bits: ClassVar[int] = 4
