"""A table whose rows are shared: ids are hashed to fewer rows, the most frequent keep their own.

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
_LEAST_ROWS = 8
_HOT_SHARES = (0.25, 0.5, 0.75, 0.9)


class HashedTable(Table):
    """`rows` rows for `num_embeddings` ids, and one more for each id in `hot`.

    Args:
        num_embeddings, embedding_dim: of the table it stands for.
        rows: that ids share, by a hash of `seed` and the id alone.
        hot: int64 ids with rows of their own, in any order.
        init_std: rows begin as normal numbers of this standard deviation.

    Attributes:
        weight: [len(hot) + rows, embedding_dim], private rows first, in the order of their ids.

    Raises:
        InvalidArgumentError: sizes below 1, or hot ids that are no rows or stand twice.
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
            raise InvalidArgumentError("hot", "an id stands twice")
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < num_embeddings):
            raise InvalidArgumentError("hot", f"ids must lie in [0, {num_embeddings})")
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
        """Each shared row as the weighted mean of its ids' rows: the least squared error.

        Args:
            weight: [num_embeddings, embedding_dim].
            row_weights: how much each row counts: [num_embeddings]; all alike if None.

        Raises:
            InvalidArgumentError: as the class, or weights of another shape.
        """
        counted = row_weights_of(weight, row_weights)
        count, columns = weight.shape
        table = cls(
            count, columns, rows, hot=hot, seed=seed, device=weight.device, dtype=weight.dtype
        )
        # An id that is never read still gets a row near its own.
        counted = counted + 1e-12
        places = table.places(torch.arange(len(weight), device=weight.device))
        sums = weight.new_zeros(table.weight.shape, dtype=torch.float64)
        sums.index_add_(0, places, weight.detach().double() * counted[:, None])
        total = counted.new_zeros(len(sums)).index_add_(0, places, counted)
        with torch.no_grad():
            table.weight.copy_(sums / total.clamp(min=1e-300)[:, None])
        return table

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Which row of `weight` each id reads: int64 of the shape of `ids`."""
        ids = ids.to(torch.int64)
        shared = place_of(ids, self.rows, self.seed) + len(self.hot)
        if not len(self.hot):
            return shared
        at = torch.searchsorted(self.hot, ids).clamp(max=len(self.hot) - 1)
        return torch.where(self.hot[at] == ids, at, shared)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` [count]: [count, embedding_dim]."""
        return nn.functional.embedding(self.places(ids), self.weight)

    def for_export(self) -> nn.Module:
        """Rows whose numbers are written down, four bytes an id."""
        return _ExportedHashes(self)

    @property
    def parameter(self) -> torch.Tensor:
        """What tells device and dtype."""
        return self.weight

    @property
    def row_bytes(self) -> float:
        """Bytes of parameters that one id reads."""
        return float(self.embedding_dim * self.weight.element_size())

    def get_extra_state(self) -> dict[str, int]:
        """What the hash depends on; saved with the rows."""
        return {"seed": self.seed, "rows": self.rows}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """See that a saved table was hashed as this one is.

        Raises:
            InvalidArgumentError: it was not.
        """
        if state != self.get_extra_state():
            raise InvalidArgumentError(
                "state_dict", f"the saved table has {state}, this one {self.get_extra_state()}"
            )

    def extra_repr(self) -> str:
        private = f", {len(self.hot)} hot" if len(self.hot) else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows={self.rows}{private}"


def place_of(ids: torch.Tensor, rows: int, seed: int = 0) -> torch.Tensor:
    """The shared row of each id, int64: the same on every device and in every version."""
    return hashes.starts(hashes.table_key(seed, 0), ids, torch.zeros_like(ids), rows)


class _ExportedHashes(Rows):
    """Rows that are shared: which one an id reads is written down."""

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
        """Rows below the table's, four to a halving."""
        for rows, error in with_errors(partial(shared_error, table), sizes(table.rows)):
            yield Choice(self.name, {"rows": rows}, rows * table.dim * table.item_bytes, error)

    def module(self, one: Exchange, start: Start) -> Any:
        """Random rows, or means of the trained ones."""
        table, rows = one.table, one.number("rows")
        ids = torch.tensor(one.hot, dtype=torch.int64) if one.hot else None
        if table.weight is not None:
            new = HashedTable.from_dense(table.weight, rows, hot=ids, row_weights=table.shares)
        else:
            new = HashedTable(
                table.rows, table.dim, rows, hot=ids, init_std=start.std, **start.where
            )
        return over(one.old, new)


class HotHash(Hash):
    """`HashedTable` with private rows for frequent ids; where look-ups were counted."""

    name: ClassVar[str] = "hot_hash"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """For every size that division of it between private and shared rows that loses least."""
        if table.shares is None:
            return
        order = torch.argsort(table.shares, descending=True, stable=True)
        row_bytes = table.dim * table.item_bytes

        divided: dict[int, int] = {}

        def error_of(total: int) -> float:
            """Least error of `total` rows; the number of private ones that has it is kept."""
            counts = [int(total * share) for share in _HOT_SHARES]
            errors = [(shared_error(table, total - n, order[:n]), n) for n in counts]
            error, divided[total] = min(errors)
            return error

        for total, error in with_errors(error_of, sizes(table.rows, _LEAST_ROWS)):
            near = min(divided, key=lambda known: abs(known - total))
            count = int(total * divided[near] / near)
            nbytes = total * row_bytes + count * _ID_BYTES
            if nbytes < table.nbytes:
                hot = tuple(sorted(order[:count].tolist()))
                yield Choice(self.name, {"rows": total - count, "hot": hot}, nbytes, error)


def shared_error(table: TableFacts, rows: int, hot: torch.Tensor | None = None) -> float:
    """What is lost where ids share `rows` rows and those in `hot` have their own.

    A shared row is best as the weighted mean of its ids' rows. Of rows that have nothing in common
    it keeps ``sum p^2 / sum p`` of the weight p of its ids.
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
    kept = torch.ones(table.rows, dtype=torch.bool)
    if hot is not None:
        kept[hot] = False
    p, at = shares[kept], place[kept]
    mass = torch.zeros(rows, dtype=torch.float64).index_add_(0, at, p).clamp(min=1e-300)
    if table.weight is None:
        held = torch.zeros(rows, dtype=torch.float64).index_add_(0, at, p * p)
        return float((mass.clamp(min=0) - held / mass).sum())
    numbers = table.weight.detach().double()
    whole = float((numbers.square().sum(1) * shares).sum())
    tail = numbers[kept]
    sums = torch.zeros(rows, table.dim, dtype=torch.float64)
    sums.index_add_(0, at, tail * p[:, None])
    lost = float((tail.square().sum(1) * p).sum()) - float((sums.square().sum(1) / mass).sum())
    return max(lost, 0.0) / whole if whole else 0.0
