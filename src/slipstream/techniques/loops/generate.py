"""Random programs and legal schedules, the training data of the cost model.

Statements are elementwise, stencils, reductions or in-place sweeps, alone or in chains. All values
are between 0.5 and 1.5 at the start and stay finite; every axis of a statement occurs in one of its
reads, so that a compiler cannot remove or shorten its work.

Source: Baghdadi et al., "A Deep Learning Based Cost Model for Automatic Code Optimization",
MLSys 2021.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Container, Sequence
from functools import partial

from slipstream.codegen.legality import IllegalScheduleError, check, dependences
from slipstream.codegen.program import (
    Axis,
    Buffer,
    Const,
    Expr,
    Kind,
    Load,
    Program,
    ProgramError,
    Reduction,
    Statement,
    apply,
)  # fmt: skip
from slipstream.codegen.schedule import (
    Fuse,
    Interchange,
    Reverse,
    Schedule,
    ScheduleError,
    Skew,
    Step,
    Tile,
    Tree,
    Unroll,
    Vectorise,
)  # fmt: skip

TILE_SIZES = (4, 8, 16, 32, 64, 128)
UNROLL_FACTORS = (2, 4, 8, 16)
_EXTENTS = (8, 12, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256, 384, 512, 768, 1024, 2048)
_MIN_ITERATIONS, _MAX_ITERATIONS = 1 << 16, 1 << 22
_MAX_ELEMENTS = 1 << 23


class _Builder:
    """Buffers, axes and statements of a program under construction."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.buffers: dict[str, Buffer] = {}
        self.axes: list[Axis] = []
        self.statements: list[Statement] = []
        self.extent: dict[str, int] = {}

    def axis(self, name: str, extent: int, kind: Kind = "free") -> str:
        name += str(len(self.statements))
        self.axes.append(Axis(name, extent, kind))
        self.extent[name] = extent
        return name

    def nest(self, extents: Sequence[int], reduced: Container[int] = ()) -> list[str]:
        """Add an axis for each extent; those at the places in `reduced` are summed over."""
        return [
            self.axis(letter, extent, "reduce" if place in reduced else "free")
            for place, (letter, extent) in enumerate(zip("ijkl", extents, strict=False))
        ]

    def read(self, *indices: dict[str, int] | str) -> Load:
        """Read a new input whose shape the indices determine."""
        shape = tuple(
            self.extent[index] if isinstance(index, str)
            else 1 + index.get("", 0) + sum(k * (self.extent[n] - 1) for n, k in index.items() if n)
            for index in indices
        )  # fmt: skip
        name = f"in{len(self.buffers)}"
        self.buffers[name] = Buffer(name, shape)
        return Load(name, self.buffers[name].at(*indices))

    def first(self, source: Buffer | None, names: Sequence[str]) -> Load:
        """Read `source`, or a new input without one."""
        return Load(source.name, source.at(*names)) if source else self.read(*names)

    def target(self, names: Sequence[str]) -> Buffer:
        name = f"t{len(self.statements)}"
        shape = tuple(self.extent[axis] for axis in names)
        self.buffers[name] = Buffer(name, shape, role="out")
        return self.buffers[name]

    def extents(self, depth: int) -> list[int]:
        while True:
            extents = [self.rng.choice(_EXTENTS) for _ in range(depth)]
            if _MIN_ITERATIONS <= math.prod(extents) <= _MAX_ITERATIONS:
                return extents

    def combined(self, values: Sequence[Expr]) -> Expr:
        """Combine reads with operations that keep positive values positive and finite."""
        rng, value = self.rng, values[0]
        for other in values[1:]:
            op = rng.choice(("add", "add", "mul", "mul", "sub", "max", "min", "div"))
            if op == "sub":
                other = apply("mul", other, 0.25)
            value = apply(op, value, other)
        return value


def random_program(rng: random.Random) -> Program:
    """Return a random program of one to three statements, which takes about 0.01 to 20 ms."""
    while True:
        builder = _Builder(rng)
        try:
            if rng.random() < 0.12:
                _sweep(builder)
            else:
                for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
                    _statement(builder)
            program = Program(
                tuple(builder.buffers.values()), tuple(builder.axes), tuple(builder.statements)
            )
            elements = sum(buffer.elements or 0 for buffer in program.buffers)
            work = sum(
                math.prod(program.extents[axis] for axis in statement.axes)
                for statement in program.statements
            )
            if elements <= _MAX_ELEMENTS and 2 * _MIN_ITERATIONS <= work <= 2 * _MAX_ITERATIONS:
                dependences(program)
                return program
        except (ProgramError, IllegalScheduleError):
            continue


