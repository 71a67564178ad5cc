"""Fewer columns and a matrix that widens them; as codes of eight bits, too, once trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from slipstream.techniques.embedding.low_dimension import LowDimTable, principal
from slipstream.techniques.embedding.quantized_rows import table_bytes
from slipstream.techniques.embedding.ways.codes import rounding_error
from slipstream.techniques.embedding.ways.way import (
    Choice,
    Setting,
    TableFacts,
    sizes,
    usual_energies,
)


class LowDim:
    """`LowDimTable` of every useful dimension."""

    name: ClassVar[str] = "lowdim"
    trains: ClassVar[bool] = True

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

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """Rows of a random table, or of the nearest to the trained one."""
        return made.over(old, _table(table, settings, made))


class LowDimCodes:
    """`LowDimTable` with rows of eight bits."""

    name: ClassVar[str] = "lowdim_int8"
    trains: ClassVar[bool] = False

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """As `LowDim`'s, with what the codes lose besides."""
        rounding = rounding_error(table, 8)
        for choice in LowDim().choices(table):
            dim = choice.settings["dim"]
            assert isinstance(dim, int)
            nbytes = table_bytes(table.rows, dim, 8) + dim * table.dim * table.item_bytes
            if nbytes < choice.nbytes:
                yield Choice(self.name, choice.settings, nbytes, choice.error + rounding)

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """Codes of the nearest table of that dimension."""
        return made.over(old, _table(table, settings, made).quantized())


def _table(table: TableFacts, settings: Mapping[str, Setting], made: Any) -> LowDimTable:
    dim = settings["dim"]
    assert isinstance(dim, int)
    if table.weight is not None:
        return LowDimTable.from_dense(table.weight, dim, table.shares)
    return LowDimTable(table.rows, table.dim, dim, init_std=made.init_std, **made.where)
