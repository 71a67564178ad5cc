"""Hashed blocks of one array that all such tables of a model share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from slipstream.native import _robe_reference as hashes
from slipstream.techniques.embedding.robe import ROBEEmbedding, ROBEEmbeddingBag
from slipstream.techniques.embedding.ways.hashed import shared_error
from slipstream.techniques.embedding.ways.way import Choice, Setting, TableFacts, sizes, with_errors
from slipstream.techniques.embedding.weighting import chunks, row_weights_of

SIGN = False
"""Whether rows have hashed signs: with them rows can have no direction in common, as those of
popular items have, which all users take."""

_MEASURED_HALVINGS = 14


class Robe:
    """`ROBEEmbedding`; the array has the sum of what its tables are given."""

    name: ClassVar[str] = "robe"
    trains: ClassVar[bool] = True

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Numbers below the table's; at least a row."""
        for rows, error in with_errors(partial(self._error, table), sizes(table.rows)):
            numbers = rows * table.dim
            nbytes = numbers * table.item_bytes
            yield Choice(self.name, {"numbers": numbers}, nbytes, error)

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """A table of the model's array."""
        array = made.array
        common = {"padding_idx": old.padding_idx}
        new: Any
        if type(old) is torch.nn.Embedding:
            new = ROBEEmbedding(table.rows, table.dim, array, **common)
        else:
            new = ROBEEmbeddingBag(
                table.rows, table.dim, array, mode=old.mode,
                include_last_offset=old.include_last_offset, **common,
            )  # fmt: skip
        if table.weight is not None:
            made.fit(new.table_id, table)
        return new

    def _error(self, table: TableFacts, rows: int) -> float:
        """Of rows with nothing in common: as much as sharing whole rows loses."""
        if table.weight is None or table.rows / rows > 2**_MEASURED_HALVINGS:
            return shared_error(table, rows)
        size = rows * table.dim
        sums, mass = fitted_sums([(0, table)], size, min(table.dim, 32, size), SIGN, 0)
        counted = row_weights_of(table.weight, table.shares)
        whole = float((table.weight.detach().double().square().sum(1) * counted).sum())
        kept = float((sums.square() / mass.clamp(min=1e-300)).sum())
        return max(1 - kept / whole, 0.0) if whole else 0.0


def fitted_sums(
    tables: list[tuple[int, TableFacts]], size: int, block: int, sign: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every number of an array: the weighted sum of what tables would have there, its weight.

    Their quotient is the array of least squared error: each place is read with a sign alone.
    """
    sums = torch.zeros(size, dtype=torch.float64)
    mass = torch.zeros(size, dtype=torch.float64)
    for number, table in tables:
        assert table.weight is not None
        counted = row_weights_of(table.weight, table.shares)
        key = hashes.table_key(seed, number)
        for rows in chunks(table.rows):
            ids = torch.arange(rows.start, rows.stop)
            numbers = table.weight[rows].detach().double()
            if sign:
                numbers = numbers * hashes.signs(key, ids, table.dim, torch.float64)
            # An id that is never read still counts a little.
            share = (counted[rows, None] + 1e-12).expand(-1, table.dim)
            at = hashes.places(key, ids, table.dim, block, size).flatten()
            sums.index_add_(0, at, (numbers * share).flatten())
            mass.index_add_(0, at, share.flatten())
    return sums, mass
