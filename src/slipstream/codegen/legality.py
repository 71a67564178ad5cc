"""Whether a schedule preserves the order of dependent iterations; exact for constant extents.

Dependences are systems of affine constraints over pairs of iterations. Most schedules are decided
by the signs of the distances between dependent iterations, which are computed once per program. The
others are decided by a search for a pair of iterations whose order is reversed.

Source: Banerjee, "Dependence Analysis", 1997.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from slipstream.codegen.bounds import scan
from slipstream.codegen.program import Buffer, Index, Load, Program
from slipstream.codegen.schedule import Domain, Loop, ScheduleError, Tree, extents_of
from slipstream.errors import SlipstreamError

# Iterator values that a search tries before it gives up and reports a solution: a rejected schedule
# is safe.
_MAX_TRIES = 20_000
Signs = tuple[int, ...]


@dataclass(frozen=True)
class Dependence:
    """Iterations of `sink` that must follow iterations of `source`, since one of them writes.

    Attributes:
        source, sink: numbers of statements.
        buffer: whose elements both access.
        first, second: their affine index per dimension, or of the element; None if it is indirect.
    """

    source: int
    sink: int
    buffer: str
    first: tuple[Index, ...] | None
    second: tuple[Index, ...] | None

    def __str__(self) -> str:
        return f"statement {self.source} -> statement {self.sink} through '{self.buffer}'"


class IllegalScheduleError(SlipstreamError):
    """A schedule reverses a dependence.

    Attributes:
        statement: number of the statement that would be executed too early.
        dependence: the dependence that is violated; None for one of a reduction on itself.
    """

    def __init__(self, statement: int, dependence: Dependence | None, reason: str) -> None:
        self.statement, self.dependence = statement, dependence
        super().__init__(
            f"the schedule is illegal: {reason}",
            where=f"statement {statement}" if dependence is None else str(dependence),
            remedy="leave out the step, or skew the loops first",
        )


def dimensions(buffer: Buffer, index: Index, extents: dict[str, int]) -> tuple[Index, ...]:
    """Return an affine index per dimension; one index of the element if that is ambiguous."""
    strides = buffer.strides
    if any(s < 1 or (n and s > strides[n - 1]) for n, s in enumerate(strides)) or not strides:
        return (index,)
    terms: list[list[tuple[str, int]]] = [[] for _ in strides]
    for name, factor in index.terms:
        for at, stride in enumerate(strides):
            whole = math.floor(factor / stride + 0.5) if at + 1 < len(strides) else factor // stride
            terms[at].append((name, whole))
            factor -= whole * stride
        if factor:
            return (index,)
    found, offset = [], index.offset
    for at, stride in enumerate(strides):
        inner = Index(tuple(
            (n, k * s) for names, s in zip(terms[at + 1 :], strides[at + 1 :], strict=True)
            for n, k in names
        ))  # fmt: skip
        whole = (offset + inner.bounds(extents)[0]) // stride if at + 1 < len(strides) else offset
        found.append(Index(tuple(terms[at]), whole))
        offset -= whole * stride
        extent = buffer.shape[at]
        least, greatest = found[-1].bounds(extents)
        if least < 0 or (isinstance(extent, int) and greatest >= extent):
            return (index,)
    return tuple(found)


@lru_cache(maxsize=256)
def dependences(program: Program) -> tuple[Dependence, ...]:
    """Return the pairs of accesses that may be to the same element, one of them a write.

    Raises:
        ScheduleError: an extent is a symbol.
        IllegalScheduleError: a reduction reads its own target, or iterations of a free axis
            depend on each other.
    """
    extents = dict(extents_of(program))
    found: dict[Dependence, None] = {}
    accesses = [
        [(n == 0, access) for n, access in enumerate(s.accesses)] for s in program.statements
    ]
    for source, sink in itertools.product(range(len(accesses)), repeat=2):
        # Backward dependences exist only within shared sequential loops.
        if sink < source and not program.shared(source, sink):
            continue
        for (writes, a), (overwrites, b) in itertools.product(accesses[source], accesses[sink]):
            if a.buffer != b.buffer or not (writes or overwrites):
                continue
            reduction = source == sink and program.statements[source].reduce is not None
            if reduction and not (writes and overwrites):
                raise IllegalScheduleError(source, None, "a reduction reads its own target")
            buffer = program.buffer[a.buffer]
            first, second = (_indices(buffer, access, extents) for access in (a, b))
            if first is not None and second is not None and len(first) != len(second):
                first, second = (a.index,), (b.index,)
            found[Dependence(source, sink, a.buffer, first, second)] = None
    possible = tuple(d for d in found if _pairs(program, d) is not None)
    _check_free(program, possible)
    return possible


def _indices(buffer: Buffer, access: Load, extents: dict[str, int]) -> tuple[Index, ...] | None:
    if access.index.through is not None:
        return None
    return dimensions(buffer, access.index, extents)


def _check_free(program: Program, found: Sequence[Dependence]) -> None:
    tree = _plain(program)
    for dependence in found:
        common = _common(tree, dependence.source, dependence.sink)
        for place, loop in enumerate(common):
            if program.axis[loop.axes[dependence.source]].kind != "free":
                continue
            names = tuple(c.name for c in common)
            for signs in directions(program, dependence, names, names):
                if signs[place] and not any(signs[:place]):
                    raise IllegalScheduleError(
                        dependence.sink, dependence,
                        f"iterations of the free axis '{loop.axes[dependence.source]}' depend on "
                        "each other; make it sequential",
                    )  # fmt: skip


@lru_cache(maxsize=256)
def _plain(program: Program) -> Tree:
    return Tree(program)


def _common(tree: Tree, source: int, sink: int) -> list[Loop]:
    pairs = zip(tree.path(source), tree.path(sink), strict=False)
    return [a for a, b in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs)]


def _renamed(index: Index, mark: str) -> Index:
    return Index(tuple((f"{mark}{name}", k) for name, k in index.terms), index.offset)


def _minus(a: Index, b: Index, offset: int = 0) -> Index:
    return Index((*a.terms, *((n, -k) for n, k in b.terms)), a.offset - b.offset + offset)


@dataclass(frozen=True)
class _System:
    """Affine expressions that are 0, and others that are not negative."""

    zero: tuple[Index, ...]
    positive: tuple[Index, ...]

    def plus(self, zero: Sequence[Index] = (), positive: Sequence[Index] = ()) -> _System:
        return _System((*self.zero, *zero), (*self.positive, *positive))


def _mapped(index: Index, domain: Domain) -> Index:
    terms: list[tuple[str, int]] = []
    offset = index.offset
    for axis, factor in index.terms:
        value = domain.iterators[axis]
        terms += [(n, k * factor) for n, k in value.terms]
        offset += factor * value.offset
    return Index(tuple(terms), offset)


def _orders(program: Program, tree: Tree, dependence: Dependence) -> Iterator[_System]:
    """Yield the systems of pairs of iterations that are dependent, one per loop that orders them.

    Iterators of the source are marked with ``<``, those of the sink with ``>``.
    """
    source, sink = dependence.source, dependence.sink
    domains = tree.domains[source], tree.domains[sink]
    positive = [_renamed(c, "<") for c in domains[0].constraints]
    positive += [_renamed(c, ">") for c in domains[1].constraints]
    zero: list[Index] = []
    if dependence.first is not None and dependence.second is not None:
        for a, b in zip(dependence.first, dependence.second, strict=True):
            zero.append(
                _minus(_renamed(_mapped(a, domains[0]), "<"), _renamed(_mapped(b, domains[1]), ">"))
            )
    base = _System(tuple(zero), tuple(positive))
    if source == sink:
        # The iterations of a reduction commute.
        axes = tuple(a for a in program.statements[source].axes if program.axis[a].kind != "reduce")
    else:
        axes = program.statements[source].axes[: program.shared(source, sink)]
    equal: list[Index] = []
    for axis in axes:
        before = _renamed(domains[0].iterators[axis], "<")
        after = _renamed(domains[1].iterators[axis], ">")
        yield base.plus(equal, [_minus(after, before, -1)])
        equal.append(_minus(after, before))
    if source < sink:
        yield base.plus(equal)


@lru_cache(maxsize=4096)
def _pairs(program: Program, dependence: Dependence) -> tuple[_System, ...] | None:
    """Return the feasible systems of dependent pairs in the unscheduled program; None if none."""
    systems = [s for s in _orders(program, _plain(program), dependence) if feasible(s)]
    return tuple(systems) or None


@lru_cache(maxsize=65536)
def directions(
    program: Program, dependence: Dependence, before: tuple[str, ...], after: tuple[str, ...]
) -> frozenset[Signs]:
    """Return the signs of the distances between dependent iterations, exactly.

    Args:
        before, after: iterators of the unscheduled source and sink, by pairs; a sign is that of
            the sink's minus the source's.
    """
    found: set[Signs] = set()

    def extend(system: _System, signs: Signs) -> None:
        if len(signs) == len(before):
            found.add(signs)
            return
        place = len(signs)
        distance = _minus(Index(((f">{after[place]}", 1),)), Index(((f"<{before[place]}", 1),)))
        for sign in (-1, 0, 1):
            step = (
                system.plus([distance]) if not sign
                else system.plus(positive=[Index(
                    tuple((n, sign * k) for n, k in distance.terms), sign * distance.offset - 1
                )])
            )  # fmt: skip
            if feasible(step):
                extend(step, (*signs, sign))

    for system in _pairs(program, dependence) or ():
        extend(system, ())
    return frozenset(found)


def check(tree: Tree) -> None:
    """Check that a loop tree executes dependent iterations in order.

    Raises:
        IllegalScheduleError: it does not.
        ScheduleError: an extent is a symbol.
    """
    program = tree.program
    _check_reductions(tree)
    for dependence in dependences(program):
        common = _common(tree, dependence.source, dependence.sink)
        reason = _quick(tree, dependence, common)
        if reason is not None:
            reason = _exact(tree, dependence, common)
        if reason is not None:
            raise IllegalScheduleError(dependence.sink, dependence, reason)


def is_legal(tree: Tree) -> bool:
    """Whether a loop tree executes dependent iterations in order."""
    try:
        check(tree)
    except IllegalScheduleError:
        return False
    return True


def _check_reductions(tree: Tree) -> None:
    """No statement may access a sum inside the loops that accumulate it."""
    program = tree.program
    for number, statement in enumerate(program.statements):
        for loop in tree.path(number):
            reduced = program.axis[loop.axes[number]].kind == "reduce"
            if loop.parallel and reduced:
                raise IllegalScheduleError(
                    number, None, "a reduce loop is executed by several threads"
                )
            if not reduced:
                continue
            for other in loop.statements():
                targets = {access.buffer for access in program.statements[other].accesses}
                if other != number and statement.target in targets:
                    raise IllegalScheduleError(
                        other, None, f"'{statement.target}' is used inside the loop that sums it"
                    )


def _position(tree: Tree, common: Sequence[Loop], number: int) -> int:
    body = common[-1].body if common else tree.body
    return next(
        place for place, node in enumerate(body)
        if node == number or (isinstance(node, Loop) and number in node.axes)
    )  # fmt: skip


def _quick(tree: Tree, dependence: Dependence, common: Sequence[Loop]) -> str | None:
    """Return a possible violation according to the signs of distances; None if there is none."""
    source, sink = dependence.source, dependence.sink
    domains = tree.domains[source], tree.domains[sink]
    plain = _plain(tree.program)
    places: dict[tuple[str, str], tuple[int, int]] = {}
    levels: list[tuple[int, int, Loop]] = []
    for loop in common:
        axes = loop.axes[source], loop.axes[sink]
        sides = [domain.iterators[axis] for domain, axis in zip(domains, axes, strict=True)]
        name = loop.name.removesuffix("t") if loop.tile else loop.name
        factors = [side.factor(name) for side in sides]
        straight = all(len(side.terms) == 1 for side in sides) and factors[0] == factors[1]
        if not straight or sides[0].offset != sides[1].offset or abs(factors[0]) != 1:
            return "the order of iterations changes"
        pair = (
            _plain_name(plain, source, axes[0]), _plain_name(plain, sink, axes[1])
        )  # fmt: skip
        place, _ = places.setdefault(pair, (len(places), factors[0]))
        levels.append((place, factors[0], loop))
    names = tuple(places)
    found = directions(
        tree.program, dependence, tuple(n for n, _ in names), tuple(n for _, n in names)
    )
    follows = source == sink or _position(tree, common, source) < _position(tree, common, sink)
    for signs in found:
        options = [
            (0, signs[place] * factor) if loop.tile else (signs[place] * factor,)
            for place, factor, loop in levels
        ]
        for choice in itertools.product(*map(dict.fromkeys, options)):
            reason = _violation(choice, [loop for _, _, loop in levels], follows)
            if reason is not None:
                return reason
    return None


def _plain_name(plain: Tree, number: int, axis: str) -> str:
    ((name, _),) = plain.domains[number].iterators[axis].terms
    return name


def _violation(signs: Sequence[int], loops: Sequence[Loop], follows: bool) -> str | None:
    for sign, loop in zip(signs, loops, strict=True):
        if sign and loop.parallel:
            return f"iterations of the parallel loop {loop.name} depend on each other"
        if sign and loop.vector:
            return f"iterations of the vectorised loop {loop.name} depend on each other"
        if sign < 0:
            return f"the loop {loop.name} reverses the order of dependent iterations"
        if sign > 0:
            return None
    return None if follows else "a statement is executed before one that it depends on"


def _exact(tree: Tree, dependence: Dependence, common: Sequence[Loop]) -> str | None:
    """Search for dependent iterations whose order is reversed; return the violation."""
    source, sink = dependence.source, dependence.sink
    for system in _orders(tree.program, tree, dependence):
        if not feasible(system):
            continue
        equal: list[Index] = []
        for loop in common:
            distance = _minus(Index(((f">{loop.name}", 1),)), Index(((f"<{loop.name}", 1),)))
            backward = Index(tuple((n, -k) for n, k in distance.terms), -1)
            if feasible(system.plus(equal, [backward])):
                return f"the loop {loop.name} reverses the order of dependent iterations"
            forward = Index(distance.terms, -1)
            if (loop.parallel or loop.vector) and feasible(system.plus(equal, [forward])):
                return f"iterations of the loop {loop.name} depend on each other"
            equal.append(distance)
        follows = source == sink or _position(tree, common, source) < _position(tree, common, sink)
        if not follows and feasible(system.plus(equal)):
            return "a statement is executed before one that it depends on"
    return None


def feasible(system: _System) -> bool:
    """Whether integers satisfy a system; True if a long search finds neither."""
    zero, positive = list(system.zero), list(system.positive)
    while zero:
        equation = zero.pop()
        if not equation.terms:
            if equation.offset:
                return False
            continue
        divisor = math.gcd(*(k for _, k in equation.terms))
        if equation.offset % divisor:
            return False
        terms = tuple((n, k // divisor) for n, k in equation.terms)
        equation = Index(terms, equation.offset // divisor)
        unit = next(((n, k) for n, k in terms if abs(k) == 1), None)
        if unit is None:
            positive += [equation, Index(tuple((n, -k) for n, k in terms), -equation.offset)]
            continue
        name, factor = unit
        value = Index(
            tuple((n, -factor * k) for n, k in terms if n != name), -factor * equation.offset
        )
        zero = [e.substituted(name, value) for e in zero]
        positive = [e.substituted(name, value) for e in positive]
    return _satisfiable(positive)


def _satisfiable(constraints: Sequence[Index]) -> bool:
    if any(not c.terms and c.offset < 0 for c in constraints):
        return False
    names = sorted({n for c in constraints for n, _ in c.terms})
    bounds, ranges, possible = scan(constraints, names)
    if not possible or any(low > high for low, high in ranges.values()):
        return False
    tries = _MAX_TRIES

    def search(place: int, values: dict[str, int]) -> bool:
        nonlocal tries
        if place == len(names):
            return True
        bound = bounds[names[place]]
        low = max((-(-_at(b.value, values) // b.divisor) for b in bound.lower), default=0)
        high = min((_at(b.value, values) // b.divisor for b in bound.upper), default=low)
        for value in range(low, high + 1):
            tries -= 1
            if tries < 0 or search(place + 1, {**values, names[place]: value}):
                return True
        return False

    return search(0, {})


def _at(index: Index, values: dict[str, int]) -> int:
    return index.offset + sum(k * values[n] for n, k in index.terms)


__all__ = [
    "Dependence",
    "IllegalScheduleError",
    "ScheduleError",
    "check",
    "dependences",
    "dimensions",
    "directions",
    "is_legal",
]
