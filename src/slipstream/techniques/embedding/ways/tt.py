"""The table as a tensor train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.tt import TTEmbedding, TTEmbeddingBag
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream.techniques.embedding.ways.way import Choice, Setting, TableFacts, with_errors
from slipstream.techniques.embedding.weighting import relative_error

_MOST_RANK = 128
_RANKS_PER_DOUBLING = 2


class TT:
    """`TTEmbedding` of three cores with both ranks alike."""

    name: ClassVar[str] = "tt"
    trains: ClassVar[bool] = True

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Ranks from large to small; none where the dimension has no three factors."""
        try:
            numbers = {rank: TTShape.of(table.rows, table.dim, rank).numbers for rank in _ranks()}
        except InvalidArgumentError:
            return
        ranks = [rank for rank in _ranks() if numbers[rank] < table.rows * table.dim]

        def error(rank: int) -> float:
            if table.weight is None:
                # A train fits as many numbers as it has; ids in no order have no more in common.
                return 1 - numbers[rank] / (table.rows * table.dim)
            made = TTEmbedding.from_dense(table.weight, rank, row_weights=table.shares)
            return relative_error(table.weight, made.to_dense(), table.shares)

        for rank, lost in with_errors(error, ranks):
            nbytes = numbers[rank] * table.item_bytes
            yield Choice(self.name, {"rank": rank}, nbytes, lost)

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """A random train with numbers as far from zero as the table's, or the nearest."""
        rank = settings["rank"]
        assert isinstance(rank, int)
        common = {"padding_idx": old.padding_idx}
        kind: Any = TTEmbedding
        if type(old) is not torch.nn.Embedding:
            kind = TTEmbeddingBag
            common.update(mode=old.mode, include_last_offset=old.include_last_offset)
        if table.weight is not None:
            return kind.from_dense(table.weight, rank, row_weights=table.shares, **common)
        return kind(table.rows, table.dim, rank, init_std=made.init_std, **common, **made.where)


def _ranks() -> list[int]:
    steps = range(_MOST_RANK.bit_length() * _RANKS_PER_DOUBLING - 1)
    return sorted({round(2 ** (step / _RANKS_PER_DOUBLING)) for step in steps}, reverse=True)