def _statement(builder: _Builder) -> None:
    rng = builder.rng
    previous = builder.statements[-1] if builder.statements else None
    if previous is not None and rng.random() < 0.8:
        source = builder.buffers[previous.target]
        kind = rng.choice(("map", "map", "reduce", "stencil"))
        {"map": _map, "reduce": _reduce, "stencil": _stencil}[kind](builder, source)
    else:
        rng.choice((_map, _stencil, _reduce, _reduce, _product, _product, _convolution))(
            builder, None
        )


def _shape(source: Buffer | None) -> list[int]:
    return [extent for extent in source.shape if isinstance(extent, int)] if source else []


def _map(builder: _Builder, source: Buffer | None) -> None:
    """Add an elementwise statement, with operands that are transposed or broadcast."""
    rng = builder.rng
    shape = _shape(source) or builder.extents(rng.choice((2, 2, 3, 3, 4)))
    names = builder.nest(shape)
    target = builder.target(names)
    values: list[Expr] = [builder.first(source, names)]
    for _ in range(rng.choice((0, 1, 1, 2, 2))):
        some = rng.sample(names, rng.randint(1, len(names)))
        if rng.random() < 0.7:
            some.sort(key=names.index)
        values.append(builder.read(*some))
    value = builder.combined(values)
    if rng.random() < 0.3:
        value = apply(rng.choice(("tanh", "sigmoid", "relu", "abs", "square")), value)
    _put(builder, target, names, names, value)


def _stencil(builder: _Builder, source: Buffer | None) -> None:
    """Add a weighted sum of neighbours."""
    rng = builder.rng
    if source is not None and (len(source.shape) < 2 or min(_shape(source)[-2:]) < 8):
        return _map(builder, source)
    shape = _shape(source) or builder.extents(rng.choice((2, 2, 3)))
    reach = rng.choice((1, 1, 2))
    where = rng.sample(range(len(shape)), rng.randint(1, min(2, len(shape))))
    if source:
        shape = [e - 2 * reach if n in where else e for n, e in enumerate(shape)]
    names = builder.nest(shape)
    target = builder.target(names)
    if source is None:
        full = builder.read(*(
            {name: 1, "": 2 * reach if n in where else 0} for n, name in enumerate(names)
        ))  # fmt: skip
        source = builder.buffers[full.buffer]
    values: list[Expr] = []
    for point in _neighbours(len(where), reach, rng.random() < 0.4):
        offsets = dict(zip(where, point, strict=True))
        indices = [{name: 1, "": offsets.get(n, 0)} for n, name in enumerate(names)]
        values.append(Load(source.name, source.at(*indices)))
    _put(builder, target, names, names, _mean(values))
    return None


def _mean(values: Sequence[Expr]) -> Expr:
    return apply("mul", functools.reduce(partial(apply, "add"), values), round(1 / len(values), 4))


