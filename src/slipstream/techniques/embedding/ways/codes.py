"""Every number in eight or four bits; for trained tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from slipstream.techniques.embedding.quantized_rows import QuantizedTable, table_bytes
from slipstream.techniques.embedding.ways.way import Choice, Setting, TableFacts
from slipstream.techniques.embedding.weighting import chunks, row_weights_of

_BITS = {"int8": 8, "int4": 4}


class _Codes:
    name: ClassVar[str]
    trains: ClassVar[bool] = False

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """One, where it has fewer bytes."""
        bits = _BITS[self.name]
        nbytes = table_bytes(table.rows, table.dim, bits)
        if nbytes < table.nbytes:
            yield Choice(self.name, {}, nbytes, rounding_error(table, bits))

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """Codes of the trained rows."""
        assert table.weight is not None
        return made.over(old, QuantizedTable.from_dense(table.weight, _BITS[self.name]))


class Int8(_Codes):
    """A byte a number, and a scale a row."""

    name: ClassVar[str] = "int8"


class Int4(_Codes):
    """Half a byte a number, and a scale a row."""

    name: ClassVar[str] = "int4"


def rounding_error(table: TableFacts, bits: int) -> float:
    """What codes of so many bits lose of a table; of one to be trained, as of normal numbers."""
    if table.weight is None:
        reach = math.sqrt(2 * math.log(2 * table.dim))
        return (reach / ((1 << (bits - 1)) - 1)) ** 2 / 12
    counted = row_weights_of(table.weight, table.shares)
    lost = whole = 0.0
    for rows in chunks(table.rows):
        part = table.weight[rows].detach()
        coded = QuantizedTable.from_dense(part, bits)
        found = coded.look_up(torch.arange(len(part), device=part.device))
        lost += float(((part - found).double().square().sum(1) * counted[rows]).sum())
        whole += float((part.double().square().sum(1) * counted[rows]).sum())
    return lost / whole if whole else 0.0
