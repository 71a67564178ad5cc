"""Stages of a kind's equations: between two of them, all workers of a level meet.

A product needs whole rows of its input, so it starts a stage if its input is computed from another
product. All that can be computed from a stage's sums, while they are in registers, belongs to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from slipstream.codegen.program import Apply, Expr, Index, Load, apply, loads, substituted
from slipstream.techniques.recursive.lowering import (
    AnyProduct,
    Lowered,
    MatrixProduct,
    Product,
    Target,
    Temporary,
    row,
    shifted,
)


@dataclass(frozen=True)
class Unit:
    """Ranges of equal length that are computed together, tile by tile.

    Attributes:
        length: number of positions.
        outputs: targets and values.
        products: whose sums the values load, with the offsets of the loads, called gates.
    """

    length: int
    outputs: tuple[tuple[Target, Expr], ...]
    products: tuple[tuple[Product, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Stage:
    """Units and matrix products between two barriers."""

    units: tuple[Unit, ...]
    matrices: tuple[MatrixProduct, ...]


@dataclass(frozen=True)
class Staged:
    """A kind of node, ready for emission.

    Attributes:
        private: temporaries that each worker computes for itself, before the first stage.
        widths: of all temporaries and matrix products that are stored, by name.
        saved: see `Lowered`.
    """

    arity: int
    private: tuple[Temporary, ...]
    stages: tuple[Stage, ...]
    widths: Mapping[str, int]
    saved: Mapping[str, int]


def leaf_products(lowered: Lowered) -> list[tuple[int, Product, Load, int, int]]:
    """Return products of a child's state: child, product, load, first k and number of k."""
    found = []
    for product in lowered.products:
        if not isinstance(product, Product):
            continue
        for load, first, length in product.inputs:
            through = load.index.through
            if load.buffer[0] == "s" and through is not None and through[0][:5] == "child":
                found.append((int(through[0][5:]), product, load, first, length))
    return found


def with_leaf_children(lowered: Lowered, mask: int) -> Lowered:
    """Return the equations for nodes whose children in `mask` are leaves.

    Products of their states depend on a word alone, and become loads of tables: row ``leaf{child}``
    of buffer ``{product}of{child}at{k}``.
    """
    replacements: dict[str, list[Expr]] = defaultdict(list)
    dropped: dict[str, set[int]] = defaultdict(set)
    for child, product, _, first, _ in leaf_products(lowered):
        if mask >> child & 1:
            replacements[product.name].append(leaf_row(product.name, child, first))
            dropped[product.name].add(first)
    products: list[AnyProduct] = []
    empty = set()
    for any_product in lowered.products:
        if not isinstance(any_product, Product) or any_product.name not in dropped:
            products.append(any_product)
            continue
        inputs = tuple(i for i in any_product.inputs if i[1] not in dropped[any_product.name])
        if inputs:
            products.append(replace(any_product, inputs=inputs))
        else:
            empty.add(any_product.name)

    def rewritten(value: Expr) -> Expr:
        if isinstance(value, Apply):
            return apply(value.op, *map(rewritten, value.args))
        if not isinstance(value, Load) or value.buffer not in replacements:
            return value
        total: Expr | None = None if value.buffer in empty else value
        for leaf in replacements[value.buffer]:
            part = shifted(leaf, value.index.offset)
            total = part if total is None else apply("add", total, part)
        assert total is not None
        return total

    return replace(
        lowered,
        states=[[(rewritten(value), length) for value, length in s] for s in lowered.states],
        products=products,
        temporaries=[replace(t, value=rewritten(t.value)) for t in lowered.temporaries],
    )


def leaf_row(product: str, child: int, first: int) -> Load:
    """Return an element of a leaf child's share of a product."""
    index = Index((("j", 1),), 0, (f"leaf{child}", Index((("n", 1),))))
    return Load(f"{product}of{child}at{first}", index)


def staged(lowered: Lowered, *, fuse: bool = True) -> Staged:
    """Return the stages of a kind's equations.

    Args:
        fuse: whether all that can be computed from a stage's sums belongs to the stage; otherwise
            every operation is one.
    """
    return _Staging(lowered, fuse).run()


