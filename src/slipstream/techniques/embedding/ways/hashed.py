"""Rows that ids share by a hash; the most frequent ids keep rows of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from slipstream.techniques.embedding.shared_rows import HashedTable, place_of
from slipstream.techniques.embedding.ways.way import Choice, Setting, TableFacts, sizes, with_errors
from slipstream.techniques.embedding.weighting import row_weights_of

_ID_BYTES = 8
_LEAST_ROWS = 8
_HOT_SHARES = (0.25, 0.5, 0.75, 0.9)


class Hash:
    """`HashedTable` without private rows."""

    name: ClassVar[str] = "hash"
    trains: ClassVar[bool] = True

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Rows below the table's, four to a halving."""
        for rows, error in with_errors(partial(shared_error, table), sizes(table.rows)):
            yield Choice(self.name, {"rows": rows}, rows * table.dim * table.item_bytes, error)

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """Random rows, or means of the trained ones."""
        rows, hot = settings["rows"], settings.get("hot", ())
        assert isinstance(rows, int)
        assert isinstance(hot, tuple)
        ids = torch.tensor(hot, dtype=torch.int64) if hot else None
        if table.weight is not None:
            return made.over(
                old,
                HashedTable.from_dense(table.weight, rows, hot=ids, row_weights=table.shares),
            )
        return made.over(
            old,
            HashedTable(
                table.rows, table.dim, rows, hot=ids, init_std=made.init_std, **made.where
            ),
        )  # fmt: skip


class HotHash(Hash):
    """`HashedTable` with private rows for frequent ids; where look-ups were counted."""

    name: ClassVar[str] = "hot_hash"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """For every size that division of it between private and shared rows that loses least."""
        if table.shares is None:
            return
        order = torch.argsort(table.shares, descending=True, stable=True)
        row_bytes = table.dim * table.item_bytes

        def best(total: int) -> tuple[float, int]:
            """Error, and how many of `total` rows are private for it."""
            counts = [int(total * share) for share in _HOT_SHARES]
            return min((shared_error(table, total - n, order[:n]), n) for n in counts)

        divided: dict[int, int] = {}

        def error_of(total: int) -> float:
            error, divided[total] = best(total)
            return error

        every = sizes(table.rows, _LEAST_ROWS)
        for total, error in with_errors(error_of, every):
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
