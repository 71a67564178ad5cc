"""What the modules that come in the place of a model's tables have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slipstream.techniques.embedding.shared_array import SharedArray
from slipstream.techniques.embedding.table_modules import (
    Table,
    TableEmbedding,
    TableEmbeddingBag,
)
from slipstream.techniques.embedding.ways.robe import fitted_sums
from slipstream.techniques.embedding.ways.way import TableFacts


class Making:
    """What the tables of one model have in common while they are exchanged.

    Args:
        numbers, block, sign: of the array that hashed tables share; 0 numbers for none.
        weights: of all tables that are exchanged: new ones begin as far from zero.

    Attributes:
        init_std: root of their mean square.
        where: their device and dtype, as modules take them.
    """

    def __init__(
        self, numbers: int, block: int, sign: bool, weights: Sequence[torch.Tensor]
    ) -> None:
        total = sum(weight.numel() for weight in weights)
        square = sum(float(w.detach().double().square().sum()) for w in weights)
        self.init_std = math.sqrt(square / total) if total else 1.0
        self.where: dict[str, Any] = {"device": weights[0].device, "dtype": weights[0].dtype}
        self._numbers, self._block, self._sign = numbers, block, sign
        self._array: SharedArray | None = None
        self._fitted: list[tuple[int, TableFacts]] = []

    @property
    def array(self) -> SharedArray:
        """The one array of this model."""
        if self._array is None:
            self._array = SharedArray(
                self._numbers, block=min(self._block, self._numbers), sign=self._sign,
                init_std=self.init_std, **self.where,
            )  # fmt: skip
        return self._array

    def over(self, old: Any, table: Table) -> Any:
        """A module over `table` that is called as `old` is."""
        if type(old) is nn.Embedding:
            return TableEmbedding(table, padding_idx=old.padding_idx)
        return TableEmbeddingBag(
            table, mode=old.mode, padding_idx=old.padding_idx,
            include_last_offset=old.include_last_offset,
        )  # fmt: skip

    def fit(self, table_id: int, table: TableFacts) -> None:
        """The array is to approximate this trained table, too; see `finish`."""
        self._fitted.append((table_id, table))

    def finish(self) -> None:
        """Fill the array with what is nearest to the trained tables in it."""
        if self._array is None or not self._fitted:
            return
        array = self._array
        sums, mass = fitted_sums(
            self._fitted, array.array.numel(), array.block, array.sign, array.seed
        )
        with torch.no_grad():
            array.array.copy_(sums / mass.clamp(min=1e-300))
