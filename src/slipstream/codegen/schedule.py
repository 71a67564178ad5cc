"""`Schedule`: transformations of a program's loops, and the loop tree that they result in.

Steps name a nest by one of its statements and a loop by the axis of that statement. After
`Tile`, "i" is the loop inside a tile for `Unroll` and `Vectorise`, and the loop over tiles for
`Parallel`; loops are interchanged, skewed and fused before they are tiled.

`Rows`, `TileProduct` and `Team` select special emitters; a loop tree ignores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from slipstream.codegen.program import Index, Program
from slipstream.errors import SlipstreamError


class ScheduleError(SlipstreamError):
    """A step does not fit the program's loops; `where` names the step."""


@dataclass(frozen=True)
class Rows:
    """Rows of one nest in stages, as `fusion` emits them."""


@dataclass(frozen=True)
class Fuse:
    """Merge the `depth` outermost loops of two adjacent nests; iterations alternate."""

    first: int
    second: int
    depth: int = 1


@dataclass(frozen=True)
class Interchange:
    """Exchange two loops of a perfect nest."""

    statement: int
    first: str
    second: str


@dataclass(frozen=True)
class Reverse:
    """Execute a loop's iterations in the opposite order."""

    statement: int
    axis: str


@dataclass(frozen=True)
class Shift:
    """Delay one statement of a fused nest by iterations of a loop."""

    statement: int
    axis: str
    by: int


@dataclass(frozen=True)
class Skew:
    """Replace the inner iterator by ``inner + factor * outer``."""

    statement: int
    outer: str
    inner: str
    factor: int = 1


@dataclass(frozen=True)
class Tile:
    """Split loops of a perfect nest into tiles; the loops over tiles move outside all of them."""

    statement: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Unroll:
    """Unroll a loop by a factor."""

    statement: int
    axis: str
    factor: int


@dataclass(frozen=True)
class Vectorise:
    """Execute an innermost loop with vector instructions."""

    statement: int
    axis: str


@dataclass(frozen=True)
class Parallel:
    """Distribute a loop's iterations over threads."""

    statement: int
    axis: str


@dataclass(frozen=True)
class TileProduct:
    """A product in a packed tile of `rows` x `gates` x `lanes` accumulators."""

    rows: int
    gates: int
    lanes: int = 16


@dataclass(frozen=True)
class Team:
    """Workers that own slices of columns and meet at a barrier; 0 for all threads."""

    workers: int = 0


