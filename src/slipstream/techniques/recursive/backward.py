"""Equations of the backward pass of one kind of node, by differentiating those of the forward pass.

The gradient of a product's sums is stored per node, so that the gradient of its weight is one
product over all nodes after the last level.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from itertools import pairwise

import torch

from slipstream.codegen.program import Apply, Const, Expr, Load, apply, loads
from slipstream.techniques.recursive.lowering import (
    Lowered,
    MatrixProduct,
    Piece,
    Product,
    Target,
    Temporary,
    row,
    shifted,
)
from slipstream.techniques.recursive.traced import RecursiveModelError

_Range = tuple[int, int, Expr]
"""Start, length and value at each position of a gradient's contribution."""
_ZERO = Const(0.0)


@dataclass
class Backward:
    """The backward pass of a kind of node.

    Attributes:
        forward: the equations of the forward pass, which also store what `equations` load.
        equations: gradients of a node's children, of products' sums (``d...``), of the kind's table
            (``x``) and of constants.
        constants: by number, ranges: first element, stored buffer, its first column, and length.
    """

    forward: Lowered
    equations: Lowered
    constants: dict[int, list[tuple[int, str, int, int]]] = field(default_factory=dict)


def backward_of(kind: Lowered, state_widths: Sequence[int]) -> Backward:
    """Differentiate the equations of a kind of node.

    Raises:
        RecursiveModelError: an operation has no gradient here.
    """
    if any(isinstance(product, MatrixProduct) for product in kind.products):
        raise RecursiveModelError(
            "products of two matrices of a node have no gradients",
            remedy="call it under torch.no_grad(), or train the model itself",
        )
    if any(n.target is torch.ops.aten.detach.default for n in kind.shape.module.graph.nodes):
        raise RecursiveModelError(
            "detach() is ignored in compiled gradients",
            remedy="call it under torch.no_grad(), or train the model itself",
        )
    return _Differentiation(kind, state_widths).run()


class _Differentiation:
    def __init__(self, kind: Lowered, state_widths: Sequence[int]) -> None:
        self._kind, self._widths = kind, state_widths
        self._products = {p.name: p for p in kind.products if isinstance(p, Product)}
        self._gradients: dict[Load, list[_Range]] = defaultdict(list)
        self._out = Lowered(kind.shape, kind.arity)
        self._result = Backward(self._forward(), self._out)

    def _forward(self) -> Lowered:
        """Return the forward pass, which stores temporaries and products' sums."""
        values = [piece for pieces in self._kind.states for piece in pieces]
        values += [(temporary.value, temporary.length) for temporary in self._kind.temporaries]
        stores: dict[Target, Piece] = {}
        saved = {t.name: t.width for t in self._kind.temporaries}
        for value, length in values:
            for load in loads(value):
                if load.buffer in self._products:
                    width = self._products[load.buffer].columns
                    stores[Target(f"v{load.buffer}", load.index.offset, width)] = (load, length)
                    saved[f"v{load.buffer}"] = width
        return replace(
            self._kind, stores=[(target, *piece) for target, piece in stores.items()], saved=saved
        )

    def run(self) -> Backward:
        out = self._out
        for number, (pieces, width) in enumerate(zip(self._kind.states, self._widths, strict=True)):
            at = 0
            for value, length in pieces:
                self._differentiate(value, length, row(f"g{number}", width, at))
                at += length
        # Each is differentiated after all that loads it.
        for name in reversed(_stored_order(self._kind)):
            if name in self._products:
                self._differentiate_product(self._products[name])
                continue
            for temporary in self._kind.temporaries:
                if temporary.name == name:
                    first, end = temporary.offset, temporary.offset + temporary.length
                    ranges = self._gradients.get(row(name, temporary.width), [])
                    for at, length, seed in _summed(ranges, first, end):
                        self._differentiate(shifted(temporary.value, at - first), length, seed)
        for source, ranges in self._gradients.items():
            for at, length, value in _summed(ranges, 0, math.inf):
                self._store(source, at, length, value)
        out.saved.update(self._result.forward.saved)
        return self._result

    def _differentiate_product(self, product: Product) -> None:
        out, name = self._out, f"d{product.name}"
        out.saved[name] = product.columns
        ranges = self._gradients.pop(row(product.name, product.columns), [])
        for at, length, value in _summed(ranges, 0, product.columns, zeros=True):
            out.temporaries.append(Temporary(name, value, length, at, product.columns))
        depth = max(first + length for _, first, length in product.inputs)
        whole = Product(
            f"q{product.name}", product.weight, not product.columns_first, depth,
            ((row(name, product.columns), 0, product.columns),),
        )  # fmt: skip
        out.products.append(whole)
        for load, first, length in product.inputs:
            self._add(load, length, row(whole.name, depth, first))

    def _store(self, source: Load, at: int, length: int, value: Expr) -> None:
        out, name, through = self._out, source.buffer, source.index.through
        if name in {t.name for t in self._kind.temporaries}:
            return
        if through is not None and through[0].startswith("child"):
            target = Target(f"g{name[1:]}", at, self._widths[int(name[1:])], int(through[0][5:]))
            out.stores.append((target, value, length))
        elif name == "table":
            out.saved["x"] = self._kind.table_width
            out.stores.append((Target("x", at, self._kind.table_width), value, length))
        else:
            places = self._result.constants.setdefault(int(name[1:]), [])
            for temporary in out.temporaries:
                if (temporary.value, temporary.length) == (value, length):
                    places.append((at, temporary.name, temporary.offset, length))
                    return
            stored = f"y{name[1:]}at{at}"
            out.saved[stored] = length
            out.stores.append((Target(stored, 0, length), value, length))
            places.append((at, stored, 0, length))

    def _add(self, load: Load, length: int, gradient: Expr) -> None:
        if not load.index.factor("j"):
            raise RecursiveModelError(
                "a number that is broadcast over a node's state has no gradient",
                remedy="use a parameter with the state's size",
            )
        base = Load(load.buffer, replace(load.index, offset=0))
        self._gradients[base].append((load.index.offset, length, gradient))

    def _differentiate(self, value: Expr, length: int, seed: Expr) -> None:
        """Add the gradients of all loads in `value`, whose gradient is `seed`."""
        if isinstance(value, Load):
            self._add(value, length, seed)
        elif isinstance(value, Apply):
            result = self._with_saved(value)
            arguments = [self._with_saved(argument) for argument in value.args]
            # Equations of the forward pass have no other operations, see `lowering`.
            parts = _DERIVATIVES[value.op](seed, result, *arguments)
            for argument, part in zip(value.args, parts, strict=True):
                if part is not None:
                    self._differentiate(argument, length, part)

    def _with_saved(self, value: Expr) -> Expr:
        """Return the value with the stored sums of products."""
        if isinstance(value, Apply):
            return apply(value.op, *(self._with_saved(argument) for argument in value.args))
        if isinstance(value, Load) and value.buffer in self._products:
            return Load(f"v{value.buffer}", value.index)
        return value


