"""`Nest`: loops over rows and columns, with reductions in stages.

A nest iterates over R rows of N columns. A statement has a value per element ("full"), per row
("row"), or a single one ("one"). A reduction over columns gives a value per row; a reduction over
rows gives a value per column and can only be stored. Statements that depend on a reduction of
their row belong to a later *stage*; the stages of a row run one after another while the row is in
the nearest cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.graph import TensorSpec

Shape = tuple[int, ...]
Extent = Literal["full", "row", "one"]


class UnsupportedError(Exception):
    """The operators, or one of them, cannot be written as such a nest.

    Attributes:
        operation: index of the operator; -1 for all of them together.
    """

    def __init__(self, reason: str, operation: int = -1) -> None:
        super().__init__(reason)
        self.operation = operation


@dataclass(frozen=True)
class RowStatement:
    """A value of the nest.

    Attributes:
        code: an expression of both C++ and Triton, with ``{0}``, ``{1}`` for `arguments`,
            ``real(x)`` for numbers, and functions of the preludes; or "load", "sum", "max", "draw".
        arguments: indices of earlier statements.
        extent: extent of the value.
        stage: pass over the row in which the value becomes available.
        tensor: index among the nest's inputs, for a load or draw; else -1.
    """

    code: str
    arguments: tuple[int, ...]
    extent: Extent
    stage: int
    tensor: int = -1


@dataclass(frozen=True)
class Store:
    """A value, or its sum over all rows, that is written to an output.

    Attributes:
        value: index of the statement.
        output: index among the nest's outputs.
        column: whether the value is summed over the rows into N numbers.
        start: offset of the value in the output, in elements.
    """

    value: int
    output: int
    column: bool = False
    start: int = 0


@dataclass(frozen=True)
class Access:
    """Offsets of a tensor's elements (row, column), in elements.

    Attributes:
        rows: (extent, stride) of each dimension of the row index, outermost first.
        column: stride of a column.
        start: offset of element (0, 0).
    """

    rows: tuple[tuple[int, int], ...]
    column: int
    start: int = 0

    def row(self, division: str) -> str:
        """Return code for the offset of row ``r``; `division` is the integer division operator."""
        parts, divisor = [], 1
        for number, (extent, stride) in enumerate(reversed(self.rows)):
            outermost = number == len(self.rows) - 1
            index = "r" if divisor == 1 else f"r {division} {divisor}"
            if not outermost:
                index = f"({index}) % {extent}"
            if stride:
                parts.append(f"({index}) * {stride}")
            divisor *= extent
        if self.start:
            parts.append(str(self.start))
        return " + ".join(parts) or "0"


@dataclass
class Nest:
    """Loops over `rows` rows of `columns` columns.

    Attributes:
        inputs, outputs: tensors read and written; `reads` and `writes` are their offsets.
        real: "double" if any tensor is, else "float".
        device: device of all tensors, "cpu" or "cuda".
    """

    rows: int
    columns: int
    real: str = "float"
    device: str = "cpu"
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    statements: list[RowStatement] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    _index: dict[RowStatement, int] = field(default_factory=dict)

    def add(self, code: str, *arguments: int, tensor: int = -1, extent: Extent = "one") -> int:
        """Add a statement unless an equal one exists, and return its index."""
        operands = [self.statements[n] for n in arguments]
        stage = max((operand.stage for operand in operands), default=0)
        extents = {operand.extent for operand in operands} | {extent}
        widest: Extent = "full" if "full" in extents else "row" if "row" in extents else "one"
        return self.put(RowStatement(code, arguments, widest, stage, tensor))

    def constant(self, value: float) -> int:
        """Add a constant, and return its index."""
        if value != value or value in (float("inf"), float("-inf")):
            text = "NAN" if value != value else "INFINITY" if value > 0 else "-INFINITY"
            return self.add(f"real({text})")
        return self.add(f"real({value!r})")

    def reduce(self, how: Literal["sum", "max"], value: int) -> int:
        """Add a reduction over the columns, available one stage later, and return its index."""
        if self.statements[value].extent != "full":
            raise UnsupportedError("a reduction of a value that is constant within a row")
        return self.put(RowStatement(how, (value,), "row", self.statements[value].stage + 1))

    def needed(self, roots: Iterable[int] | None = None) -> set[int]:
        """Return the statements that `roots` depend on, by default those of all stored values."""
        reachable: set[int] = set()
        pending = list(roots if roots is not None else (store.value for store in self.stores))
        while pending:
            n = pending.pop()
            if n not in reachable:
                reachable.add(n)
                pending += self.statements[n].arguments
        return reachable

    def put(self, statement: RowStatement) -> int:
        """Add a statement unless an equal one exists, and return its index."""
        if statement not in self._index:
            self.statements.append(statement)
            self._index[statement] = len(self.statements) - 1
        return self._index[statement]


def refinement(shapes: Sequence[Shape]) -> tuple[int, ...] | None:
    """Return extents into which the dimensions of every shape can be split, outermost first.

    All shapes have the same elements in the same order. None if no such extents exist.
    """
    bounds = {1}
    for shape in shapes:
        product = 1
        for extent in reversed(shape):
            product *= extent
            bounds.add(product)
    ordered = sorted(bounds)
    if any(b % a for a, b in itertools.pairwise(ordered)):
        return None
    pairs = itertools.pairwise(ordered)
    return tuple(b // a for a, b in pairs)[::-1]


def cut(shape: Shape, strides: Shape, extents: Sequence[int]) -> list[int]:
    """Return the strides of a tensor whose dimensions are split into `extents`."""
    cut_strides: list[int] = []
    remaining = list(extents)
    for extent, stride in reversed(list(zip(shape, strides, strict=True))):
        size = 1
        while size < extent:
            part = remaining.pop()
            cut_strides.append(stride * size)
            size *= part
    cut_strides += [0] * len(remaining)
    return cut_strides[::-1]


def broadcast(spec: TensorSpec, shape: Shape) -> Shape:
    """Return the strides of a tensor broadcast to `shape`.

    Raises:
        UnsupportedError: the tensor cannot be broadcast to it.
    """
    missing = len(shape) - len(spec.shape)
    if missing < 0:
        raise UnsupportedError(f"{spec.shape} cannot be broadcast to {shape}")
    strides = [0] * missing
    for extent, stride, target in zip(spec.shape, spec.strides, shape[missing:], strict=True):
        if extent not in (1, target):
            raise UnsupportedError(f"{spec.shape} cannot be broadcast to {shape}")
        strides.append(0 if extent == 1 else stride)
    return tuple(strides)


def access(
    strides: Sequence[int], extents: Sequence[int], inner: int, start: int = 0
) -> Access | None:
    """Return the offsets of a tensor whose last `inner` dimensions are columns.

    None if its columns have no common stride.
    """
    columns = [(e, s) for e, s in zip(extents, strides, strict=True)][len(extents) - inner :]
    rows = [(e, s) for e, s in zip(extents, strides, strict=True)][: len(extents) - inner]
    stride = columns[-1][1] if columns else 0
    reach = stride
    for extent, step in reversed(columns):
        if step != reach and extent != 1:
            return None
        reach = step * extent
    merged: list[tuple[int, int]] = []
    for extent, step in rows:
        if merged and merged[-1][1] == step * extent:
            merged[-1] = merged[-1][0] * extent, step
        else:
            merged.append((extent, step))
    return Access(tuple(merged), stride, start)
