"""C++ of scheduled programs: a walk over the loop tree.

A sum is accumulated in a scalar over the innermost reduce loops, and in a local array over all of
them if the array fits into registers or nearly so; otherwise its target is initialised before the
outermost reduce loop. If the last tile is incomplete, complete tiles have a version with constant
bounds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from slipstream.codegen.bounds import Bound, Bounds, scan
from slipstream.codegen.ops import OPS
from slipstream.codegen.prelude import PRELUDE
from slipstream.codegen.program import Const, Draw, Expr, Index, Load, Statement
from slipstream.codegen.schedule import Loop, ScheduleError, Tree

# A local array of accumulators: 32 registers of 16 floats.
_MAX_ACCUMULATORS = 512
_TYPES = {
    "float32": "float", "float64": "double", "bfloat16": "bf16", "bool": "uint8_t",
    "uint8": "uint8_t", "int32": "int32_t", "int64": "int64_t",
}  # fmt: skip
_HELPERS = """
namespace {
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 down(i64 a, i64 b) { return a / b - (a % b < 0); }
INLINE i64 up(i64 a, i64 b) { return a / b + (a % b > 0); }
INLINE i64 opaque(i64 a) { asm("" : "+r"(a)); return a; }
}  // namespace
"""


def source(trees: Sequence[Tree]) -> str:
    """Return a library with a function ``loops_K(buffers, symbols, threads)`` for each tree.

    ``buffers`` is an array of pointers in the order of the program's buffers, temporaries included;
    ``symbols`` an array of the values of `Program.symbols`.

    Raises:
        ScheduleError: a statement has no code of this form.
    """
    return (
        PRELUDE + _HELPERS + "".join(function(tree, f"loops_{n}") for n, tree in enumerate(trees))
    )


def function(tree: Tree, name: str) -> str:
    """Return the function of one tree, without the prelude."""
    return _Function(tree).text(name)


def _c(name: str) -> str:
    """Return the C++ name of an iterator, axis or symbol."""
    return f"l_{name.replace('.', '_')}" if "." in name else f"s_{name}"


def affine(index: Index) -> str:
    """Return the C++ text of an affine expression of iterators and symbols."""
    parts = [_c(n) if k == 1 else f"{k} * {_c(n)}" for n, k in index.terms]
    if index.offset or not parts:
        parts.append(str(index.offset))
    return " + ".join(parts).replace("+ -", "- ")


def _one(bound: Bound, division: str) -> str:
    if bound.divisor == 1:
        return affine(bound.value)
    if not bound.value.terms:
        ratio = bound.value.offset / bound.divisor
        return str(math.ceil(ratio) if division == "up" else math.floor(ratio))
    return f"{division}({affine(bound.value)}, {bound.divisor})"


def _combined(texts: Sequence[str], function: str) -> str:
    text = texts[0]
    for other in texts[1:]:
        text = f"{function}({text}, {other})"
    return text


def _lower(bounds: Bounds) -> str:
    return _combined([_one(b, "up") for b in bounds.lower], "most")


def _upper(bounds: Bounds) -> str:
    return _combined([_one(b, "down") for b in bounds.upper], "least")


class _Reduction:
    """Accumulators of a statement's sum or maximum.

    Attributes:
        outer: the outermost reduce loop.
        inner: the first of the innermost loops that are all reduce loops; None if there are none.
        free: loops inside `outer` that are not reduce loops, outermost first, and their bounds.
        local: size of the local array; 1 for a scalar, 0 for accumulation in the target.
    """

    def __init__(self, tree: Tree, number: int, bounds: dict[str, Bounds]) -> None:
        program, statement = tree.program, tree.program.statements[number]
        path = tree.path(number)
        kinds = [program.axis[loop.axes[number]].kind == "reduce" for loop in path]
        first = kinds.index(True)
        last = len(path)
        while last and kinds[last - 1]:
            last -= 1
        self.outer = path[first]
        self.inner = path[last] if last < len(path) else None
        self.free = [loop for loop, reduced in zip(path, kinds, strict=True)
                     if not reduced and path.index(loop) > first]  # fmt: skip
        reduced = [loop.name for loop, r in zip(path, kinds, strict=True) if r]
        order = [loop.name for loop in path if loop.name not in reduced]
        self.bounds, _, _ = scan(tree.domains[number].constraints, [*order, *reduced],
                              dict.fromkeys(program.symbols, (1, math.inf)))  # fmt: skip
        extents = [1 if loop.tile else self.bounds[loop.name].extent for loop in self.free]
        self.extents = [extent or 0 for extent in extents]
        size = math.prod(self.extents)
        tiled = any(loop.tile for loop in self.free)
        self.local = size if size <= _MAX_ACCUMULATORS and not tiled else 0
        self.start = "0" if statement.reduce == "sum" else "-INFINITY"

    def place(self) -> str:
        """Return the text of the current element of the local array."""
        text = "0"
        for loop, extent in zip(self.free, self.extents, strict=True):
            low = _lower(Bounds(self.bounds[loop.name].lower[:1], ()))
            text = f"({text}) * {extent} + ({_c(loop.name)} - ({low}))"
        return text


class _Function:
    def __init__(self, tree: Tree) -> None:
        self._tree, self._program = tree, tree.program
        self._lines: list[str] = []
        self._indent = 1
        symbols = dict.fromkeys(self._program.symbols, (1.0, math.inf))
        self._bounds: list[dict[str, Bounds]] = []
        self._reductions: dict[int, _Reduction] = {}
        for number, statement in enumerate(self._program.statements):
            order = [loop.name for loop in tree.path(number)]
            bounds, _, _ = scan(tree.domains[number].constraints, order, symbols)
            self._bounds.append(bounds)
            if statement.reduce is not None:
                self._reductions[number] = _Reduction(tree, number, bounds)

    def text(self, name: str) -> str:
        program = self._program
        self._lines = [
            f'\nextern "C" void {name}(void* const* buffers, const i64* symbols, int threads) {{',
            f"  using real = {program.real};", "  (void)symbols; (void)threads;",
        ]  # fmt: skip
        for number, buffer in enumerate(program.buffers):
            kind = ("const " if buffer.role == "in" else "") + _TYPES[buffer.dtype]
            pointer = f"static_cast<{kind}*>(buffers[{number}])"
            self._put(f"{kind}* __restrict b_{buffer.name} = {pointer};")
        for number, symbol in enumerate(program.symbols):
            self._put(f"const i64 {_c(symbol)} = symbols[{number}];")
        self._walk(self._tree.body, {}, frozenset(), frozenset())
        self._lines.append("}\n")
        return "\n".join(self._lines)

    def _put(self, line: str) -> None:
        self._lines.append("  " * self._indent + line)

    def _walk(
        self, body: Sequence[Loop | int], guards: dict[int, list[str]], full: frozenset[str],
        seen: frozenset[str],
    ) -> None:  # fmt: skip
        """Write nodes.

        Args:
            guards: per statement, conditions on shared loops that it does not cover.
            full: loops whose tile is known to be complete.
            seen: loops around.
        """
        for node in body:
            numbers = [node] if isinstance(node, int) else list(node.statements())
            conditions = guards.get(numbers[0], []) if len(numbers) == 1 else []
            if conditions:
                self._open(f"if ({' && '.join(conditions)}) {{")
                guards = {n: c for n, c in guards.items() if n != numbers[0]}
            if isinstance(node, int):
                self._statement(node)
            else:
                self._versions(node, guards, full, seen)
            if conditions:
                self._close()

    def _open(self, line: str) -> None:
        self._put(line)
        self._indent += 1

    def _close(self, line: str = "}") -> None:
        self._indent -= 1
        self._put(line)

    def _versions(
        self, loop: Loop, guards: dict[int, list[str]], full: frozenset[str], seen: frozenset[str]
    ) -> None:
        """Write a loop; twice if the tiles that it is in may be incomplete."""
        conditions, whole = [], set()
        if not loop.tile and not full and seen:
            for inner in _loops(loop):
                for number in inner.statements():
                    bounds = self._bounds[number][inner.name]
                    if f"{inner.name}t" in seen and not bounds.constant:
                        tile, others = _tile_bounds(bounds, inner.name)
                        if tile is not None and _known(others, seen):
                            whole.add(inner.name)
                            conditions += _conditions(tile, others)
        conditions = list(dict.fromkeys(conditions))
        if not conditions:
            self._loop(loop, guards, full, seen)
            return
        self._open(f"if ({' && '.join(conditions)}) {{")
        self._loop(loop, guards, frozenset(whole), seen)
        self._close("} else {")
        self._indent += 1
        self._loop(loop, guards, frozenset({""}), seen)
        self._close()

    def _own(self, number: int, loop: Loop, full: frozenset[str]) -> Bounds:
        bounds = self._bounds[number][loop.name]
        if loop.name in full:
            tile, _ = _tile_bounds(bounds, loop.name)
            return tile or bounds
        return bounds

    def _loop(
        self, loop: Loop, guards: dict[int, list[str]], full: frozenset[str], seen: frozenset[str]
    ) -> None:
        numbers = list(loop.statements())
        own = {number: self._own(number, loop, full) for number in numbers}
        lows = list(dict.fromkeys(_lower(bounds) for bounds in own.values()))
        highs = list(dict.fromkeys(_upper(bounds) for bounds in own.values()))
        name = _c(loop.name)
        inner = guards
        if len(lows) > 1 or len(highs) > 1:
            inner = {n: list(c) for n, c in guards.items()}
            for number, bounds in own.items():
                inner.setdefault(number, []).append(
                    f"{name} >= {_lower(bounds)} && {name} <= {_upper(bounds)}"
                )
        opened = [n for n in numbers if n in self._reductions]
        for number in opened:
            reduction = self._reductions[number]
            if reduction.outer is loop:
                self._begin(number, reduction, full, guards.get(number))
            if reduction.inner is loop and reduction.inner is not reduction.outer:
                self._put(f"real p{number} = {reduction.start};")
        self._pragmas(loop, numbers)
        self._open(f"for (i64 {name} = {_combined(lows, 'least')}; "
                   f"{name} <= {_combined(highs, 'most')}; ++{name}) {{")  # fmt: skip
        self._walk(loop.body, inner, full, seen | {loop.name})
        self._close()
        for number in opened:
            reduction = self._reductions[number]
            if reduction.inner is loop and reduction.inner is not reduction.outer:
                with self._guarded(guards.get(number)):
                    self._accumulate(number, f"p{number}", inner=False)
            if reduction.outer is loop and reduction.local:
                with self._guarded(guards.get(number)):
                    self._end(number, reduction, full)

    @contextlib.contextmanager
    def _guarded(self, conditions: Sequence[str] | None) -> Iterator[None]:
        if not conditions:
            yield
            return
        self._open(f"if ({' && '.join(conditions)}) {{")
        yield
        self._close()

    def _pragmas(self, loop: Loop, numbers: Sequence[int]) -> None:
        if loop.parallel:
            self._lines.append("#ifdef _OPENMP")
            self._lines.append("#pragma omp parallel for num_threads(threads) if (threads > 1)")
            self._lines.append("#endif")
        if loop.vector:
            clauses = ""
            for number in numbers:
                axis = self._program.axis[loop.axes[number]]
                if axis.kind == "reduce":
                    sign = "+" if self._program.statements[number].reduce == "sum" else "max"
                    clauses += f" reduction({sign}:{self._scalar(number)})"
            self._lines.append(f"#pragma omp simd{clauses}")
        elif loop.unroll > 1:
            self._lines.append(f"#pragma GCC unroll {loop.unroll}")

    def _scalar(self, number: int) -> str:
        reduction = self._reductions[number]
        return f"a{number}" if reduction.inner is reduction.outer else f"p{number}"

    def _nest(self, number: int, reduction: _Reduction, full: frozenset[str], code: str) -> None:
        """Write code for every element that a sum inside `reduction.outer` accumulates."""
        for loop in reduction.free:
            bounds, name = reduction.bounds[loop.name], _c(loop.name)
            if loop.name in full:
                bounds = _tile_bounds(bounds, loop.name)[0] or bounds
            self._open(f"for (i64 {name} = {_lower(bounds)}; {name} <= {_upper(bounds)}; "
                       f"++{name}) {{")  # fmt: skip
        self._put(code)
        for _ in reduction.free:
            self._close()

    def _begin(
        self, number: int, reduction: _Reduction, full: frozenset[str],
        conditions: Sequence[str] | None,
    ) -> None:  # fmt: skip
        statement = self._program.statements[number]
        if not reduction.local:
            if self._program.buffer[statement.target].dtype == "bfloat16":
                raise ScheduleError(
                    "a sum in bfloat16 cannot be accumulated in memory",
                    where=f"statement {number} (of {statement.target})",
                    remedy="make the reduce loops the innermost ones",
                )
            with self._guarded(conditions):
                self._nest(number, reduction, full, self._store(number, reduction.start))
        elif reduction.free:
            self._put(f"real a{number}[{reduction.local}];")
            self._put(f"for (int e = 0; e < {reduction.local}; ++e) a{number}[e] = "
                      f"{reduction.start};")  # fmt: skip
        else:
            self._put(f"real a{number} = {reduction.start};")

    def _end(self, number: int, reduction: _Reduction, full: frozenset[str]) -> None:
        value = f"a{number}[{reduction.place()}]" if reduction.free else f"a{number}"
        self._nest(number, reduction, full, self._store(number, value))

    def _accumulate(self, number: int, value: str, *, inner: bool) -> None:
        """Add a value to the sum, or take the maximum; `inner` for the sum of innermost loops."""
        statement, reduction = self._program.statements[number], self._reductions[number]
        if inner and reduction.inner is not None:
            place = self._scalar(number)
        elif reduction.local:
            place = f"a{number}[{reduction.place()}]" if reduction.free else f"a{number}"
        else:
            place = f"b_{statement.target}[{self._element(number, statement.index)}]"
        if statement.reduce == "sum":
            self._put(f"{place} += {value};")
        else:
            self._put(f"{place} = {value} > {place} ? {value} : {place};")

    def _statement(self, number: int) -> None:
        statement = self._program.statements[number]
        value = self._value(number, statement.value, statement)
        if statement.reduce is not None:
            self._accumulate(number, value, inner=True)
        else:
            self._put(self._store(number, value))

    def _store(self, number: int, value: str) -> str:
        statement = self._program.statements[number]
        element = self._element(number, statement.index)
        kind = self._program.buffer[statement.target].dtype
        if kind in ("int32", "int64"):
            return f"b_{statement.target}[{element}] = static_cast<{_TYPES[kind]}>({value});"
        return f"put(b_{statement.target}, {element}, static_cast<real>({value}));"

    def _element(self, number: int, index: Index) -> str:
        text = affine(self._mapped(number, index))
        if index.through is not None:
            # Which buffer is indexed does not matter here: see `_load`.
            raise AssertionError("only loads have indirect indices")
        return text

    def _mapped(self, number: int, index: Index) -> Index:
        """Return an index in terms of loop iterators."""
        index = Index(index.terms, index.offset)
        for axis, value in self._tree.domains[number].iterators.items():
            index = index.substituted(axis, value)
        return index

    def _load(self, number: int, load: Load) -> str:
        buffer = self._program.buffer[load.buffer]
        index = self._mapped(number, load.index)
        element = affine(index)
        if number in self._reductions and any(k < 0 for n, k in index.terms if "." in n):
            # gcc 12.2 vectorises some sums over decreasing addresses wrongly.
            element = f"opaque({element})"
        if load.index.through is not None:
            table, inner = load.index.through
            row = f"static_cast<i64>(b_{table}[{affine(self._mapped(number, inner))}])"
            element = f"{row} * {buffer.strides[0]} + {element}"
        if buffer.dtype in ("int32", "int64"):
            return f"static_cast<real>(b_{load.buffer}[{element}])"
        return f"static_cast<real>(get(b_{load.buffer}, {element}))"

    def _value(self, number: int, value: Expr, statement: Statement) -> str:
        """Return the text of a value, after writing the values it is computed from."""
        count = 0
        names: dict[Expr, str] = {}

        def visit(expr: Expr) -> str:
            nonlocal count
            if isinstance(expr, Const):
                return _number(expr.value)
            if isinstance(expr, Draw):
                raise ScheduleError(
                    "random numbers are drawn by the emitter of rows only",
                    where=f"statement {number} (of {statement.target})",
                    remedy="schedule it with Rows()",
                )
            if expr not in names:
                text = (
                    self._load(number, expr) if isinstance(expr, Load)
                    else OPS[expr.op].c.format(*map(visit, expr.args))
                )  # fmt: skip
                self._put(f"const real v{number}_{count} = {text};")
                names[expr] = f"v{number}_{count}"
                count += 1
            return names[expr]

        return visit(value)


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"real({value!r})"
    return "real(NAN)" if value != value else f"real({'' if value > 0 else '-'}INFINITY)"


def _loops(loop: Loop) -> list[Loop]:
    return [loop, *(inner for n in loop.body if isinstance(n, Loop) for inner in _loops(n))]


def _tile_bounds(bounds: Bounds, name: str) -> tuple[Bounds | None, Bounds]:
    """Split an iterator's bounds into those of its tile and the others."""

    def of_tile(bound: Bound) -> bool:
        return bound.divisor == 1 and [n for n, _ in bound.value.terms] == [f"{name}t"]

    tile = Bounds(
        tuple(b for b in bounds.lower if of_tile(b)), tuple(b for b in bounds.upper if of_tile(b))
    )
    others = Bounds(
        tuple(b for b in bounds.lower if not of_tile(b)),
        tuple(b for b in bounds.upper if not of_tile(b)),
    )
    return (tile if tile.constant else None), others


def _known(bounds: Bounds, seen: frozenset[str]) -> bool:
    """Whether bounds depend on loops around and symbols only."""
    return all(
        n in seen or "." not in n for b in (*bounds.lower, *bounds.upper) for n, _ in b.value.terms
    )


def _conditions(tile: Bounds, others: Bounds) -> list[str]:
    """Return conditions under which a tile is complete."""
    return [
        *(f"{_one(b, 'up')} <= {_lower(tile)}" for b in others.lower),
        *(f"{_one(b, 'down')} >= {_upper(tile)}" for b in others.upper),
    ]


__all__ = ["affine", "function", "source"]