Step = (
    Rows | Fuse | Interchange | Reverse | Shift | Skew | Tile | Unroll | Vectorise | Parallel
    | TileProduct | Team
)  # fmt: skip
_STEPS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Rows, Fuse, Interchange, Reverse, Shift, Skew, Tile, Unroll, Vectorise, Parallel,
        TileProduct, Team,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Steps, in the order in which they are applied."""

    steps: tuple[Step, ...] = ()

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        """Return the steps as text, such as ``tile(i,j,32,64)+vectorise(j)@1`` for statement 1."""
        return "+".join(map(_text, self.steps))

    def then(self, *steps: Step) -> Schedule:
        """Return the schedule with further steps."""
        return Schedule((*self.steps, *steps))

    def canonical(self, program: Program) -> Schedule:
        """Return the schedule without steps that change nothing; tiles are at most an extent.

        Tiles of a whole extent or of one iteration are dropped, and an unroll factor is at most the
        number of iterations. Marks of loops (unrolled, vectorised, parallel) are sorted and last.
        """
        order: list[Step] = []
        marks: dict[tuple[str, int, str], Step] = {}
        sizes: dict[tuple[int, str], int] = {}
        for step in self.steps:
            if isinstance(step, Tile):
                pairs = [
                    (axis, size) for axis, size in zip(step.axes, step.sizes, strict=True)
                    if 1 < size < program.extents.get(axis, size + 1)
                ]  # fmt: skip
                if not pairs:
                    continue
                sizes |= {(step.statement, axis): size for axis, size in pairs}
                step = Tile(step.statement, *map(tuple, zip(*pairs, strict=True)))
            if isinstance(step, Unroll):
                extent = sizes.get((step.statement, step.axis), program.extents.get(step.axis))
                step = replace(step, factor=min(step.factor, extent or step.factor))
                if step.factor < 2:
                    continue
            empty = (
                (isinstance(step, Interchange) and step.first == step.second)
                or (isinstance(step, Shift) and not step.by)
                or (isinstance(step, Skew) and not step.factor)
                or (isinstance(step, Fuse) and not step.depth)
            )
            if isinstance(step, (Unroll, Vectorise, Parallel)):
                marks[type(step).__name__, step.statement, step.axis] = step
            elif order and order[-1] == step and isinstance(step, (Reverse, Interchange)):
                order.pop()
            elif not empty:
                order.append(step)
        return Schedule((*order, *(marks[key] for key in sorted(marks))))

    def to_json(self) -> list[list[Any]]:
        """Return the steps as lists of a name and arguments."""
        return [
            [type(step).__name__, *(_plain(getattr(step, f.name)) for f in fields(step))]
            for step in self.steps
        ]

    @classmethod
    def from_json(cls, value: Any) -> Schedule:
        """Read a schedule from JSON.

        Raises:
            ScheduleError: it is not the JSON of a schedule.
        """
        try:
            steps = []
            for name, *arguments in value:
                kinds = [f.type for f in fields(_STEPS[name])]
                if len(kinds) != len(arguments):
                    raise ValueError(f"{name} takes {len(kinds)} arguments")
                steps.append(_STEPS[name](*map(_read, kinds, arguments)))
            return cls(tuple(steps))
        except (TypeError, ValueError, KeyError) as error:
            raise ScheduleError(
                f"this is not the JSON of a schedule ({type(error).__name__}: {error})",
                remedy='a list such as [["Interchange", 0, "i", "j"]]',
            ) from error


def _text(step: Step) -> str:
    values = {f.name: getattr(step, f.name) for f in fields(step)}
    number = values.pop("statement", 0)
    words = [w for v in values.values() for w in (v if isinstance(v, tuple) else (v,))]
    mark = f"@{number}" if number else ""
    return f"{type(step).__name__.lower()}({','.join(map(str, words))}){mark}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read(kind: Any, value: Any) -> Any:
    readers: dict[Any, Callable[[Any], Any]] = {
        "int": int, "str": str, "tuple[str, ...]": lambda v: tuple(map(str, v)),
        "tuple[int, ...]": lambda v: tuple(map(int, v)),
    }  # fmt: skip
    return readers[kind](value)


@dataclass
class Loop:
    """A loop of a loop tree.

    Attributes:
        name: name of its iterator.
        body: loops and numbers of statements, in order.
        axes: by statement, the axis that the loop iterates over.
        tile: size of the tiles that it iterates over; 0 for a loop over iterations.
        unroll: factor; 1 if it is not unrolled.
    """

    name: str
    body: list[Loop | int]
    axes: dict[int, str]
    tile: int = 0
    unroll: int = 1
    vector: bool = False
    parallel: bool = False

    def statements(self) -> Iterator[int]:
        """Yield the numbers of all statements inside."""
        for node in self.body:
            if isinstance(node, Loop):
                yield from node.statements()
            else:
                yield node


@dataclass
class Domain:
    """A statement's iterations in terms of loop iterators.

    Attributes:
        iterators: by axis, an affine expression.
        constraints: affine expressions that are not negative.
    """

    iterators: dict[str, Index]
    constraints: list[Index] = field(default_factory=list)

    def substitute(self, name: str, value: Index) -> None:
        """Replace an iterator by an affine expression."""
        self.iterators = {axis: e.substituted(name, value) for axis, e in self.iterators.items()}
        self.constraints = [e.substituted(name, value) for e in self.constraints]


class Tree:
    """The loops of a program after a schedule.

    Attributes:
        body: loops and statements at the top.
        domains: per statement.

    Raises:
        ScheduleError: a step does not fit.
    """

    def __init__(self, program: Program, schedule: Schedule | None = None) -> None:
        self.program = program
        domains, names = _unscheduled(program)
        self.domains = [Domain(dict(d.iterators), list(d.constraints)) for d in domains]
        self.body = self._nest(list(range(len(program.statements))), 0, names)
        for step in schedule or Schedule():
            apply = getattr(self, f"_{type(step).__name__.lower()}", None)
            if apply is None:
                continue
            try:
                apply(step)
            except ScheduleError as error:
                error.where = error.where or _text(step)
                raise

    def _nest(
        self, numbers: list[int], depth: int, names: Sequence[Sequence[str]]
    ) -> list[Loop | int]:
        body: list[Loop | int] = []
        for number in numbers:
            axes = self.program.statements[number].axes
            if len(axes) == depth:
                body.append(number)
                continue
            name = names[number][depth]
            last = body[-1] if body else None
            if isinstance(last, Loop) and last.name == name:
                last.body.append(number)
                last.axes[number] = axes[depth]
            else:
                body.append(Loop(name, [number], {number: axes[depth]}))
        for node in body:
            if isinstance(node, Loop):
                numbers = [n for n in node.body if isinstance(n, int)]
                node.body = self._nest(numbers, depth + 1, names)
        return body

    def path(self, number: int) -> list[Loop]:
        """Return the loops around a statement, outermost first."""
        if not 0 <= number < len(self.program.statements):
            raise ScheduleError(
                f"there is no statement {number}",
                remedy=f"0 to {len(self.program.statements) - 1}",
            )
        loops: list[Loop] = []
        body = self.body
        while number not in body:
            loop = next(n for n in body if isinstance(n, Loop) and number in n.axes)
            loops.append(loop)
            body = loop.body
        return loops

    def loop(self, number: int, axis: str, *, outer: bool = False) -> Loop:
        """Return a statement's loop over an axis; if it is tiled, that over tiles for `outer`."""
        loops = [loop for loop in self.path(number) if loop.axes[number] == axis]
        if not loops:
            raise ScheduleError(
                f"statement {number} has no axis '{axis}'",
                remedy=f"one of {self.program.statements[number].axes}",
            )
        return loops[0 if outer else -1]

    def _band(self, number: int, axes: tuple[str, ...]) -> list[Loop]:
        """Return the loops from the outermost to the innermost of `axes`, a perfect nest."""
        path = self.path(number)
        if any(loop.tile for loop in path):
            raise ScheduleError("the nest is already tiled", remedy="tile it in one step, last")
        order = [loop.axes[number] for loop in path]
        if not set(axes) <= set(order):
            self.loop(number, next(axis for axis in axes if axis not in order))
        places = [order.index(axis) for axis in axes]
        band = path[min(places) : max(places) + 1]
        for outer in band[:-1]:
            if len(outer.body) != 1:
                raise ScheduleError(
                    f"the loops over {axes} are not a perfect nest",
                    remedy="transform the nests before fusing them",
                )
        return band

    def _siblings(self, path: list[Loop], depth: int) -> list[Loop | int]:
        return path[depth - 1].body if depth else self.body

    def _fuse(self, step: Fuse) -> None:
        a, b = self.path(step.first), self.path(step.second)
        common = sum(1 for x, y in zip(a, b, strict=False) if x is y)
        if step.second <= step.first or min(len(a), len(b)) < common + step.depth:
            raise ScheduleError("there are not as many loops to fuse")
        for depth in range(common, common + step.depth):
            into, other = a[depth], b[depth]
            siblings = self._siblings(a, depth)
            place = siblings.index(into)
            if siblings[place + 1 : place + 2] != [other]:
                raise ScheduleError(
                    f"the nests of statements {step.first} and {step.second} are not adjacent",
                    remedy="fuse those between them first",
                )
            if into.tile or other.tile:
                raise ScheduleError("a tiled nest cannot be fused", remedy="fuse before tiling")
            extents, other_extents = (
                {self.program.axis[axis].extent for axis in loop.axes.values()}
                for loop in (into, other)
            )
            if extents != other_extents:
                raise ScheduleError(f"the loops have extents {extents} and {other_extents}")
            del siblings[place + 1]
            for number in other.statements():
                self.domains[number].substitute(other.name, Index(((into.name, 1),)))
            into.body += other.body
            into.axes |= other.axes
            b[depth] = into

    def _interchange(self, step: Interchange) -> None:
        band = self._band(step.statement, (step.first, step.second))
        body, last = band[0], band[-1]
        for attribute in ("name", "axes", "unroll", "vector", "parallel"):
            first, second = getattr(body, attribute), getattr(last, attribute)
            setattr(body, attribute, second)
            setattr(last, attribute, first)

    def _reverse(self, step: Reverse) -> None:
        loop = self.loop(step.statement, step.axis)
        if self.program.axis[step.axis].kind == "reduce":
            # gcc 12.2 vectorises some sums over decreasing addresses wrongly.
            raise ScheduleError(
                f"'{step.axis}' is a reduce axis, whose iterations commute",
                remedy="leave out the reversal",
            )
        extent = self.program.axis[step.axis].extent
        last = Index((), extent - 1) if isinstance(extent, int) else Index(((extent.name, 1),), -1)
        value = Index((*last.terms, (loop.name, -1)), last.offset)
        for number in loop.statements():
            self.domains[number].substitute(loop.name, value)

    def _shift(self, step: Shift) -> None:
        loop = self.loop(step.statement, step.axis)
        value = Index(((loop.name, 1),), -step.by)
        self.domains[step.statement].substitute(loop.name, value)

    def _skew(self, step: Skew) -> None:
        band = self._band(step.statement, (step.outer, step.inner))
        outer, inner = band[0], band[-1]
        if outer.axes[step.statement] != step.outer:
            raise ScheduleError(f"'{step.outer}' is not outside '{step.inner}'")
        value = Index(((inner.name, 1), (outer.name, -step.factor)))
        for number in inner.statements():
            self.domains[number].substitute(inner.name, value)

    def _tile(self, step: Tile) -> None:
        if len(step.axes) != len(step.sizes) or any(size < 1 for size in step.sizes):
            raise ScheduleError("a tile needs one positive size per axis")
        sizes = dict(zip(step.axes, step.sizes, strict=True))
        path = self.path(step.statement)
        band = self._band(step.statement, step.axes)
        siblings = self._siblings(path, path.index(band[0]))
        place = siblings.index(band[0])
        inner: Loop = band[0]
        for loop in reversed(band):
            axis = loop.axes[step.statement]
            if axis not in sizes:
                continue
            size, name = sizes[axis], f"{loop.name}t"
            for number in loop.statements():
                self.domains[number].constraints += [
                    Index(((loop.name, 1), (name, -size))),
                    Index(((loop.name, -1), (name, size)), size - 1),
                ]
            inner = Loop(name, [inner], dict(loop.axes), tile=size, parallel=loop.parallel)
            loop.parallel = False
        siblings[place] = inner

    def _unroll(self, step: Unroll) -> None:
        if step.factor < 1:
            raise ScheduleError(f"a loop cannot be unrolled {step.factor} times")
        self.loop(step.statement, step.axis).unroll = step.factor

    def _vectorise(self, step: Vectorise) -> None:
        loop = self.loop(step.statement, step.axis)
        if any(isinstance(node, Loop) for node in loop.body):
            raise ScheduleError(f"the loop over '{step.axis}' is not an innermost loop")
        loop.vector = True

    def _parallel(self, step: Parallel) -> None:
        self.loop(step.statement, step.axis, outer=True).parallel = True

    @cached_property
    def key(self) -> str:
        """Text that is equal for equal trees."""

        def text(node: Loop | int) -> str:
            if isinstance(node, int):
                domain = self.domains[node]
                return f"{node}:{sorted(domain.iterators.items())}{domain.constraints}"
            marks = f"{node.tile},{node.unroll},{node.vector:d},{node.parallel:d}"
            return f"{node.name}({marks})[{';'.join(map(text, node.body))}]"

        return ";".join(map(text, self.body))


