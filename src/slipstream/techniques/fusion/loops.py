"""`Nest`: a region as loops over rows and columns, statement by statement.

A region iterates over R rows of N columns. A statement has a value for every element ("full"), one
for every row ("row") or one for all ("one"); reductions over columns give rows, reductions over
rows give columns, which only leave the region. What is needed after a reduction of its own row is
computed in a later *stage*: stages of a row follow each other while it is in the nearest cache.
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
    """A region, or one of its operators, has no loops of this form; it stays as it is.

    Attributes:
        operation: which of the region's operations, by place; -1 for the region as a whole.
    """

    def __init__(self, why: str, operation: int = -1) -> None:
        super().__init__(why)
        self.operation = operation


@dataclass(frozen=True)
class Statement:
    """One value.

    Attributes:
        code: what C++ and Triton both take, with ``{0}``, ``{1}`` for the values of `arguments`,
            ``real(x)`` for numbers and functions of the preludes; "load", "sum", "max", "draw".
        arguments: numbers of earlier statements.
        extent: of its value.
        stage: when it is known: in which pass over the row.
        tensor: place among the nest's inputs, of a load or draw; -1.
    """

    code: str
    arguments: tuple[int, ...]
    extent: Extent
    stage: int
    tensor: int = -1


@dataclass(frozen=True)
class Store:
    """A value that leaves the region, or a sum over all rows that does.

    Attributes:
        column: whether it is summed over the rows into N numbers.
        output: place among the nest's outputs.
        start: elements between the output's first and where this value begins in it.
    """

    value: int
    output: int
    column: bool = False
    start: int = 0


@dataclass(frozen=True)
class Access:
    """Where a tensor's element (row, column) lies, in elements.

    Attributes:
        rows: (extent, stride) of each dimension of a row's number, outermost first.
        column: stride of a column.
        start: where element (0, 0) lies.
    """

    rows: tuple[tuple[int, int], ...]
    column: int
    start: int = 0

    def row(self, divided: str) -> str:
        """Where row ``r`` begins, in elements; `divided` is the language's whole division."""
        parts, divisor = [], 1
        for number, (extent, stride) in enumerate(reversed(self.rows)):
            whole = number == len(self.rows) - 1
            index = "r" if divisor == 1 else f"r {divided} {divisor}"
            if not whole:
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
        inputs, outputs: tensors read and made; `reads`, `writes` say where their elements lie.
        real: "float", or "double" where any tensor is.
        device: where all tensors are, "cpu" or "cuda".
    """

    rows: int
    columns: int
    real: str = "float"
    device: str = "cpu"
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    _known: dict[Statement, int] = field(default_factory=dict)

    def add(self, code: str, *arguments: int, tensor: int = -1, extent: Extent = "one") -> int:
        """The number of a statement; an equal one is made once."""
        parts = [self.statements[one] for one in arguments]
        stage = max((one.stage for one in parts), default=0)
        extents = {one.extent for one in parts} | {extent}
        widest: Extent = "full" if "full" in extents else "row" if "row" in extents else "one"
        return self._put(Statement(code, arguments, widest, stage, tensor))

    def constant(self, value: float) -> int:
        """A number."""
        if value != value or value in (float("inf"), float("-inf")):
            text = "NAN" if value != value else "INFINITY" if value > 0 else "-INFINITY"
            return self.add(f"real({text})")
        return self.add(f"real({value!r})")

    def reduce(self, how: Literal["sum", "max"], value: int) -> int:
        """A value for every row, from all of its columns; known one stage later."""
        if self.statements[value].extent != "full":
            raise UnsupportedError("a reduction of what is the same in a whole row")
        one = Statement(how, (value,), "row", self.statements[value].stage + 1)
        return self._put(one)

    def needed(self, roots: Iterable[int] | None = None) -> set[int]:
        """The statements that `roots` are made of, or that all stored values are."""
        reachable: set[int] = set()
        todo = list(roots if roots is not None else (store.value for store in self.stores))
        while todo:
            one = todo.pop()
            if one not in reachable:
                reachable.add(one)
                todo += self.statements[one].arguments
        return reachable

    def _put(self, one: Statement) -> int:
        if one not in self._known:
            self.statements.append(one)
            self._known[one] = len(self.statements) - 1
        return self._known[one]


def refinement(shapes: Sequence[Shape]) -> tuple[int, ...] | None:
    """Extents into which every shape's dimensions can be cut, outermost first; None for none.

    All shapes have as many elements, in the same order.
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
    """The strides of a tensor whose dimensions are cut into `extents`, one for each."""
    cut_strides: list[int] = []
    left = list(extents)
    for extent, stride in reversed(list(zip(shape, strides, strict=True))):
        size = 1
        while size < extent:
            part = left.pop()
            cut_strides.append(stride * size)
            size *= part
    cut_strides += [0] * len(left)
    return cut_strides[::-1]


def broadcast(spec: TensorSpec, shape: Shape) -> Shape:
    """Strides of a tensor seen as one of `shape`, as operators broadcast.

    Raises:
        UnsupportedError: it cannot be.
    """
    missing = len(shape) - len(spec.shape)
    if missing < 0:
        raise UnsupportedError(f"{spec.shape} is not broadcast to {shape}")
    strides = [0] * missing
    for extent, stride, wanted in zip(spec.shape, spec.strides, shape[missing:], strict=True):
        if extent not in (1, wanted):
            raise UnsupportedError(f"{spec.shape} is not broadcast to {shape}")
        strides.append(0 if extent == 1 else stride)
    return tuple(strides)


def access(
    strides: Sequence[int], extents: Sequence[int], inner: int, start: int = 0
) -> Access | None:
    """Where elements lie whose last `inner` dimensions are columns; None: they have no stride."""
    columns = [(e, s) for e, s in zip(extents, strides, strict=True)][len(extents) - inner :]
    rows = [(e, s) for e, s in zip(extents, strides, strict=True)][: len(extents) - inner]
    stride = columns[-1][1] if columns else 0
    reach = stride
    for extent, one in reversed(columns):
        if one != reach and extent != 1:
            return None
        reach = one * extent
    merged: list[tuple[int, int]] = []
    for extent, one in rows:
        if merged and merged[-1][1] == one * extent:
            merged[-1] = merged[-1][0] * extent, one
        else:
            merged.append((extent, one))
    return Access(tuple(merged), stride, start)
