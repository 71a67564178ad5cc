"""`Program`: statements over affine loops, as values that can be checked, costed and compiled.

Statements are executed in order, each over its whole domain, except that consecutive statements
share the loops of the sequential axes that their lists of axes both begin with:

    t = Axis("t", 10, "sequential"); i = Axis("i", 98, "free")
    Statement("b", Index((("i", 1),), 1), (Load("a", ...) + ...), ("t", "i"))
    Statement("a", Index((("i", 1),), 1), Load("b", ...), ("t", "i"))

runs both statements in each iteration of t. A statement with a reduction sets its target to the sum
or maximum of its value over its reduce axes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from slipstream.codegen.ops import OPS, Argument, folded
from slipstream.errors import SlipstreamError
from slipstream.graph.call import ITEM_BYTES

Kind = Literal["free", "sequential", "reduce"]
Role = Literal["in", "out", "inout", "temp"]
Space = Literal["memory", "tile", "register"]
Reduction = Literal["sum", "max"]
_KINDS, _ROLES = ("free", "sequential", "reduce"), ("in", "out", "inout", "temp")
_SPACES = ("memory", "tile", "register")


class ProgramError(SlipstreamError):
    """A program breaks a rule of the loop form; `where` names the statement or buffer."""


@dataclass(frozen=True)
class Symbol:
    """An extent that is bound when the generated function is called."""

    name: str


Extent = int | Symbol


@dataclass(frozen=True)
class Axis:
    """A loop from 0 to `extent`.

    Attributes:
        kind: "free" if its iterations commute, "sequential" if they are executed in order, or
            "reduce" if the value of a statement is summed, or its maximum taken, over it.
    """

    name: str
    extent: Extent
    kind: Kind = "free"


@dataclass(frozen=True)
class Index:
    """An element of a buffer: ``offset + sum(k * axis) + row``, in elements.

    Attributes:
        terms: pairs of the name of an axis or symbol and its factor, sorted by name; equal names
            are merged and factors of 0 are dropped.
        through: a buffer of integers and an index into it; the integer read selects the row, which
            is multiplied by the first stride of the indexed buffer.
    """

    terms: tuple[tuple[str, int], ...] = ()
    offset: int = 0
    through: tuple[str, Index] | None = None

    def __post_init__(self) -> None:
        if not self.terms or (len(self.terms) == 1 and self.terms[0][1]):
            return
        merged: dict[str, int] = {}
        for name, factor in self.terms:
            merged[name] = merged.get(name, 0) + factor
        object.__setattr__(self, "terms", tuple(sorted((n, k) for n, k in merged.items() if k)))

    def factor(self, name: str) -> int:
        """Return the factor of an axis or symbol; 0 if it does not occur."""
        return next((factor for term, factor in self.terms if term == name), 0)

    def renamed(self, names: Mapping[str, str]) -> Index:
        """Return the index with other names of axes."""
        through = self.through and (self.through[0], self.through[1].renamed(names))
        return Index(tuple((names.get(n, n), k) for n, k in self.terms), self.offset, through)

    def substituted(self, name: str, value: Index) -> Index:
        """Return the index with an axis replaced by an affine expression."""
        factor = self.factor(name)
        if not factor:
            return self
        terms = [term for term in self.terms if term[0] != name]
        terms += [(other, factor * k) for other, k in value.terms]
        return Index(tuple(terms), self.offset + factor * value.offset, self.through)

    def bounds(self, extents: Mapping[str, int]) -> tuple[int, int]:
        """Return the least and greatest value of the affine part over a rectangle."""
        ends = [k * (extents[name] - 1) for name, k in self.terms]
        least = self.offset + sum(end for end in ends if end < 0)
        return least, self.offset + sum(end for end in ends if end > 0)


@dataclass(frozen=True)
class Buffer:
    """An array, row by row if `strides` is None.

    Attributes:
        dtype: as torch prints it, such as ``"float32"``.
        shape: extents; the first may be a symbol.
        role: "in", "out", "inout" for an output that is also read, or "temp".
        space: "memory"; "tile" for a temporary of one tile; "register" for a single value.
        strides: in elements.
    """

    name: str
    shape: tuple[Extent, ...]
    dtype: str = "float32"
    role: Role = "in"
    space: Space = "memory"
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ProgramError(f"there is no dtype '{self.dtype}'", where=f"buffer {self.name}")
        if self.role not in _ROLES or self.space not in _SPACES:
            raise ProgramError(
                f"'{self.role}' in '{self.space}' is not a buffer's role and space",
                where=f"buffer {self.name}", remedy=f"one of {_ROLES} in {_SPACES}",
            )  # fmt: skip
        if self.shape and not isinstance(self.shape[0], (int, Symbol)):
            raise ProgramError(
                f"the extent {self.shape[0]!r} is not an integer", where=f"buffer {self.name}"
            )
        if any(not isinstance(extent, int) for extent in self.shape[1:]):
            raise ProgramError(
                "only the first extent can be a symbol", where=f"buffer {self.name}",
                remedy="move the symbolic dimension to the front",
            )  # fmt: skip
        if any(isinstance(extent, int) and extent < 1 for extent in self.shape):
            raise ProgramError(f"{self.shape} has no elements", where=f"buffer {self.name}")
        if not self.strides:
            inner = [int(extent) for extent in self.shape[1:]]  # type: ignore[arg-type]
            strides = [math.prod(inner[at:]) for at in range(len(self.shape))]
            object.__setattr__(self, "strides", tuple(strides))
        if len(self.strides) != len(self.shape):
            raise ProgramError(
                f"{len(self.strides)} strides for {len(self.shape)} dimensions",
                where=f"buffer {self.name}",
            )

    @property
    def elements(self) -> int | None:
        """Elements from the first to the last; None if an extent is a symbol."""
        pairs = zip(self.shape, self.strides, strict=True)
        reach = 1
        for extent, stride in pairs:
            if not isinstance(extent, int):
                return None
            reach += (extent - 1) * stride
        return reach

    def at(self, *indices: Mapping[str, int] | str | int, through: Any = None) -> Index:
        """Return the index of an element, given one affine index per dimension.

        An affine index is the name of an axis, an integer, or a mapping from names to factors with
        the constant at ``""``.
        """
        if len(indices) != len(self.strides):
            raise ProgramError(
                f"{len(indices)} indices for {len(self.strides)} dimensions",
                where=f"buffer {self.name}",
            )
        terms: list[tuple[str, int]] = []
        offset = 0
        for index, stride in zip(indices, self.strides, strict=True):
            if isinstance(index, int):
                offset += index * stride
            elif isinstance(index, str):
                terms.append((index, stride))
            else:
                offset += index.get("", 0) * stride
                terms += [(name, k * stride) for name, k in index.items() if name]
        return Index(tuple(terms), offset, through)


@dataclass(frozen=True)
class Load:
    """An element of a buffer, as a value."""

    buffer: str
    index: Index


@dataclass(frozen=True)
class Const:
    """A number.

    Attributes:
        absent: whether it is the 0 of a term that does not exist, such as the state of a missing
            child, so that products with it are 0.
    """

    value: float
    absent: bool = False


@dataclass(frozen=True)
class Apply:
    """An operation of `OPS` and its arguments."""

    op: str
    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ProgramError(f"there is no operation '{self.op}'", remedy=f"one of {sorted(OPS)}")
        if len(self.args) != OPS[self.op].arity:
            raise ProgramError(
                f"'{self.op}' takes {OPS[self.op].arity} arguments, but got {len(self.args)}"
            )


@dataclass(frozen=True)
class Draw:
    """Dropout's factor of an element: 0 with probability `p`, else 1 / (1 - p).

    Attributes:
        seed: buffer of the random generator's two 64-bit words.
        element: number of the element.
    """

    p: float
    seed: str
    element: Index


Expr = Load | Const | Apply | Draw


def apply(op: str, *args: Expr | float) -> Expr:
    """Return an operation, simplified where constants allow (see `ops.folded`)."""
    terms = tuple(a if isinstance(a, (Load, Const, Apply, Draw)) else Const(float(a)) for a in args)
    constants = tuple(term.value if isinstance(term, Const) else None for term in terms)
    absent = frozenset(n for n, term in enumerate(terms) if isinstance(term, Const) and term.absent)
    if op not in OPS or len(terms) != OPS[op].arity:
        return Apply(op, terms)
    simple = folded(op, constants, absent)
    if isinstance(simple, Argument):
        term = terms[simple.number]
        return apply("neg", term) if simple.negative else term
    if simple is not None:
        products = op in ("mul", "div", "keep", "neg", "square", "tanh", "relu", "abs")
        return Const(simple, absent=simple == 0 and bool(absent) and (
            products or (op in ("add", "sub") and len(absent) == 2)
        ))  # fmt: skip
    return Apply(op, terms)


def substituted(value: Expr, replacements: Mapping[Expr, Expr]) -> Expr:
    """Return `value` with expressions replaced and simplified again."""
    if value in replacements:
        return replacements[value]
    if isinstance(value, Apply):
        return apply(value.op, *(substituted(argument, replacements) for argument in value.args))
    return value


def loads(value: Expr) -> Iterator[Load]:
    """Yield the loads of an expression, in order, with those of indirect indices after each."""
    if isinstance(value, Load):
        yield value
        if value.index.through is not None:
            yield Load(*value.index.through)
    elif isinstance(value, Apply):
        for argument in value.args:
            yield from loads(argument)


def flops(value: Expr) -> int:
    """Return the floating-point operations of an expression."""
    if not isinstance(value, Apply):
        return 0
    return OPS[value.op].flops + sum(map(flops, value.args))


@dataclass(frozen=True)
class Statement:
    """``target[index] = value`` over axes, outermost first.

    Attributes:
        reduce: how values are combined over the statement's reduce axes; None if it has none.
        where: affine indices that are not negative in iterations that are executed.
    """

    target: str
    index: Index
    value: Expr
    axes: tuple[str, ...]
    reduce: Reduction | None = None
    where: tuple[Index, ...] = ()

    @property
    def accesses(self) -> tuple[Load, ...]:
        """The write, as a load, and then every read."""
        return (Load(self.target, self.index), *loads(self.value))


@dataclass(frozen=True)
class Program:
    """Buffers, axes and statements; checked when it is built.

    Raises:
        ProgramError: an index is out of range or names an unknown axis, an element has two
            writers, an output is read that is not "inout", and so on.
    """

    buffers: tuple[Buffer, ...]
    axes: tuple[Axis, ...]
    statements: tuple[Statement, ...]
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "_hash", hash((self.buffers, self.axes, self.statements)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def axis(self) -> dict[str, Axis]:
        """Axes by name."""
        return {axis.name: axis for axis in self.axes}

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Names of all symbols, sorted."""
        extents = [axis.extent for axis in self.axes]
        extents += [extent for buffer in self.buffers for extent in buffer.shape]
        names = {extent.name for extent in extents if isinstance(extent, Symbol)}
        for statement in self.statements:
            for index in _indices(statement):
                names |= {name for name, _ in index.terms if name not in self.axis}
        return tuple(sorted(names))

    @cached_property
    def extents(self) -> dict[str, int]:
        """Extents of the axes that have a constant one."""
        return {a.name: a.extent for a in self.axes if isinstance(a.extent, int)}

    @property
    def real(self) -> str:
        """Type of computed values: "double" if any buffer is float64, else "float"."""
        return "double" if any(b.dtype == "float64" for b in self.buffers) else "float"

    def shared(self, first: int, second: int) -> int:
        """Return the number of sequential loops that two statements share."""
        count = 0
        low, high = min(first, second), max(first, second)
        for place in range(len(self.statements[low].axes)):
            names = {s.axes[place : place + 1] for s in self.statements[low : high + 1]}
            if len(names) > 1 or self.axis[next(iter(names))[0]].kind != "sequential":
                break
            count += 1
        return count

    @cached_property
    def key(self) -> str:
        """Canonical JSON, equal for equal programs."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        """Return the program as JSON."""
        return {
            "buffers": [
                [b.name, [_extent_json(e) for e in b.shape], b.dtype, b.role, b.space,
                 list(b.strides)]
                for b in self.buffers
            ],
            "axes": [[a.name, _extent_json(a.extent), a.kind] for a in self.axes],
            "statements": [
                [s.target, _index_json(s.index), _expr_json(s.value), list(s.axes), s.reduce,
                 [_index_json(index) for index in s.where]]
                for s in self.statements
            ],
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> Program:
        """Read a program from JSON.

        Raises:
            ProgramError: it is not the JSON of a program, or breaks a rule.
        """
        try:
            buffers = tuple(
                Buffer(str(name), tuple(map(_extent, shape)), dtype, role, space, tuple(strides))
                for name, shape, dtype, role, space, strides in value["buffers"]
            )
            axes = tuple(Axis(str(n), _extent(e), kind) for n, e, kind in value["axes"])
            statements = tuple(
                Statement(str(target), _index(index), _expr(expr), tuple(map(str, names)), reduce,
                          tuple(map(_index, where)))
                for target, index, expr, names, reduce, where in value["statements"]
            )  # fmt: skip
            return cls(buffers, axes, statements)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ProgramError(
                f"this is not the JSON of a loop program ({type(error).__name__}: {error})",
                remedy="write it with Program.to_json()",
            ) from error


def _extent_json(extent: Extent) -> Any:
    return extent if isinstance(extent, int) else extent.name


def _extent(value: Any) -> Extent:
    return Symbol(value) if isinstance(value, str) else int(value)


def _index_json(index: Index) -> list[Any]:
    through = index.through and [index.through[0], _index_json(index.through[1])]
    return [[list(term) for term in index.terms], index.offset, *([through] if through else [])]


def _index(value: Any) -> Index:
    terms, offset, *through = value
    inner = (str(through[0][0]), _index(through[0][1])) if through else None
    return Index(tuple((str(name), int(k)) for name, k in terms), int(offset), inner)


def _expr_json(value: Expr) -> Any:
    match value:
        case Const(number, absent):
            # JSON has no infinity and no NaN.
            return ["const", number if math.isfinite(number) else str(number), absent]
        case Load(buffer, index):
            return ["load", buffer, _index_json(index)]
        case Draw(p, seed, element):
            return ["draw", p, seed, _index_json(element)]
        case Apply(op, args):
            return ["apply", op, *map(_expr_json, args)]


def _expr(value: Any) -> Expr:
    kind, *rest = value
    match kind:
        case "const":
            return Const(float(rest[0]), bool(rest[1]))
        case "load":
            return Load(str(rest[0]), _index(rest[1]))
        case "draw":
            return Draw(float(rest[0]), str(rest[1]), _index(rest[2]))
        case "apply":
            return Apply(rest[0], tuple(map(_expr, rest[1:])))
    raise ValueError(f"'{kind}' is not an expression")


def _draws(value: Expr) -> Iterator[Draw]:
    if isinstance(value, Draw):
        yield value
    elif isinstance(value, Apply):
        for argument in value.args:
            yield from _draws(argument)


def _indices(statement: Statement) -> Iterator[Index]:
    yield from (load.index for load in statement.accesses)
    yield from (draw.element for draw in _draws(statement.value))
    yield from statement.where


def _unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name.isidentifier():
            raise ProgramError(f"'{name}' is not a name of a {kind}", remedy="use a C identifier")
        if name in seen:
            raise ProgramError(f"two {kind}s have the name '{name}'", remedy="rename one of them")
        seen.add(name)


def _check(program: Program) -> None:
    _unique("buffer", (buffer.name for buffer in program.buffers))
    _unique("axis", (axis.name for axis in program.axes))
    for axis in program.axes:
        extent = axis.extent if isinstance(axis.extent, (int, Symbol)) else 0
        if axis.kind not in _KINDS or (isinstance(extent, int) and extent < 1):
            raise ProgramError(f"{axis} is not an axis", remedy=f"a positive extent, kind {_KINDS}")
    if not program.statements:
        raise ProgramError("the program has no statements")
    for number, statement in enumerate(program.statements):
        try:
            _check_statement(program, statement)
        except ProgramError as error:
            error.where = error.where or f"statement {number} (of {statement.target})"
            raise
    _check_writers(program)


def _check_statement(program: Program, statement: Statement) -> None:
    for name in statement.axes:
        if name not in program.axis:
            raise ProgramError(
                f"there is no axis '{name}'", remedy=f"one of {sorted(program.axis)}"
            )
    if len(set(statement.axes)) != len(statement.axes):
        raise ProgramError(f"an axis occurs twice in {statement.axes}")
    reduced = [name for name in statement.axes if program.axis[name].kind == "reduce"]
    if bool(reduced) != (statement.reduce is not None) or statement.reduce not in (
        None, "sum", "max",
    ):  # fmt: skip
        raise ProgramError(
            f"reduction '{statement.reduce}' over axes {reduced}",
            remedy='reduce axes go with reduce="sum" or reduce="max"',
        )
    for index in _indices(statement):
        for name, _ in index.terms:
            if name in program.axis and name not in statement.axes:
                raise ProgramError(
                    f"an index uses axis '{name}', which is not an axis of the statement",
                    remedy=f"one of {statement.axes}",
                )
    for name in reduced:
        if statement.index.factor(name):
            raise ProgramError(f"the target depends on the reduce axis '{name}'")
    for access in statement.accesses:
        _check_access(program, statement, access)
    target = program.buffer[statement.target]
    if target.role == "in" or statement.index.through is not None:
        raise ProgramError(
            f"'{statement.target}' cannot be written",
            remedy='targets are "out", "inout" or "temp", with an affine index',
        )
    written = {s.target for s in program.statements}
    for load in loads(statement.value):
        if program.buffer[load.buffer].role in ("out", "temp") and load.buffer not in written:
            raise ProgramError(f"'{load.buffer}' is read but never written")
    for draw in _draws(statement.value):
        if not 0 <= draw.p < 1 or draw.seed not in program.buffer:
            raise ProgramError(f"{draw} needs 0 <= p < 1 and a buffer of the seed")


def _check_access(program: Program, statement: Statement, access: Load) -> None:
    if access.buffer not in program.buffer:
        raise ProgramError(
            f"there is no buffer '{access.buffer}'", remedy=f"one of {sorted(program.buffer)}"
        )
    elements = program.buffer[access.buffer].elements
    index = access.index
    if index.through is not None:
        buffer, inner = index.through
        if inner.through is not None:
            raise ProgramError(
                f"the index of '{access.buffer}' has two indirections", remedy="one is allowed"
            )
        kind = program.buffer[buffer].dtype if buffer in program.buffer else "no buffer"
        if kind not in ("int32", "int64"):
            raise ProgramError(f"'{buffer}' selects rows, but is {kind}", remedy="int32 or int64")
        return
    if elements is None or any(name not in program.extents for name, _ in index.terms):
        return
    least, greatest = index.bounds(program.extents)
    if least >= 0 and greatest < elements:
        return
    if statement.where:
        least, greatest = _bounds_where(program, statement, index)
    if least < 0 or greatest >= elements:
        raise ProgramError(
            f"indices {least} to {greatest} of '{access.buffer}' exceed its {elements} elements",
            remedy="enlarge the buffer or restrict the axes",
        )


def _bounds_where(program: Program, statement: Statement, index: Index) -> tuple[int, int]:
    """Bound an index over the domain of a statement with `where`, by linear relaxation."""
    from scipy.optimize import linprog

    if any(name not in program.extents for name in statement.axes):
        return 0, 0
    box = [(0, program.extents[name] - 1) for name in statement.axes]
    rows = [[-w.factor(name) for name in statement.axes] for w in statement.where]
    limits = [w.offset for w in statement.where]
    ends = []
    for sign in (1, -1):
        costs = [sign * index.factor(name) for name in statement.axes]
        result = linprog(costs, A_ub=rows, b_ub=limits, bounds=box)
        if not result.success:
            return 0, 0
        ends.append(sign * float(result.fun))
    return index.offset + math.ceil(ends[0] - 1e-6), index.offset + math.floor(ends[1] + 1e-6)


def _check_writers(program: Program) -> None:
    """Each element has one writer, unless a shared axis is sequential."""
    ranges: dict[str, list[tuple[int, tuple[int, int] | None]]] = {}
    for number, statement in enumerate(program.statements):
        sequential = [n for n in statement.axes if program.axis[n].kind == "sequential"]
        free = [n for n in statement.axes if program.axis[n].kind == "free"]
        constant = all(n in program.extents for n, _ in statement.index.terms)
        missing = [n for n in free if not statement.index.factor(n)]
        if missing or (constant and not _injective(statement.index, free, program.extents)):
            raise ProgramError(
                f"iterations of the free axes {missing or free} write the same element",
                where=f"statement {number} (of {statement.target})",
                remedy="make the axis sequential, or a reduce axis",
            )
        reach = statement.index.bounds(program.extents) if constant else None
        for other, previous in ranges.setdefault(statement.target, []):
            disjoint = reach is None or previous is None or (
                reach[0] > previous[1] or previous[0] > reach[1]
            )  # fmt: skip
            shared = program.shared(other, number) or sequential
            if not disjoint and not shared and program.buffer[statement.target].role != "inout":
                raise ProgramError(
                    f"'{statement.target}' is also written by statement {other}",
                    where=f"statement {number} (of {statement.target})",
                    remedy='write another buffer, or declare it "inout"',
                )
        ranges[statement.target].append((number, reach))


def _injective(index: Index, axes: Sequence[str], extents: Mapping[str, int]) -> bool:
    """Whether different iterations have different indices, by a sufficient condition."""
    reach = 0
    for name in sorted(axes, key=lambda name: abs(index.factor(name))):
        if abs(index.factor(name)) <= reach and extents[name] > 1:
            return False
        reach += abs(index.factor(name)) * (extents[name] - 1)
    return True


def with_dtype(program: Program, dtype: str) -> Program:
    """Return the program with all floating-point buffers in another dtype."""
    kinds = ("float32", "float64", "bfloat16")
    buffers = tuple(replace(b, dtype=dtype) if b.dtype in kinds else b for b in program.buffers)
    return Program(buffers, program.axes, program.statements)
