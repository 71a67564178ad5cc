"""The table as a tensor train; the most frequent ids keep rows of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.hot_rows import cache_bytes
from slipstream.techniques.embedding.tt import TTEmbedding, TTEmbeddingBag
from slipstream.techniques.embedding.tt_init import LEAST_STD
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream.techniques.embedding.ways.way import Choice, Setting, TableFacts, with_errors
from slipstream.techniques.embedding.weighting import relative_error

_MOST_RANK = 128
_RANKS_PER_DOUBLING = 2
_LEAST_HOT = 8


class TT:
    """`TTEmbedding` of three cores with both ranks alike."""

    name: ClassVar[str] = "tt"
    trains: ClassVar[bool] = True

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Ranks from large to small; none where the dimension has no three factors."""
        numbers = _numbers(table)

        def error(rank: int) -> float:
            if table.weight is None:
                return _usual_error(table, numbers[rank])
            made = TTEmbedding.from_dense(table.weight, rank, row_weights=table.shares)
            return relative_error(table.weight, made.to_dense(), table.shares)

        for rank, lost in with_errors(error, list(numbers)):
            nbytes = numbers[rank] * table.item_bytes
            yield Choice(self.name, {"rank": rank}, nbytes, lost)

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """A random train with numbers at least as far from zero as the tables', or the nearest."""
        rank, hot = settings["rank"], settings.get("hot", ())
        assert isinstance(rank, int)
        assert isinstance(hot, tuple)
        common = {"padding_idx": old.padding_idx}
        if hot:
            common.update(cache_rows=len(hot), cache_policy="manual")
        kind: Any = TTEmbedding
        if type(old) is not torch.nn.Embedding:
            kind = TTEmbeddingBag
            common.update(mode=old.mode, include_last_offset=old.include_last_offset)
        if table.weight is not None:
            new = kind.from_dense(table.weight, rank, row_weights=table.shares, **common)
        else:
            # Beside rows of their own the train holds rare ids alone: best left near zero.
            std = made.init_std if hot else max(made.init_std, LEAST_STD)
            new = kind(table.rows, table.dim, rank, init_std=std, **common, **made.where)
        if hot:
            new.hot.record(torch.tensor(hot))
            new.refresh()
        if hot and table.weight is not None:
            with torch.no_grad():
                new.hot.weight.copy_(table.weight[new.hot.ids])
        return new


class HotTT(TT):
    """`TTEmbedding` whose most frequent rows are cached; where look-ups were counted."""

    name: ClassVar[str] = "hot_tt"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Every rank with powers of two of cached rows: those fill the table that finds them."""
        if table.shares is None:
            return
        numbers, shares = _numbers(table), table.shares
        order = torch.argsort(shares, descending=True, stable=True)

        @cache
        def tails(rank: int) -> torch.Tensor:
            """What is lost where the first rows of `order` are cached, by how many."""
            if table.weight is None:
                lost, whole = shares * _usual_error(table, numbers[rank]), 1.0
            else:
                rows = table.weight.detach().double().cpu()
                made = TTEmbedding.from_dense(table.weight, rank, row_weights=shares)
                lost = (rows - made.to_dense().double().cpu()).square().sum(1) * shares
                whole = float((rows.square().sum(1) * shares).sum()) or 1.0
            return lost[order].flip(0).cumsum(0).flip(0) / whole

        def error(count: int, rank: int) -> float:
            return float(tails(rank)[count])

        for count in _counts(table):
            hot = tuple(sorted(order[:count].tolist()))
            for rank, lost in with_errors(partial(error, count), list(numbers)):
                nbytes = numbers[rank] * table.item_bytes
                nbytes += cache_bytes(count, table.dim, table.item_bytes)
                if nbytes < table.nbytes:
                    yield Choice(self.name, {"rank": rank, "hot": hot}, nbytes, lost)


def _numbers(table: TableFacts) -> dict[int, int]:
    """Of trains smaller than the table, by falling rank; none without three factors."""
    try:
        found = {rank: TTShape.of(table.rows, table.dim, rank).numbers for rank in _ranks()}
    except InvalidArgumentError:
        return {}
    return {rank: number for rank, number in found.items() if number < table.rows * table.dim}


def _usual_error(table: TableFacts, numbers: int) -> float:
    """A train fits as many numbers as it has: ids in no order have no more in common."""
    return 1 - numbers / (table.rows * table.dim)


def _counts(table: TableFacts) -> Iterator[int]:
    count = _LEAST_HOT
    while count < table.rows:
        yield count
        count *= 2


def _ranks() -> list[int]:
    steps = range(_MOST_RANK.bit_length() * _RANKS_PER_DOUBLING - 1)
    return sorted({round(2 ** (step / _RANKS_PER_DOUBLING)) for step in steps}, reverse=True)
