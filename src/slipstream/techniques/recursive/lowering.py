"""Lower the traced operators of one kind of node to equations over a node's row.

A value is a list of pieces, each an expression over the position ``j`` and the node ``n`` of a
group. Views and concatenations only cut and join pieces, and elementwise operators are combined
into one expression, so that only products and states remain to be stored.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch.fx import Node

from slipstream.codegen.program import (
    Apply,
    Const,
    Expr,
    Index,
    Load,
    apply,
    loads,
)
from slipstream.techniques.recursive.traced import RecursiveModelError, Shape

_MAX_PARTS = 256
"""Maximum number of rows that an operator across them may be unrolled to."""

Piece = tuple[Expr, int]


@dataclass(frozen=True)
class Constant:
    """A tensor that depends on parameters alone.

    Attributes:
        key: equal for equal computations on the same parameters.
        node: of `Shape.module`.
    """

    key: str
    shape: tuple[int, ...]
    shape_of: Shape = field(compare=False, repr=False)
    node: Node = field(compare=False, repr=False)


@dataclass(frozen=True)
class Product:
    """``name[n, o] = sum over k of input[n, k] weight[k, o]``; buffer `name` has `columns` per row.

    Attributes:
        weight: number of a constant.
        columns_first: whether that constant is [columns, K] instead of [K, columns].
        inputs: loads of consecutive ranges of k, with the start of the range and its length.
    """

    name: str
    weight: int
    columns_first: bool
    columns: int
    inputs: tuple[tuple[Load, int, int], ...]


@dataclass(frozen=True)
class MatrixProduct:
    """``name[n, i, j] = sum over k of left[i, k] right[k, j]``, for matrices of one node.

    Attributes:
        left: load of element 0, and the strides of i and k; the constant or node's matrix.
        right: loads of consecutive rows, with their number.
    """

    name: str
    rows: int
    columns: int
    depth: int
    left: tuple[Load, int, int]
    right: tuple[tuple[Load, int], ...]


@dataclass(frozen=True)
class Temporary:
    """``name[n, j]`` for 0 <= j < length, stored because products need whole rows."""

    name: str
    value: Expr
    length: int
    offset: int
    width: int


@dataclass(frozen=True)
class Target:
    """Place of a range of a row: a state of the node, its gradient, or a temporary.

    Attributes:
        buffer: ``s0`` for state 0, ``g0`` for its gradient, ``t0`` for temporary 0.
        offset: first position of the range.
        width: elements of a row.
        child: the slot of the child to whose row it is added; None for the node's own row.
    """

    buffer: str
    offset: int
    width: int
    child: int | None = None


AnyProduct = Product | MatrixProduct


@dataclass
class Lowered:
    """Equations of one kind of node.

    Attributes:
        arity: number of children.
        states: by state, pieces of its flat row.
        products, temporaries: what must be stored, in an order in which it can be computed.
        inputs: nodes of the trace that depend on the node's words alone, with the first column of
            each in the kind's table.
        table_width: columns of the table.
        stores: what else is stored.
        saved: width of buffers that have a row for every node, by name.
    """

    shape: Shape
    arity: int
    states: list[list[Piece]] = field(default_factory=list)
    products: list[AnyProduct] = field(default_factory=list)
    temporaries: list[Temporary] = field(default_factory=list)
    inputs: list[tuple[Node, int]] = field(default_factory=list)
    table_width: int = 0
    stores: list[tuple[Target, Expr, int]] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)

    @property
    def tabled(self) -> bool:
        """Whether the states depend on the node's words alone."""
        return self.arity == 0


@dataclass
class Constants:
    """Constants of all kinds, without duplicates."""

    items: list[Constant] = field(default_factory=list)

    def number(self, constant: Constant) -> int:
        if constant in self.items:
            return self.items.index(constant)
        self.items.append(constant)
        return len(self.items) - 1


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the node: pieces of its elements, row by row.

    Attributes:
        turned: whether the pieces are those of the transposed matrix.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    turned: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


