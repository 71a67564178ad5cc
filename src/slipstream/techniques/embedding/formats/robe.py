"""Embeddings whose rows are hashed blocks of a `SharedArray`.

Source: Desai, Chou and Shrivastava, "Random Offset Block Embedding (ROBE) for compressed embedding
tables in deep learning recommendation systems", MLSys 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.techniques.embedding.bags import Bags, check_mode, each, normalise
from slipstream.techniques.embedding.formats.format import (
    Choice,
    Exchange,
    Start,
    TableFacts,
    TableFormat,
    sizes,
    with_errors,
)
from slipstream.techniques.embedding.formats.hashed import shared_error
from slipstream.techniques.embedding.formats.shared_array import SharedArray, tables_of
from slipstream.techniques.embedding.kernels import robe_reference as hashes
from slipstream.techniques.embedding.modules import (
    ByBag,
    ById,
    CompressedModule,
    Exportable,
    ExportedBags,
    Rows,
    called_as,
)
from slipstream.techniques.embedding.weighting import chunks, row_weights_of

SIGN = False
"""Whether rows have hashed signs. With signs rows cannot share a direction, as those of popular
items do."""

_MEASURED_HALVINGS = 14


class _InArray(CompressedModule):
    """A table of rows in a shared array.

    Attributes:
        pool: the array.
        table_id: id of the table in the array, an input of its hashes.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        pool: SharedArray,
        table_id: int | None = None,
        padding_idx: int | None = None,
    ) -> None:
        _expect_pool(pool)
        num_embeddings = as_integer("num_embeddings", num_embeddings)
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        tables_of(pool.seed, [(0, num_embeddings, embedding_dim, None)])
        self.pool = pool
        self.table_id = pool.take(table_id)
        # Not buffers: they stay on the CPU when the module moves.
        self._plain, self._padded = (
            tables_of(pool.seed, [(self.table_id, num_embeddings, embedding_dim, padding)])
            for padding in (None, self.padding_idx)
        )

    @property
    def parameter(self) -> torch.Tensor:
        """The array."""
        return self.pool.array

    def look_up(
        self, bags: Bags, mode: str | None, padding_idx: int | None, counted: bool = True
    ) -> torch.Tensor:
        """Return bags of rows, whose blocks are hashed during the look-up."""
        described = self._plain if padding_idx is None else self._padded
        return self.pool.look_up(bags, described, self.embedding_dim, mode or "sum")

    def exported_rows(self) -> nn.Module:
        """Return rows whose blocks are hashed by ONNX operators."""
        return _ExportedBlocks(self.pool, self._plain)

    def _format_repr(self) -> str:
        return f", table_id={self.table_id}"


class ROBEEmbedding(_InArray, ById):
    """``nn.Embedding`` with its rows in a shared array.

    Args:
        num_embeddings, embedding_dim: size of the represented table.
        pool: the array, which other tables can share.
        table_id: id of the table in `pool`; the next free one if None. A checkpoint is valid only
            with the same ids.
        padding_idx: an id whose row is zero and gets no gradient.

    Raises:
        InvalidArgumentError: a size is below 1, the padding row is out of range, or the id is in
            use.
    """