def _stored_order(kind: Lowered) -> list[str]:
    """Return products and temporaries, each after those that it is computed from."""
    sources: dict[str, set[str]] = defaultdict(set)
    for temporary in kind.temporaries:
        sources[temporary.name] |= {load.buffer for load in loads(temporary.value)}
    for product in kind.products:
        assert isinstance(product, Product)
        sources[product.name] = {load.buffer for load, _, _ in product.inputs}
    inside = {name: of & sources.keys() for name, of in sources.items()}
    return [*TopologicalSorter(inside).static_order()]


def _summed(
    ranges: Sequence[_Range], first: int, end: float, *, zeros: bool = False
) -> Iterator[_Range]:
    """Yield the sum of contributions between two positions, where there are some or `zeros`."""
    ends = {at for start, length, _ in ranges for at in (start, start + length)}
    ends |= {first, int(end)} if zeros else set()
    cuts = sorted({int(min(max(at, first), end)) for at in ends})
    for at, until in pairwise(cuts):
        total: Expr | None = None
        for start, length, value in ranges:
            if start <= at and until <= start + length:
                part = shifted(value, at - start)
                total = part if total is None else apply("add", total, part)
        if total is not None or zeros:
            yield at, until - at, _ZERO if total is None else total


def _times(product: Expr, *factors: Expr | float) -> Expr:
    for factor in factors:
        product = apply("mul", product, factor)
    return product


def _negative(value: Expr) -> Expr:
    return apply("neg", value)


def _extremum(g: Expr, first: Expr, equal: Expr) -> tuple[Expr, Expr]:
    """Return the gradients of `max` or `min`: of the first argument if it is the result."""
    half = _times(g, 0.5)
    return (
        apply("where", first, g, apply("where", equal, half, _ZERO)),
        apply("where", equal, half, apply("where", first, _ZERO, g)),
    )


def _silu(g: Expr, x: Expr) -> Expr:
    sigmoid = apply("sigmoid", x)
    slope = apply("add", _times(x, apply("sub", 1.0, sigmoid)), 1.0)
    return _times(g, sigmoid, slope)


_DERIVATIVES: dict[str, Callable[..., Sequence[Expr | None]]] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, _negative(g)),
    "mul": lambda g, y, a, b: (_times(g, b), _times(g, a)),
    "div": lambda g, y, a, b: (apply("div", g, b), _negative(_times(apply("div", g, b), y))),
    "where": lambda g, y, c, a, b: (
        None, apply("where", c, g, _ZERO), apply("where", c, _ZERO, g)
    ),
    "max": lambda g, y, a, b: _extremum(g, apply("gt", a, b), apply("eq", a, b)),
    "min": lambda g, y, a, b: _extremum(g, apply("lt", a, b), apply("eq", a, b)),
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne"), lambda g, y, a, b: (None, None)),
    "neg": lambda g, y, x: (_negative(g),),
    "exp": lambda g, y, x: (_times(g, y),),
    "log": lambda g, y, x: (apply("div", g, x),),
    "sqrt": lambda g, y, x: (apply("div", _times(g, 0.5), y),),
    "rsqrt": lambda g, y, x: (_times(g, -0.5, y, y, y),),
    "reciprocal": lambda g, y, x: (_negative(_times(g, y, y)),),
    "abs": lambda g, y, x: (
        _times(g, apply("sub", apply("gt", x, 0.0), apply("lt", x, 0.0))),
    ),
    "erf": lambda g, y, x: (
        _times(g, 2 / math.sqrt(math.pi), apply("exp", _negative(apply("square", x)))),
    ),
    "tanh": lambda g, y, x: (apply("tanh_backward", g, y),),
    "sigmoid": lambda g, y, x: (apply("sigmoid_backward", g, y),),
    "relu": lambda g, y, x: (apply("threshold_backward", g, x, 0.0),),
    "silu": lambda g, y, x: (_silu(g, x),),
    "square": lambda g, y, x: (_times(g, 2.0, x),),
}  # fmt: skip
"""Gradients of an operation's arguments, None for those without one; of the gradient and value of
the result, and the arguments."""