@lru_cache(maxsize=256)
def _unscheduled(program: Program) -> tuple[tuple[Domain, ...], tuple[tuple[str, ...], ...]]:
    """Return the domain of each statement, which is not to be changed, and its iterators."""
    domains, names = [], []
    for number, statement in enumerate(program.statements):
        iterators: dict[str, Index] = {}
        constraints = []
        for place, axis in enumerate(statement.axes):
            # A loop has the name of the first statement that shares it. The dot keeps it apart
            # from the names of axes and symbols.
            first = number
            while first and program.shared(first - 1, number) > place:
                first -= 1
            name = f"{program.statements[number].axes[place]}.{first}"
            iterators[axis] = Index(((name, 1),))
            extent = program.axis[axis].extent
            last = (
                Index((), extent - 1) if isinstance(extent, int) else Index(((extent.name, 1),), -1)
            )
            constraints.append(Index(((name, 1),)))
            constraints.append(Index((*last.terms, (name, -1)), last.offset))
        for limit in statement.where:
            for axis in statement.axes:
                ((name, _),) = iterators[axis].terms
                limit = limit.substituted(axis, Index(((f"%{name}", 1),)))
            constraints.append(
                Index(tuple((n.lstrip("%"), k) for n, k in limit.terms), limit.offset)
            )
        domains.append(Domain(iterators, constraints))
        names.append(tuple(index.terms[0][0] for index in iterators.values()))
    return tuple(domains), tuple(names)


def extents_of(program: Program) -> Mapping[str, int]:
    """Return constant extents by axis, or refuse symbolic ones.

    Raises:
        ScheduleError: an extent is a symbol.
    """
    for axis in program.axes:
        if not isinstance(axis.extent, int):
            raise ScheduleError(
                f"the extent of axis '{axis.name}' is the symbol '{axis.extent.name}'",
                remedy="bind it to an integer first",
            )
    return program.extents
