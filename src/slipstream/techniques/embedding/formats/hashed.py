"""A table of shared rows: ids are hashed to fewer rows, but the most frequent have separate ones.

Source: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009; private
rows for frequent ids as in Zhang et al., "Model Size Reduction Using Frequency Based Double
Hashing for Recommender Systems", RecSys 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.bags import expect_tensor
from slipstream.techniques.embedding.formats.format import (
    Choice,
    Exchange,
    Start,
    TableFacts,
    TableFormat,
    sizes,
    with_errors,
)
from slipstream.techniques.embedding.kernels import robe_reference as hashes
from slipstream.techniques.embedding.modules import Rows, Table, over
from slipstream.techniques.embedding.weighting import row_weights_of

_ID_BYTES = 8
_MIN_ROWS = 8
_HOT_SHARES = (0.25, 0.5, 0.75, 0.9)


class HashedTable(Table):
    """`rows` shared rows for `num_embeddings` ids, and one private row per id in `hot`.

    Args:
        num_embeddings, embedding_dim: size of the represented table.
        rows: number of shared rows; a hash of `seed` and the id determines the row of an id.
        hot: int64 ids with private rows, in any order.
        init_std: standard deviation of the initial normal numbers.

    Attributes:
        weight: [len(hot) + rows, embedding_dim], private rows first, in the order of their ids.

    Raises:
        InvalidArgumentError: a size is below 1, or a hot id is out of range or repeated.
    """

    hot: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rows: int,
        *,
        hot: torch.Tensor | None = None,
        seed: int = 0,
        init_std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_embeddings = as_integer("num_embeddings", num_embeddings)
        embedding_dim = as_integer("embedding_dim", embedding_dim)
        rows = as_integer("rows", rows)
        self.num_embeddings, self.embedding_dim, self.rows = num_embeddings, embedding_dim, rows
        self.seed = seed
        if hot is not None:
            expect_tensor("hot", hot)
        ids = torch.empty(0, dtype=torch.int64) if hot is None else hot.to(torch.int64)
        ids = torch.unique(ids).to(device)
        if hot is not None and len(ids) != hot.numel():
            raise InvalidArgumentError("hot", "repeats an id")
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < num_embeddings):
            raise InvalidArgumentError("hot", f"ids must be in [0, {num_embeddings})")
        self.register_buffer("hot", ids)
        self.weight = nn.Parameter(
            torch.empty(len(ids) + rows, embedding_dim, device=device, dtype=dtype)
        )
        nn.init.normal_(self.weight, std=init_std)

    @classmethod
    def from_dense(
        cls,
        weight: torch.Tensor,
        rows: int,
        *,
        hot: torch.Tensor | None = None,
        seed: int = 0,
        row_weights: torch.Tensor | None = None,
    ) -> HashedTable:
        """Return the table of least squared error: shared rows are weighted means of ids' rows.

        Args:
            weight: [num_embeddings, embedding_dim].
            row_weights: weights of the rows' errors, [num_embeddings]; uniform if None.

        Raises:
            InvalidArgumentError: an argument of the class is invalid, or `row_weights` has another
                shape.
        """
        row_shares = row_weights_of(weight, row_weights)
        count, columns = weight.shape
        table = cls(
            count, columns, rows, hot=hot, seed=seed, device=weight.device, dtype=weight.dtype
        )
        # Ids without look-ups still count a little.
        row_shares = row_shares + 1e-12
        places = table.places(torch.arange(len(weight), device=weight.device))
        sums = weight.new_zeros(table.weight.shape, dtype=torch.float64)
        sums.index_add_(0, places, weight.detach().double() * row_shares[:, None])
        total = row_shares.new_zeros(len(sums)).index_add_(0, places, row_shares)
        with torch.no_grad():
            table.weight.copy_(sums / total.clamp(min=1e-300)[:, None])
        return table

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the row of `weight` of each id, int64 of the shape of `ids`."""
        ids = ids.to(torch.int64)
        shared = place_of(ids, self.rows, self.seed) + len(self.hot)
        if not len(self.hot):
            return shared
        at = torch.searchsorted(self.hot, ids).clamp(max=len(self.hot) - 1)
        return torch.where(self.hot[at] == ids, at, shared)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids` [count]: [count, embedding_dim]."""
        return nn.functional.embedding(self.places(ids), self.weight)

    def for_export(self) -> nn.Module:
        """Return rows with a stored index per id, of four bytes."""
        return _ExportedHashes(self)

    @property
    def parameter(self) -> torch.Tensor:
        """A tensor with the device and dtype of the table."""
        return self.weight

    def get_extra_state(self) -> dict[str, int]:
        """Return the settings of the hash, which are saved with the rows."""
        return {"seed": self.seed, "rows": self.rows}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Check that a saved table has the same hash.

        Raises:
            InvalidArgumentError: the settings of the hash differ.
        """
        if state != self.get_extra_state():
            raise InvalidArgumentError(
                "state_dict", f"the saved table has {state}, this one {self.get_extra_state()}"
            )

    def extra_repr(self) -> str:
        private = f", {len(self.hot)} hot" if len(self.hot) else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows={self.rows}{private}"


def place_of(ids: torch.Tensor, rows: int, seed: int = 0) -> torch.Tensor:
    """Return the shared row of each id, int64, equal on all devices and in all versions."""
    return hashes.starts(hashes.table_key(seed, 0), ids, torch.zeros_like(ids), rows)


class _ExportedHashes(Rows):
    """Shared rows with a stored index per id."""

    at: torch.Tensor

    def __init__(self, table: HashedTable) -> None:
        super().__init__()
        self.weight = table.weight
        places = table.places(torch.arange(table.num_embeddings, device=table.weight.device))
        self.register_buffer("at", places.to(torch.int32))

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(self.at[ids], self.weight)


class Hash(TableFormat):
    """`HashedTable` without private rows."""

    name: ClassVar[str] = "hash"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield numbers of rows below the table's, four per halving."""
        for rows, error in with_errors(partial(shared_error, table), sizes(table.rows)):
            yield Choice(self.name, {"rows": rows}, rows * table.dim * table.item_bytes, error)

    def module(self, exchange: Exchange, start: Start) -> Any:
        """Return a table of random rows, or of means of the trained rows."""
        table, rows = exchange.table, exchange.number("rows")
        ids = torch.tensor(exchange.hot, dtype=torch.int64) if exchange.hot else None
        if table.weight is not None:
            new = HashedTable.from_dense(table.weight, rows, hot=ids, row_weights=table.shares)
        else:
            new = HashedTable(
                table.rows, table.dim, rows, hot=ids, init_std=start.std, **start.where
            )
        return over(exchange.old, new)


class HotHash(Hash):
    """`HashedTable` with private rows for frequent ids; requires counts of look-ups."""

    name: ClassVar[str] = "hot_hash"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield the division into private and shared rows of least error, per size."""
        if table.shares is None:
            return
        order = torch.argsort(table.shares, descending=True, stable=True)
        row_bytes = table.dim * table.item_bytes

        divided: dict[int, int] = {}

        def error_of(total: int) -> float:
            """Return the least error of `total` rows, and store its number of private rows."""
            counts = [int(total * share) for share in _HOT_SHARES]
            errors = [(shared_error(table, total - n, order[:n]), n) for n in counts]
            error, divided[total] = min(errors)
            return error

        for total, error in with_errors(error_of, sizes(table.rows, _MIN_ROWS)):
            near = min(divided, key=lambda measured: abs(measured - total))
            count = int(total * divided[near] / near)
            nbytes = total * row_bytes + count * _ID_BYTES
            if nbytes < table.nbytes:
                hot = tuple(sorted(order[:count].tolist()))
                yield Choice(self.name, {"rows": total - count, "hot": hot}, nbytes, error)


def shared_error(table: TableFacts, rows: int, hot: torch.Tensor | None = None) -> float:
    """Return the error if ids share `rows` rows and those in `hot` have private ones.

    The best shared row is the weighted mean of its ids' rows. Of uncorrelated rows it retains
    ``sum p^2 / sum p`` of the weight p of its ids.
    """
    if table.shares is None and table.weight is None and hot is None:
        load = table.rows / rows
        return 1 - -math.expm1(-load) / load
    shares = table.shares
    if shares is None:
        shares = torch.full((table.rows,), 1 / table.rows, dtype=torch.float64)
    if table.weight is not None:
        shares = row_weights_of(table.weight, shares)
    place = place_of(torch.arange(table.rows), rows)
    shared = torch.ones(table.rows, dtype=torch.bool)
    if hot is not None:
        shared[hot] = False
    p, at = shares[shared], place[shared]
    mass = torch.zeros(rows, dtype=torch.float64).index_add_(0, at, p).clamp(min=1e-300)
    if table.weight is None:
        held = torch.zeros(rows, dtype=torch.float64).index_add_(0, at, p * p)
        return float((mass.clamp(min=0) - held / mass).sum())
    numbers = table.weight.detach().double()
    whole = float((numbers.square().sum(1) * shares).sum())
    tail = numbers[shared]
    sums = torch.zeros(rows, table.dim, dtype=torch.float64)
    sums.index_add_(0, at, tail * p[:, None])
    lost = float((tail.square().sum(1) * p).sum()) - float((sums.square().sum(1) / mass).sum())
    return max(lost, 0.0) / whole if whole else 0.0