class ROBEEmbeddingBag(_InArray, ByBag):
    """``nn.EmbeddingBag`` with its rows in a shared array.

    Args:
        num_embeddings, embedding_dim, mode, padding_idx, include_last_offset: those of
            ``nn.EmbeddingBag``.
        pool, table_id: those of `ROBEEmbedding`.

    Raises:
        InvalidArgumentError: an argument of `ROBEEmbedding` is invalid, or the mode is unknown.
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


class ROBEEmbeddingCollection(Exportable):
    """Several tables of one shared array, looked up in one call.

    Args:
        tables: rows and dimension of each table by name, with ids from `table_id` on.
        pool: the array.
        mode: reduction of all bags.
        table_id: id of the first table; the next free one if None.
        include_last_offset: whether offsets end with the end of the last bag.

    Raises:
        InvalidArgumentError: there are no tables, or an argument of `ROBEEmbeddingBag` is invalid.
    """

    mode: str

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
            raise InvalidArgumentError("tables", "is empty")
        try:
            shapes = [(rows, dimension, None) for rows, dimension in tables.values()]
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                "tables",
                "are not rows and dimensions by name",
                remedy='pass a dictionary such as {"film": (10_000, 64)}',
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
        """Return concatenated bags of all tables: [bags, sum of dimensions].

        Args:
            input: ids of the first table's bags, then those of the second, and so on: [count] with
                `offsets` [tables * bags], or [tables * bags, n] for bags of n ids.

        Raises:
            InvalidArgumentError: an argument is invalid; the error names it.
        """
        bags = normalise(
            input, offsets, per_sample_weights, self.mode, self.pool.array,
            self.include_last_offset, len(self.tables),
        )  # fmt: skip
        return self.pool.look_up(bags, self._tables, self._width, self.mode)

    def split(self, bags: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split the output of `forward` into views by table, [bags, dimension] each."""
        sizes = [dimension for _, dimension in self.tables.values()]
        return dict(zip(self.tables, torch.split(bags, sizes, 1), strict=True))

    def table(self, name: str) -> tuple[int, torch.Tensor]:
        """Return the id of a table, and its row of the operator's description.

        Raises:
            UnknownNameError: the table is unknown.
        """
        if name not in self.table_ids:
            raise UnknownNameError("table", name, self.table_ids)
        place = list(self.table_ids).index(name)
        return self.table_ids[name], self._tables[place : place + 1]

    def materialize(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the table `name`: [len(rows), dimension].

        Raises:
            UnknownNameError: the table is unknown.
            InvalidArgumentError: an id is out of range.
        """
        _, described = self.table(name)
        bags = each(rows, self.pool.array.device)
        return self.pool.look_up(bags, described, self.tables[name][1], "sum")

    def for_export(self) -> nn.Module:
        """Return a module that looks up the tables sequentially."""
        return _ExportedTables(self)

    def extra_repr(self) -> str:
        rows = sum(rows for rows, _ in self.tables.values())
        return f"{len(self.tables)} tables, {rows} rows, mode={self.mode!r}"


def _expect_pool(pool: object) -> None:
    if not isinstance(pool, SharedArray):
        raise InvalidArgumentError(
            "pool",
            f"is a {type(pool).__name__}, not a SharedArray",
            remedy='pass SharedArray("64MiB")',
        )


class _ExportedBlocks(Rows):
    """Rows of a shared array, hashed by ONNX operators."""

    def __init__(self, pool: SharedArray, described: torch.Tensor) -> None:
        super().__init__()
        if pool.array.dtype is not torch.float32:
            raise InvalidArgumentError("model", f"has an array of {pool.array.dtype}, not float32")
        self.array, self.block, self.sign = pool.array, pool.block, pool.sign
        ((self.key, _, self.width, _),) = described.tolist()

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return hashes.rows_of(self.array, self.key, ids, self.width, self.block, self.sign)


class _ExportedTables(nn.Module):
    """Sequential look-ups in a collection's tables."""

    def __init__(self, collection: ROBEEmbeddingCollection) -> None:
        super().__init__()
        self.tables: Any = nn.ModuleList(
            ExportedBags(
                _ExportedBlocks(collection.pool, collection.table(name)[1]), collection.mode, None
            )
            for name in collection.tables
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        apart = input.reshape(len(self.tables), -1, input.shape[1])
        return torch.cat([table(apart[number]) for number, table in enumerate(self.tables)], 1)


class Robe(TableFormat):
    """`ROBEEmbedding`; the array has the total of its tables' numbers."""

    name: ClassVar[str] = "robe"
    shared: ClassVar[bool] = True

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield sizes below the table's, of at least one row."""
        for rows, error in with_errors(partial(self._error, table), sizes(table.rows)):
            numbers = rows * table.dim
            nbytes = numbers * table.item_bytes
            yield Choice(self.name, {"numbers": numbers}, nbytes, error)

    def module(self, exchange: Exchange, start: Start) -> Any:
        """Return the module of the only table of an array."""
        return self.modules([exchange], start)[0]

    def modules(self, exchanges: Sequence[Exchange], start: Start) -> list[Any]:
        """Return tables that share one array, random or nearest to the trained tables.

        The array has the settings ``block`` and ``sign`` of the first table.
        """
        array = SharedArray(
            sum(exchange.number("numbers") for exchange in exchanges),
            block=exchanges[0].number("block"), sign=bool(exchanges[0].number("sign")),
            init_std=start.std, **start.where,
        )  # fmt: skip
        modules: list[Any] = []
        for old, table, _ in exchanges:
            kind, arguments = called_as(old, ROBEEmbedding, ROBEEmbeddingBag)
            modules.append(kind(table.rows, table.dim, array, **arguments))
        trained = [
            (module.table_id, table)
            for module, (_, table, _) in zip(modules, exchanges, strict=True)
            if table.weight is not None
        ]
        if trained:
            sums, mass = fitted_sums(
                trained, array.array.numel(), array.block, array.sign, array.seed
            )
            with torch.no_grad():
                array.array.copy_(sums / mass.clamp(min=1e-300))
        return modules

    def _error(self, table: TableFacts, rows: int) -> float:
        """Return the error; of uncorrelated rows, that of sharing whole rows."""
        if table.weight is None or table.rows / rows > 2**_MEASURED_HALVINGS:
            return shared_error(table, rows)
        size = rows * table.dim
        sums, mass = fitted_sums([(0, table)], size, min(table.dim, 32, size), SIGN, 0)
        row_shares = row_weights_of(table.weight, table.shares)
        whole = float((table.weight.detach().double().square().sum(1) * row_shares).sum())
        retained = float((sums.square() / mass.clamp(min=1e-300)).sum())
        return max(1 - retained / whole, 0.0) if whole else 0.0


def fitted_sums(
    tables: list[tuple[int, TableFacts]], size: int, block: int, sign: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, per number of an array, the weighted sum of the represented weights, and its weight.

    Their quotient is the array of least squared error.
    """
    sums = torch.zeros(size, dtype=torch.float64)
    mass = torch.zeros(size, dtype=torch.float64)
    for number, table in tables:
        assert table.weight is not None
        row_shares = row_weights_of(table.weight, table.shares)
        key = hashes.table_key(seed, number)
        for rows in chunks(table.rows):
            ids = torch.arange(rows.start, rows.stop)
            numbers = table.weight[rows].detach().double()
            if sign:
                numbers = numbers * hashes.signs(key, ids, table.dim, torch.float64)
            # Ids without look-ups still count a little.
            share = (row_shares[rows, None] + 1e-12).expand(-1, table.dim)
            at = hashes.places(key, ids, table.dim, block, size).flatten()
            sums.index_add_(0, at, (numbers * share).flatten())
            mass.index_add_(0, at, share.flatten())
    return sums, mass