_J = (("j", 1),)
# Composite operators, such as reshape or linear, are decomposed before they are traced.
_UNARY = {
    "sigmoid", "tanh", "relu", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "erf",
    "silu",
}  # fmt: skip
_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "max", "minimum": "min",
    "gt": "gt", "ge": "ge", "lt": "lt", "le": "le", "eq": "eq", "ne": "ne", "where": "where",
}  # fmt: skip

_RANDOM = {"empty_like", "bernoulli", "rand_like", "native_dropout"}


def table(offset: int) -> Load:
    """Return an element of the kind's table, in the row of the node's word."""
    return Load("table", Index(_J, offset, ("word", Index((("n", 1),)))))


def row(name: str, width: int, offset: int = 0) -> Load:
    """Return an element of a temporary's row."""
    return Load(name, Index((("j", 1), ("n", width)), offset))


def shifted(value: Expr, by: int, *, scalar: bool = False) -> Expr:
    """Return a value at position j + `by`; at `by` alone for a `scalar`."""
    if isinstance(value, Load) and value.index.factor("j"):
        index = value.index
        terms = tuple(term for term in index.terms if not (scalar and term[0] == "j"))
        return Load(value.buffer, Index(terms, index.offset + by, index.through))
    if isinstance(value, Apply):
        return Apply(value.op, tuple(shifted(arg, by, scalar=scalar) for arg in value.args))
    return value


def cut(pieces: Iterable[Piece], first: int, end: int) -> list[Piece]:
    """Return the pieces of positions `first` to `end`."""
    found, at = [], 0
    for value, length in pieces:
        low, high = max(first - at, 0), min(end - at, length)
        if low < high:
            found.append((shifted(value, low), high - low))
        at += length
    return found


def aligned(*values: Sequence[Piece]) -> Iterator[tuple[tuple[Expr, ...], int]]:
    """Yield expressions of several values for common ranges."""
    ends = set()
    for pieces in values:
        at = 0
        for _, length in pieces:
            at += length
            ends.add(at)
    first = 0
    for end in sorted(ends):
        yield tuple(cut(pieces, first, end)[0][0] for pieces in values), end - first
        first = end


def lower(shape: Shape, states: Sequence[tuple[int, ...]], constants: Constants) -> Lowered:
    """Return the equations of a traced shape.

    Raises:
        RecursiveModelError: an operator has no equations.
    """
    return _Lowering(shape, states, constants).run()


