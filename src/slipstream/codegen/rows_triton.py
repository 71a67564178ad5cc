"""Generate Triton for nests: a program processes tiles of rows by columns.

If rows are reduced, a program holds whole rows, so that every tensor is read once; longer rows are
read again for every stage. Sums over rows leave a row of partial sums per program, which are added
afterwards in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.codegen.prelude import threshold_and_scale
from slipstream.codegen.rows import Access, Nest, RowStatement, UnsupportedError

# Maximum columns of rows that a program holds whole: 64 elements for each of 256 threads.
_MAX_HELD_COLUMNS = 1 << 14
_TILE, _TILE_COLUMNS = 1 << 11, 1 << 10
# Maximum programs with partial sums: a few per multiprocessor of the largest devices.
_MAX_SUMMING_PROGRAMS = 512
_WARP = 32
_INT32 = 1 << 31
_HEAD = """\"\"\"Generated: regions of a model's operators.\"\"\"

import triton
import triton.language as tl

from slipstream.codegen.triton_prelude import (
    INFINITY, NAN, draw, f_erf, f_exp, f_log, f_max, f_min, f_sqrt, f_tanh, f_where, keep,
)
"""


@dataclass(frozen=True)
class Tiling:
    """Distribution of a nest over programs.

    Attributes:
        rows, columns: size of a tile, each a power of two.
        grid: programs over rows and over columns.
        turns: whether a program processes several tiles of rows, and sums over them.
        again: whether every stage reads the columns of a row again, tile by tile.
        num_warps: warps per program.
    """

    rows: int
    columns: int
    grid: tuple[int, int]
    turns: bool
    again: bool
    num_warps: int


def tiling(nest: Nest) -> Tiling:
    """Choose the tiles of a nest.

    Raises:
        UnsupportedError: rows are too long for a program, and both reduced and summed over.
    """
    sums = any(store.column for store in nest.stores)
    reduces = any(s.code in ("sum", "max") for s in nest.statements)
    wide = _power_of_two(nest.columns)
    again = reduces and wide > _MAX_HELD_COLUMNS
    if again and sums:
        raise UnsupportedError(
            f"sums over rows and within rows of {nest.columns:,} columns: "
            f"a program on a device holds {_MAX_HELD_COLUMNS:,}"
        )
    columns = wide if reduces and not again else min(wide, _TILE if again else _TILE_COLUMNS)
    rows = min(max(_TILE // columns, 1), _power_of_two(nest.rows))
    tiles = -(-nest.rows // rows)
    across = 1 if reduces else -(-nest.columns // columns)
    if across > 65535:
        raise UnsupportedError(f"{nest.columns:,} columns exceed the size of a grid")
    down = min(tiles, max(_MAX_SUMMING_PROGRAMS // across, 1)) if sums else tiles
    warps = min(max(rows * columns // (_WARP * 16), 4), 16)
    return Tiling(rows, columns, (down, across), down < tiles, again, warps)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def triton_source(nests: Sequence[Nest]) -> str:
    """Return the source of a module with a kernel ``region_K(*inputs, *outputs)`` per nest.

    An output that is a sum over rows receives partial sums, [programs, columns].

    Raises:
        UnsupportedError: a nest has no kernel of this form.
    """
    return _HEAD + "".join(_Program(nest, n).text for n, nest in enumerate(nests))


class _Program:
    """The kernel of a nest."""

    def __init__(self, nest: Nest, number: int) -> None:
        self._nest, self._tiling = nest, tiling(nest)
        self._lines: list[str] = []
        self._indent = 1
        self._real = "tl.float64" if nest.real == "double" else "tl.float32"
        self._needed = nest.needed()
        # Dimensions that tiles divide evenly need no mask.
        self._masked = {
            "in_r": nest.rows % self._tiling.rows != 0,
            "in_c": nest.columns % self._tiling.columns != 0,
        }
        self._write(number)
        self.text = "\n".join(self._lines) + "\n"

    def _put(self, line: str) -> None:
        self._lines.append("    " * self._indent + line)

    def _write(self, number: int) -> None:
        nest, tiles = self._nest, self._tiling
        names = [f"i{k}" for k in range(len(nest.inputs))]
        names += [f"o{k}" for k in range(len(nest.outputs))]
        self._lines += ["", "", "@triton.jit", f"def region_{number}({', '.join(names)}):"]
        sums = [store for store in nest.stores if store.column]
        for store in sums:
            self._put(f"sum_{store.output} = tl.zeros([{tiles.columns}], {self._real})")
        if tiles.turns:
            tiles_down = -(-nest.rows // tiles.rows)
            self._put(f"for tile in range(tl.program_id(0), {tiles_down}, {tiles.grid[0]}):")
            self._indent = 2
        else:
            self._put("tile = tl.program_id(0)")
        wide = ".to(tl.int64)" if self._reach() >= _INT32 else ""
        self._put(f"r = tile{wide} * {tiles.rows} + tl.arange(0, {tiles.rows})[:, None]")
        self._put(f"in_r = r < {nest.rows}")
        if tiles.again:
            for stage in range(self._last() + 1):
                self._stage(stage)
        else:
            self._columns("tl.program_id(1)" if tiles.grid[1] > 1 else "0")
            self._whole()
        self._indent = 1
        for store in sums:
            at = f"tl.program_id(1) * {tiles.columns} + tl.arange(0, {tiles.columns})"
            self._put(f"at = {at}")
            place = f"o{store.output} + tl.program_id(0) * {nest.columns} + at"
            self._put(f"tl.store({place}, sum_{store.output}, mask=at < {nest.columns})")

    def _reach(self) -> int:
        """Return the largest index of an element that is read, written or drawn."""
        accesses = [*self._nest.reads, *self._nest.writes]
        ends = [
            access.start
            + sum((e - 1) * s for e, s in (*access.rows, (self._nest.columns, access.column)))
            for access in accesses
        ]
        starts = max((store.start for store in self._nest.stores), default=0)
        return max(*ends, self._nest.rows * self._nest.columns, 0) + starts

    def _last(self) -> int:
        return max(self._nest.statements[n].stage for n in self._needed)

    def _columns(self, first: str) -> None:
        width = self._tiling.columns
        start = "" if first == "0" else f"{first} * {width} + "
        self._put(f"c = {start}tl.arange(0, {width})[None, :]")
        self._put(f"in_c = c < {self._nest.columns}")

    def _whole(self) -> None:
        """Write every statement once, with its stores."""
        for n in sorted(self._needed):
            statement = self._nest.statements[n]
            if statement.code in ("sum", "max"):
                padded = self._padded(statement)
                self._put(f"v{n} = tl.{statement.code}({padded}, axis=1, keep_dims=True)")
            elif not _is_constant(statement):
                self._put(f"v{n} = {self._expression(statement)}")
            self._stores(n)

    def _padded(self, statement: RowStatement) -> str:
        """Return the operand of a reduction, masked beyond the last column."""
        value, neutral = (
            self._name(statement.arguments[0]),
            "-INFINITY" if statement.code == "max" else "0.0",
        )
        return f"tl.where(in_c, {value}, {neutral})" if self._masked["in_c"] else value

    def _stage(self, stage: int) -> None:
        """Write a pass over the columns of a tile, preceded by the values per row it needs."""
        nest, tiles = self._nest, self._tiling
        for n in sorted(self._needed):
            statement = nest.statements[n]
            if (
                statement.extent == "full"
                or statement.stage != stage
                or statement.code in ("sum", "max")
            ):
                continue
            if not _is_constant(statement):
                self._put(f"v{n} = {self._expression(statement)}")
            self._stores(n)
        sums = [n for n in sorted(self._needed) if nest.statements[n].code in ("sum", "max")
                and nest.statements[n].stage == stage + 1]  # fmt: skip
        stored = {store.value for store in nest.stores}
        roots = {n for n in stored if nest.statements[n].extent == "full"
                 and nest.statements[n].stage == stage}  # fmt: skip
        needed = nest.needed([*roots, *(nest.statements[n].arguments[0] for n in sums)])
        for n in sums:
            start = "-INFINITY" if nest.statements[n].code == "max" else "0.0"
            self._put(f"a{n} = tl.full([{tiles.rows}, {tiles.columns}], {start}, {self._real})")
        self._put(f"for part in range({-(-nest.columns // tiles.columns)}):")
        self._indent += 1
        self._columns("part")
        for n in sorted(needed):
            statement = nest.statements[n]
            if statement.extent == "full" and not _is_constant(statement):
                self._put(f"v{n} = {self._expression(statement)}")
            if n in roots:
                self._stores(n)
        for n in sums:
            statement = nest.statements[n]
            joined = "tl.maximum(a{0}, {1})" if statement.code == "max" else "a{0} + {1}"
            self._put(f"a{n} = " + joined.format(n, self._padded(statement)))
        self._indent -= 1
        for n in sums:
            statement = nest.statements[n]
            self._put(f"v{n} = tl.{statement.code}(a{n}, axis=1, keep_dims=True)")
            self._stores(n)

    def _stores(self, n: int) -> None:
        for store in self._nest.stores:
            if store.value != n:
                continue
            value, spec = self._name(n), self._nest.outputs[store.output]
            if store.column:
                # A value that is equal in all rows is summed over all of them, too.
                total = f"tl.sum(tl.where(in_r & (c >= 0), {value}, 0.0), axis=0)"
                self._put(f"sum_{store.output} += {total}")
                continue
            if spec.dtype in ("bool", "uint8"):
                value = f"f_where({value} != 0, 1, 0).to(tl.int8)"
            place = self._nest.writes[store.output]
            place = replace(place, start=store.start)
            self._put(f"tl.store({self._pointer('o', store.output, place)}, {value}"
                      f"{self._mask(place)})")  # fmt: skip

    def _pointer(self, letter: str, tensor: int, place: Access) -> str:
        column = f" + c * {place.column}" if place.column else ""
        row = place.row("//")
        return f"{letter}{tensor} + {row}{column}" if row != "0" else f"{letter}{tensor}{column}"

    def _mask(self, place: Access) -> str:
        """Return a mask argument for the part of a tile inside the tensor; empty if all is."""
        by_row = any(stride for _, stride in place.rows)
        parts = [name for name, varies in (("in_r", by_row), ("in_c", bool(place.column)))
                 if varies and self._masked[name]]  # fmt: skip
        return f", mask={' & '.join(parts)}" if parts else ""

    def _name(self, n: int) -> str:
        statement = self._nest.statements[n]
        # A constant in a variable would become a float32.
        return f"({_python(statement.code)})" if _is_constant(statement) else f"v{n}"

    def _expression(self, statement: RowStatement) -> str:
        if statement.code == "load":
            place = self._nest.reads[statement.tensor]
            mask = self._mask(place)
            other = ", other=0" if mask else ""
            pointer = self._pointer("i", statement.tensor, place)
            return f"tl.load({pointer}{mask}{other}).to({self._real})"
        if statement.code.startswith("draw"):
            p = float(statement.code.split()[1])
            threshold, scale = threshold_and_scale(p)
            factor = 1.0 / (1.0 - p) if self._nest.real == "double" else float(scale)
            element = f"r * {self._nest.columns} + c"
            return (
                f"draw(i{statement.tensor}, {element}, {threshold}).to({self._real}) * {factor!r}"
            )
        return _python(statement.code).format(*(self._name(a) for a in statement.arguments))


def _is_constant(statement: RowStatement) -> bool:
    return not statement.arguments and statement.code.startswith("real(")


def _python(code: str) -> str:
    """Return the code of a statement in Python, where numbers need no type."""
    return code.replace("real(", "(")


__all__ = ["Tiling", "tiling", "triton_source"]