def _neighbours(dims: int, reach: int, box: bool) -> list[list[int]]:
    width = 2 * reach + 1
    if box:
        width = 3 if dims > 1 else width
        return [[n // width**d % width for d in range(dims)] for n in range(width**dims)]
    return [[reach] * dims] + [
        [step if d == dim else reach for d in range(dims)]
        for dim in range(dims)
        for step in range(width)
        if step != reach
    ]


def _reduce(builder: _Builder, source: Buffer | None) -> None:
    """Add a sum or maximum over some dimensions of an elementwise value."""
    rng = builder.rng
    shape = _shape(source) or builder.extents(rng.choice((2, 2, 3, 3, 4)))
    if len(shape) < 2:
        return _map(builder, source)
    reduced = set(rng.sample(range(len(shape)), rng.randint(1, len(shape) - 1)))
    names = builder.nest(shape, reduced)
    retained = [name for n, name in enumerate(names) if n not in reduced]
    values: list[Expr] = [builder.first(source, names)]
    if rng.random() < 0.6:
        some = sorted(rng.sample(names, rng.randint(1, len(names))), key=names.index)
        values.append(builder.read(*some))
    value = builder.combined(values)
    order = _shuffled(rng, names)
    target = builder.target(retained)
    _put(builder, target, retained, order, value, rng.choice(("sum", "sum", "sum", "max")))
    return None


def _product(builder: _Builder, source: Buffer | None) -> None:
    """Add a contraction of two or three operands."""
    rng = builder.rng
    depth = rng.choice((3, 3, 3, 4))
    extents = builder.extents(depth)
    count = rng.choice((1, 1, 2)) if depth > 3 else 1
    names = builder.nest(extents, range(depth - count, depth))
    retained, summed = names[: depth - count], names[depth - count :]
    left = [n for n in retained if rng.random() < 0.5] or [retained[0]]
    right = [n for n in retained if n not in left]
    if rng.random() < 0.15:
        right = retained[-1:]
    a = _shuffled(rng, [*left, *summed])
    b = _shuffled(rng, [*right, *(summed if rng.random() < 0.9 else summed[:1])])
    value: Expr = apply("mul", builder.read(*a), builder.read(*b))
    if rng.random() < 0.1:
        value = apply("add", value, builder.read(rng.choice(names)))
    target = builder.target(retained)
    _put(builder, target, retained, _shuffled(rng, names), value, "sum")


def _convolution(builder: _Builder, source: Buffer | None) -> None:
    """Add a convolution in one or two dimensions, with or without channels."""
    rng = builder.rng
    dims, taps, stride = rng.choice((1, 2, 2)), rng.choice((3, 3, 5, 7)), rng.choice((1, 1, 1, 2))
    channels = rng.random() < 0.7
    depthwise = channels and rng.random() < 0.25
    small = (8, 12, 16, 24, 32, 48, 64, 100, 128)
    space = [rng.choice(small if dims > 1 or channels else _EXTENTS[-4:]) for _ in range(dims)]
    free = [builder.axis(letter, extent) for letter, extent in zip("yx", space, strict=False)]
    taps_axes = [builder.axis(letter, taps, "reduce") for letter in "uv"[:dims]]
    image: list[dict[str, int]] = [{f: stride, t: 1} for f, t in zip(free, taps_axes, strict=True)]
    weight = [{t: 1} for t in taps_axes]
    retained, names = list(free), [*free, *taps_axes]
    if channels:
        out = builder.axis("o", rng.choice((4, 8, 16, 32, 64)))
        retained.insert(0, out)
        names.insert(0, out)
        if depthwise:
            image.insert(0, {out: 1})
        else:
            inner = builder.axis("c", rng.choice((3, 4, 8, 16, 32)), "reduce")
            names.append(inner)
            image.insert(0, {inner: 1})
            weight.insert(0, {inner: 1})
        weight.insert(0, {out: 1})
        if rng.random() < 0.3:
            image.append(image.pop(0))
            retained.append(retained.pop(0))
    total = math.prod(builder.extent[n] for n in names)
    if not _MIN_ITERATIONS <= total <= 2 * _MAX_ITERATIONS:
        raise ProgramError("too much or too little work")
    value = apply("mul", builder.read(*image), builder.read(*weight))
    target = builder.target(retained)
    order = _shuffled(rng, names) if rng.random() < 0.4 else names
    _put(builder, target, retained, order, value, "sum")


def _sweep(builder: _Builder) -> None:
    """Add iterated stencils: between two buffers (Jacobi), or in place (Gauss-Seidel)."""
    rng = builder.rng
    dims = rng.choice((1, 2, 2))
    while True:
        steps = rng.choice((4, 8, 16, 20, 32))
        space = [rng.choice(_EXTENTS) for _ in range(dims)]
        if _MIN_ITERATIONS <= steps * math.prod(space) <= _MAX_ITERATIONS:
            break
    in_place = rng.random() < 0.5
    time = Axis("t", steps, "sequential")
    names = [f"{letter}0" for letter in "ij"[:dims]]
    kind: Kind = "sequential" if in_place else "free"
    builder.axes = [time, *(Axis(n, e, kind) for n, e in zip(names, space, strict=True))]
    shape = tuple(e + 2 for e in space)
    buffers = [Buffer(f"t{n}", shape, role="inout") for n in range(1 if in_place else 2)]
    builder.buffers = {b.name: b for b in buffers}
    points = _neighbours(dims, 1, rng.random() < 0.3)
    for number in range(len(buffers)):
        source, target = buffers[number], buffers[(number + 1) % len(buffers)]
        own = names
        if number:
            own = [f"{letter}1" for letter in "ij"[:dims]]
            builder.axes += [Axis(n, e) for n, e in zip(own, space, strict=True)]
        values: list[Expr] = [
            Load(source.name, source.at(*({n: 1, "": d} for n, d in zip(own, point, strict=True))))
            for point in points
        ]
        index = target.at(*({n: 1, "": 1} for n in own))
        builder.statements.append(Statement(target.name, index, _mean(values), ("t", *own)))


def _shuffled(rng: random.Random, names: Sequence[str]) -> list[str]:
    order = list(names)
    if rng.random() < 0.4:
        rng.shuffle(order)
    return order


def _put(
    builder: _Builder, target: Buffer, retained: Sequence[str], order: Sequence[str], value: Expr,
    reduce: Reduction | None = None,
) -> None:  # fmt: skip
    if isinstance(value, Const):
        raise ProgramError("a constant")
    order = list(order)
    if reduce is None and builder.rng.random() < 0.25:
        builder.rng.shuffle(order)
    index = target.at(*retained)
    builder.statements.append(Statement(target.name, index, value, tuple(order), reduce))


def random_schedule(rng: random.Random, program: Program) -> Schedule:
    """Return a random legal schedule in canonical form; steps that are illegal are left out."""
    schedule = Schedule()

    def attempt(*steps: Step) -> bool:
        nonlocal schedule
        candidate = schedule.then(*steps).canonical(program)
        try:
            check(Tree(program, candidate))
        except (IllegalScheduleError, ScheduleError):
            return False
        schedule = candidate
        return True

    numbers = range(len(program.statements))
    fused: set[int] = set()
    for first, second in itertools.pairwise(numbers):
        if rng.random() < 0.5:
            _align(program, first, second, attempt)
            depth = rng.randint(1, 3)
            while depth and not attempt(Fuse(first, second, depth)):
                depth -= 1
            if depth:
                fused |= {first, second}
    for number in numbers:
        _random_nest(rng, program, number, number in fused, attempt, lambda: schedule)
    return schedule


def _align(program: Program, first: int, second: int, attempt: Callable[..., bool]) -> None:
    """Permute the second nest so that its loops have the extents of the first one's."""
    extents = [program.extents[a] for a in program.statements[first].axes]
    axes = list(program.statements[second].axes)
    for place, extent in enumerate(extents[: len(axes)]):
        match = next((a for a in axes[place:] if program.extents[a] == extent), None)
        if match is None:
            return
        if match != axes[place]:
            other = axes[place]
            if not attempt(Interchange(second, other, match)):
                return
            at = axes.index(match)
            axes[place], axes[at] = match, other


def _random_nest(
    rng: random.Random, program: Program, number: int, fused: bool,
    attempt: Callable[..., bool], current: Callable[[], Schedule],
) -> None:  # fmt: skip
    """Attempt random transformations of the nest of a statement."""
    statement = program.statements[number]
    axes = list(statement.axes)
    sequential = [a for a in axes if program.axis[a].kind == "sequential"]
    if len(sequential) > 1 and rng.random() < 0.5:
        outer, inner = sorted(rng.sample(sequential, 2), key=axes.index)
        attempt(Skew(number, outer, inner, rng.choice((1, 1, 2))))
    if len(axes) > 1 and rng.random() < (0.3 if fused else 0.65):
        for _ in range(rng.choice((1, 1, 2, 3))):
            attempt(Interchange(number, *rng.sample(axes, 2)))
    if rng.random() < 0.04:
        attempt(Reverse(number, rng.choice(axes)))
    order = [loop.axes[number] for loop in Tree(program, current()).path(number)]
    tiled: dict[str, int] = {}
    if rng.random() < 0.6:
        some = sorted(rng.sample(axes, rng.randint(1, min(3, len(axes)))), key=order.index)
        sizes = tuple(rng.choice(TILE_SIZES) for _ in some)
        if attempt(Tile(number, tuple(some), sizes)):
            tiled = dict(zip(some, sizes, strict=True))
    inner = order[-1]
    vector = rng.random() < 0.5 and attempt(Vectorise(number, inner))
    if rng.random() < 0.45:
        axis = order[-2] if vector and len(order) > 1 else inner
        if not vector or tiled.get(axis, program.extents[axis]) <= 16:
            attempt(Unroll(number, axis, rng.choice(UNROLL_FACTORS)))