class _Lowering:
    def __init__(
        self, shape: Shape, states: Sequence[tuple[int, ...]], constants: Constants
    ) -> None:
        self._shape, self._states, self._constants = shape, states, constants
        self._values: dict[Node, Any] = {}
        self._of_word: set[Node] = set()
        self._keys: dict[Node, str] = {}
        self._out = Lowered(shape, len(shape.children))

    def run(self) -> Lowered:
        graph = self._shape.module.graph
        per, number = len(self._states), 0
        inside = self._out.arity * per
        for node in graph.nodes:
            if node.op == "placeholder":
                if number < inside:
                    of_state = number % per
                    dims = self._states[of_state]
                    child = (f"child{number // per}", Index((("n", 1),)))
                    piece = (Load(f"s{of_state}", Index(_J, 0, child)), math.prod(dims))
                    self._values[node] = Value(tuple(dims), (piece,))
                else:
                    self._of_word.add(node)
                number += 1
            elif node.op == "get_attr":
                if "word" in node.meta:
                    self._of_word.add(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                for result in node.args[0]:
                    self._out.states.append(list(self._value(result).pieces))
        return self._out

    def _call(self, node: Node) -> None:
        sources = node.all_input_nodes
        if any(source in self._values for source in sources):
            name = _name(node)
            try:
                self._check_dtype(node, name)
                self._values[node] = self._operator(node, name)
            except (KeyError, NotImplementedError) as error:
                reason = f": {error}" if isinstance(error, NotImplementedError) else ""
                if name in _RANDOM:
                    reason = ": dropout in training draws random numbers"
                raise RecursiveModelError(
                    f"a recursive model cannot use the operator {name} on values of a node{reason}",
                    where=_line(node),
                    remedy="use elementwise operators, products with parameters, cat, chunk and "
                    "sums over children",
                ) from error
        elif any(source in self._of_word for source in sources) or "args" in node.meta:
            self._of_word.add(node)

    def _check_dtype(self, node: Node, name: str) -> None:
        """Refuse what is not computed in the type of the states; comparisons are 1 or 0."""
        results = node.meta["val"]
        for result in results if isinstance(results, (list, tuple)) else [results]:
            if result.dtype == torch.bool and name not in ("add", "_to_copy"):
                continue
            states: Any = next(iter(self._shape.module.graph.nodes)).meta["val"]
            if result.dtype != states.dtype and name not in ("max", "min", "getitem"):
                raise NotImplementedError(f"its result is {result.dtype}")
        if "args" in node.meta:
            raise NotImplementedError("an integer of the node is its argument")

    def _value(self, argument: Any) -> Value:
        """Return an argument as a value; a word's or parameters' tensor becomes one."""
        if isinstance(argument, (int, float, bool)):
            return Value((), ((Const(float(argument)), 1),))
        if argument in self._values:
            value_of_node: Value | None = self._values[argument]
            if value_of_node is None:
                raise NotImplementedError("it uses the positions of maxima or minima")
            return value_of_node
        dims = _dims(argument)
        value: Expr
        if argument in self._of_word:
            value = self._word_input(argument, math.prod(dims))
        elif _name(argument) in ("zeros", "zeros_like", "new_zeros"):
            value = Const(0.0, absent=True)
        elif _name(argument) == "scalar_tensor":
            value = Const(float(argument.args[0]))
        else:
            value = Load(f"c{self._constant(argument)}", Index(_J))
        return Value(dims, ((value, math.prod(dims)),))

    def _word_input(self, node: Node, size: int) -> Load:
        for known, column in self._out.inputs:
            if known is node:
                return table(column)
        self._out.inputs.append((node, self._out.table_width))
        self._out.table_width += size
        return table(self._out.table_width - size)

    def _constant(self, node: Node) -> int:
        return self._constants.number(Constant(self._key(node), _dims(node), self._shape, node))

    def _key(self, argument: Any) -> str:
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(self._key, argument))}]"
        if not isinstance(argument, Node):
            return repr(argument)
        if argument.op == "get_attr":
            return f"{id(getattr(self._shape.module, str(argument.target)))}"
        if argument not in self._keys:
            key = f"{argument.target}({self._key(argument.args)}, {argument.kwargs})"
            self._keys[argument] = key
        return self._keys[argument]

    def _operator(self, node: Node, name: str) -> Any:
        if node.target is operator.getitem:
            source, number = cast("tuple[Node, int]", node.args)
            return self._values[source][number]
        for names, method in self._METHODS.items():
            if name in names:
                return method(self, node, name)
        if name in _UNARY:
            return self._mapped(node, lambda x: apply(name, x), node.args[0])
        return self._elementwise(node, name)

    def _mapped(self, node: Node, function: Callable[..., Expr], *args: Any) -> Value:
        dims = _dims(node)
        values = [_expanded(self._value(arg), dims) for arg in args]
        return Value(dims, tuple((function(*e), n) for e, n in aligned(*values)))

    def _elementwise(self, node: Node, name: str) -> Value:
        args: list[Any] = list(node.args)
        if name in ("add", "sub", "rsub") and node.kwargs.get("alpha", 1) != 1:
            alpha = float(cast("float", node.kwargs["alpha"]))
            if name == "rsub":
                raise NotImplementedError("alpha")
            return self._mapped(node, lambda a, b: apply(name, a, apply("mul", b, alpha)), *args)
        if name == "rsub":
            return self._mapped(node, lambda a, b: apply("sub", b, a), *args)
        if name == "pow" and args[1] == 2:
            return self._mapped(node, lambda a: apply("square", a), args[0])
        if name in ("clamp", "clamp_min", "clamp_max", "hardtanh"):
            if name == "clamp_max":
                args.insert(1, None)
            # The gradient at a bound is as torch's, unlike that of a maximum.
            signs = ("le", "ge") if name == "hardtanh" else ("lt", "gt")
            pairs = zip(signs, args[1:], strict=False)
            bounds = {sign: bound for sign, bound in pairs if bound is not None}

            def clamped(x: Expr, *limits: Expr) -> Expr:
                for sign, limit in zip(bounds, limits, strict=True):
                    x = apply("where", apply(sign, x, limit), limit, x)
                return x

            return self._mapped(node, clamped, args[0], *bounds.values())
        if name == "leaky_relu":
            slope = float(args[1]) if len(args) > 1 else 0.01
            return self._mapped(
                node, lambda x: apply("where", apply("gt", x, 0.0), x, apply("mul", x, slope)),
                args[0],
            )  # fmt: skip
        op = _BINARY[name]
        if node.kwargs.get("rounding_mode"):
            raise NotImplementedError("rounding_mode")
        return self._mapped(node, lambda *e: apply(op, *e), *args)

    def _expand(self, node: Node, name: str) -> Value:
        return Value(_dims(node), tuple(_expanded(self._value(node.args[0]), _dims(node))))

    def _same(self, node: Node, name: str) -> Value:
        value = self._value(node.args[0])
        if value.turned:
            raise NotImplementedError("a view of a transposed matrix")
        return Value(_dims(node), value.pieces)

    def _turned(self, node: Node, name: str) -> Value:
        value, dims = self._value(node.args[0]), _dims(node)
        before = [d for d in value.shape if d > 1]
        after = [d for d in dims if d > 1]
        if len(before) < 2 or (before == after and len(set(before)) == len(before)):
            return Value(dims, value.pieces, value.turned)
        if len(before) > 2:
            raise NotImplementedError("a transposition of more than two dimensions")
        return Value(dims, value.pieces, not value.turned)

    def _joined(self, node: Node, name: str) -> Value:
        tensors: Any = node.args[0]
        dims = _dims(node)
        dim = (int(cast("int", node.args[1])) if len(node.args) > 1 else 0) % len(dims)
        outer = math.prod(dims[:dim])
        _check_parts(outer)
        values = [self._value(tensor) for tensor in tensors]
        _check_plain(*values)
        pieces: list[Piece] = []
        for number in range(outer):
            for value in values:
                inner = value.size // outer
                pieces += cut(value.pieces, number * inner, (number + 1) * inner)
        return Value(dims, tuple(pieces))

    def _part(self, node: Node, name: str) -> Any:
        value = self._value(node.args[0])
        _check_plain(value)
        arguments: Any = list(node.args[1:])
        sized = name in ("split", "split_with_sizes")
        sizes = arguments.pop(0) if sized else None
        dim = (int(arguments.pop(0)) if arguments else 0) % len(value.shape)
        extent = value.shape[dim]
        if name in ("slice", "select"):
            if name == "select":
                low = int(arguments[0]) % extent
                high = low + 1
            else:
                first, end, step = (arguments + [None] * 3)[:3]
                if step not in (None, 1):
                    raise NotImplementedError("a slice with a step")
                low, high, _ = slice(first, end).indices(extent)
            return Value(_dims(node), tuple(_range(value, dim, low, high)))
        if not isinstance(sizes, (list, tuple)):
            size = sizes or 1
            sizes = [min(size, extent - at) for at in range(0, extent, size)]
        parts, at = [], 0
        for size in sizes:
            dims = list(value.shape)
            dims[dim : dim + 1] = [size] if sized else []
            parts.append(Value(tuple(dims), tuple(_range(value, dim, at, at + size))))
            at += size
        return parts

    def _reduced(self, node: Node, name: str) -> Any:
        value = self._value(node.args[0])
        _check_plain(value)
        dims_arg: Any = node.args[1] if len(node.args) > 1 else list(range(len(value.shape)))
        chosen = [dims_arg] if isinstance(dims_arg, int) else list(dims_arg)
        real = [d % len(value.shape) for d in chosen if value.shape[d] > 1]
        if len(real) > 1:
            raise NotImplementedError("a reduction over several dimensions")
        pieces: Sequence[Piece] = value.pieces
        if real:
            dim = real[0]
            extent = value.shape[dim]
            _check_parts(extent)
            parts = [list(_range(value, dim, at, at + 1)) for at in range(extent)]
            op = {"sum": "add", "mean": "add", "amax": "max", "amin": "min"}.get(name, name)

            def combined(*terms: Expr) -> Expr:
                total = terms[0]
                for term in terms[1:]:
                    total = apply(op, total, term)
                return apply("mul", total, 1.0 / extent) if name == "mean" else total

            pieces = [(combined(*e), n) for e, n in aligned(*parts)]
        if name in ("max", "min") and len(node.args) > 1:
            return [Value(tuple(node.meta["val"][0].shape), tuple(pieces)), None]
        return Value(_dims(node), tuple(pieces))

    def _product(self, node: Node, name: str) -> Value:
        args: list[Any] = list(node.args)
        bias: Any = args.pop(0) if name in ("addmm", "addmv") else None
        if any(node.kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
            raise NotImplementedError("factors alpha or beta")
        dims = _dims(node)
        left, right = cast("tuple[Node, Node]", tuple(args))
        left_dims, right_dims = _matrix(left), _matrix(right)
        if len(_dims(left)) == 1:
            left_dims = left_dims[::-1]
        if right not in self._values and right not in self._of_word:
            result = self._rows(self._value(left), left_dims, right, False, right_dims[1])
        elif left not in self._values and left not in self._of_word and right_dims[1] == 1:
            result = self._rows(self._value(right), right_dims[::-1], left, True, left_dims[0])
        else:
            result = self._matrices(left, right, left_dims, right_dims)
        if bias is not None:
            added = _expanded(self._value(bias), dims)
            result = [(apply("add", *e), n) for e, n in aligned(result, added)]
        return Value(dims, tuple(result))

    _METHODS: ClassVar[dict[tuple[str, ...], Callable[[_Lowering, Node, str], Any]]] = {
        (
            "view", "_unsafe_view", "unsqueeze", "squeeze", "squeeze_", "alias", "detach", "clone",
            "lift_fresh_copy", "_to_copy",
        ): _same,
        ("t", "transpose", "permute"): _turned,
        ("cat", "stack"): _joined,
        ("split", "split_with_sizes", "unbind", "slice", "select"): _part,
        ("sum", "mean", "amax", "amin", "max", "min"): _reduced,
        ("expand",): _expand,
        ("mm", "addmm", "mv", "addmv", "bmm", "dot"): _product,
    }  # fmt: skip

    def _rows(
        self, value: Value, dims: tuple[int, int], weight: Node, columns_first: bool, columns: int
    ) -> list[Piece]:
        """Return the products of the rows of a node's value with a constant."""
        if value.turned:
            raise NotImplementedError("a product of a transposed matrix with a parameter")
        rows, depth = dims
        _check_parts(rows)
        number = self._constant(weight)
        pieces: list[Piece] = []
        for at in range(rows):
            inputs = self._inputs(cut(value.pieces, at * depth, (at + 1) * depth))
            if not inputs:
                pieces.append((Const(0.0, absent=True), columns))
                continue
            for other in self._out.products:
                product = Product(other.name, number, columns_first, columns, tuple(inputs))
                if product == other:
                    break
            else:
                name = f"p{len(self._out.products)}"
                product = Product(name, number, columns_first, columns, tuple(inputs))
                self._out.products.append(product)
            pieces.append((row(product.name, columns), columns))
        return pieces

    def _inputs(self, pieces: list[Piece]) -> list[tuple[Load, int, int]]:
        """Return loads of a product's input; what is not stored becomes a temporary."""
        inputs: list[tuple[Load, int, int]] = []
        at = 0
        for value, length in pieces:
            if not (isinstance(value, Const) and value.absent):
                load = value if self._is_row(value) else self._stored(value, length)
                assert isinstance(load, Load)
                previous = inputs[-1] if inputs else None
                # Neighbours in memory are one range.
                if (
                    previous
                    and previous[1] + previous[2] == at
                    and load == shifted(previous[0], previous[2])
                ):
                    inputs[-1] = (previous[0], previous[1], previous[2] + length)
                else:
                    inputs.append((load, at, length))
            at += length
        return inputs

    def _is_row(self, value: Expr) -> bool:
        """Whether a value is a stored row: of a child, a word or the node, but not only a sum."""
        if not isinstance(value, Load) or value.index.factor("j") != 1:
            return False
        if any(p.name == value.buffer and isinstance(p, Product) for p in self._out.products):
            return False
        return value.index.through is not None or value.index.factor("n") > 0

    def _stored(self, value: Expr, length: int) -> Load:
        for known in self._out.temporaries:
            if (known.value, known.length) == (value, length):
                return row(known.name, known.width, known.offset)
        name = f"t{len(self._out.temporaries)}"
        self._out.temporaries.append(Temporary(name, value, length, 0, length))
        return row(name, length)

    def _whole(self, value: Value) -> list[tuple[Load, int, int]]:
        inputs = self._inputs(list(value.pieces))
        if sum(length for _, _, length in inputs) != value.size:
            raise NotImplementedError("a product with an absent matrix")
        return inputs

    def _matrices(
        self, left: Node, right: Node, left_dims: tuple[int, int], right_dims: tuple[int, int]
    ) -> list[Piece]:
        first, second = self._value(left), self._value(right)
        rows, depth = left_dims
        columns = right_dims[1]
        if second.turned:
            raise NotImplementedError("a product with a transposed matrix of a node on the right")
        whole = self._whole(first)
        if len(whole) > 1:
            whole = [(self._copied(first), 0, first.size)]
        strides = (1, rows) if first.turned else (depth, 1)
        product = MatrixProduct(
            f"p{len(self._out.products)}", rows, columns, depth, (whole[0][0], *strides),
            tuple((load, length // columns) for load, _, length in self._whole(second)),
        )  # fmt: skip
        self._out.products.append(product)
        return [(row(product.name, rows * columns), rows * columns)]

    def _copied(self, value: Value) -> Load:
        name = f"t{len(self._out.temporaries)}"
        at = 0
        for piece, length in value.pieces:
            self._out.temporaries.append(Temporary(name, piece, length, at, value.size))
            at += length
        return row(name, value.size)


def _name(node: Node) -> str:
    if node.op != "call_function":
        return node.op
    return getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))


def _line(node: Node) -> str | None:
    trace = node.meta.get("stack_trace") or node.stack_trace
    lines = [line for line in (trace or "").splitlines() if line.strip().startswith("File")]
    return lines[-1].strip() if lines else None


def _dims(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _matrix(node: Any) -> tuple[int, int]:
    """Return the last two dimensions; a vector is a column."""
    dims = _dims(node)
    if math.prod(dims[:-2]) != 1:
        raise NotImplementedError("a batch of matrices")
    return (dims[0], 1) if len(dims) == 1 else (dims[-2], dims[-1])


def _check_parts(count: int) -> None:
    if count > _MAX_PARTS:
        raise NotImplementedError(f"it would be unrolled to {count} parts")


def _check_plain(*values: Value) -> None:
    if any(value.turned for value in values):
        raise NotImplementedError("a transposed matrix")


def _range(value: Value, dim: int, first: int, end: int) -> Iterator[Piece]:
    """Yield the pieces of a range of one dimension."""
    outer = math.prod(value.shape[:dim])
    inner = math.prod(value.shape[dim + 1 :])
    _check_parts(outer)
    extent = value.shape[dim]
    for number in range(outer):
        at = number * extent * inner
        yield from cut(value.pieces, at + first * inner, at + end * inner)


def _expanded(value: Value, dims: tuple[int, ...]) -> list[Piece]:
    """Return the pieces of a value that is broadcast to `dims`."""
    _check_plain(value)
    size = math.prod(dims)
    if value.size == size:
        return list(value.pieces)
    if value.size == 1:
        if any(load.buffer[0] == "p" for load in loads(value.pieces[0][0])):
            raise NotImplementedError("a broadcast of a computed number")
        return [(shifted(value.pieces[0][0], 0, scalar=True), size)]
    shape = (1,) * (len(dims) - len(value.shape)) + value.shape
    if len(dims) == 1:
        raise NotImplementedError("this broadcast")
    _check_parts(dims[0])
    inner = math.prod(shape[1:])
    pieces: list[Piece] = []
    for number in range(dims[0]):
        at = 0 if shape[0] == 1 else number * inner
        part = Value(shape[1:], tuple(cut(value.pieces, at, at + inner)))
        pieces += _expanded(part, dims[1:])
    return pieces