class _Staging:
    def __init__(self, lowered: Lowered, fuse: bool) -> None:
        self._fuse = fuse
        self._products: dict[str, AnyProduct] = {p.name: p for p in lowered.products}
        self._temporaries = {t.name: t for t in lowered.temporaries}
        self._lowered = lowered
        self._level: dict[str, int] = {}
        self._added: dict[tuple[Expr, int], Temporary] = {}
        self._outputs: dict[int, list[tuple[Target, Expr, int]]] = defaultdict(list)

    def run(self) -> Staged:
        private: list[Temporary] = []
        pending: list[tuple[Target, Expr, int]] = [*self._lowered.stores]
        for number, pieces in enumerate(self._lowered.states):
            at, width = 0, sum(length for _, length in pieces)
            for value, length in pieces:
                pending.append((Target(f"s{number}", at, width), value, length))
                at += length
        for temporary in self._lowered.temporaries:
            if self._of(temporary.value) == 0:
                private.append(temporary)
            else:
                target = Target(temporary.name, temporary.offset, temporary.width)
                pending.append((target, temporary.value, temporary.length))
        rows = {t.value: row(t.name, t.width, t.offset) for t in private}
        while pending:
            target, value, length = pending.pop(0)
            value = substituted(value, rows)
            level = max(self._of(value), 1)
            value = self._split(value, level, length, pending)
            self._outputs[level].append((target, value, length))
        last = max([*self._outputs, *(self._level_of(p) for p in self._products)], default=1)
        stages = []
        for level in range(1, last + 1):
            matrices = tuple(
                p for p in self._products.values()
                if isinstance(p, MatrixProduct) and self._level_of(p.name) == level
            )  # fmt: skip
            stages.append(Stage(tuple(self._units(self._outputs[level])), matrices))
        widths = {t.name: t.width for t in [*self._lowered.temporaries, *self._added.values()]}
        for product in self._products.values():
            if isinstance(product, MatrixProduct):
                widths[product.name] = product.rows * product.columns
        return Staged(
            self._lowered.arity, tuple(private), tuple(stages), widths, self._lowered.saved
        )

    def _level_of(self, name: str) -> int:
        """Return the stage of a product; 0 for a private temporary."""
        if name not in self._level:
            if name in self._temporaries:
                self._level[name] = max(
                    self._of(t.value) for t in self._lowered.temporaries if t.name == name
                )
            else:
                product = self._products[name]
                if isinstance(product, Product):
                    sources = [load for load, _, _ in product.inputs]
                else:
                    sources = [product.left[0], *(load for load, _ in product.right)]
                self._level[name] = max([1, *(self._stored_at(load) for load in sources)])
        return self._level[name]

    def _stored_at(self, load: Load) -> int:
        """Return the first stage that can read whole rows of a buffer."""
        if load.buffer in self._temporaries or load.buffer in self._products:
            return self._level_of(load.buffer) + 1
        return 0

    def _of(self, value: Expr) -> int:
        """Return the first stage in which a value can be computed; 0 if before all products."""
        if not self._fuse and isinstance(value, Apply):
            return 1 + max(map(self._of, value.args))
        levels = [0]
        for load in loads(value):
            product = self._products.get(load.buffer)
            if isinstance(product, Product):
                levels.append(self._level_of(load.buffer))
            elif product is not None or (
                load.buffer in self._temporaries and self._level_of(load.buffer) > 0
            ):
                levels.append(self._level_of(load.buffer) + 1)
        return max(levels)

    def _split(
        self, value: Expr, level: int, length: int, pending: list[tuple[Target, Expr, int]]
    ) -> Expr:
        """Replace the parts of a value that an earlier stage computes by stored temporaries."""
        own = self._of(value)
        if own == 0 or (isinstance(value, Load) and not self._in_registers(value)):
            return value
        if own < level:
            if (value, length) not in self._added:
                name = f"u{len(self._added)}"
                temporary = Temporary(name, value, length, 0, length)
                self._added[value, length] = temporary
                self._temporaries[name] = temporary
                self._level[name] = own
                pending.append((Target(name, 0, length), value, length))
            return row(self._added[value, length].name, length)
        if isinstance(value, Apply):
            parts = (self._split(arg, level, length, pending) for arg in value.args)
            return Apply(value.op, tuple(parts))
        return value

    def _in_registers(self, load: Load) -> bool:
        return isinstance(self._products.get(load.buffer), Product)

    def _units(self, outputs: Iterable[tuple[Target, Expr, int]]) -> Iterable[Unit]:
        by_length: dict[int, list[tuple[Target, Expr]]] = defaultdict(list)
        for target, value, length in outputs:
            by_length[length].append((target, value))
        for length, chosen in by_length.items():
            gates: dict[str, list[int]] = defaultdict(list)
            for _, value in chosen:
                for load in loads(value):
                    if self._in_registers(load) and load.index.offset not in gates[load.buffer]:
                        gates[load.buffer].append(load.index.offset)
            products = []
            for name, offsets in gates.items():
                product = self._products[name]
                assert isinstance(product, Product)
                products.append((product, tuple(sorted(offsets))))
            yield Unit(length, tuple(chosen), tuple(products))
