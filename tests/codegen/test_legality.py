"""Legality is what enumerating all iterations says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from loop_programs import matmul, seidel, tiny_program

from slipstream.codegen.legality import IllegalScheduleError, check, dependences, directions
from slipstream.codegen.program import Axis, Buffer, Index, Load, Program, Statement
from slipstream.codegen.schedule import (
    Fuse,
    Interchange,
    Loop,
    Parallel,
    Reverse,
    Schedule,
    ScheduleError,
    Shift,
    Step,
    Tile,
    Tree,
)  # fmt: skip


def instances(program: Program, number: int) -> Iterator[dict[str, int]]:
    axes = program.statements[number].axes
    for point in itertools.product(*(range(program.extents[a]) for a in axes)):
        yield dict(zip(axes, point, strict=True))


def at(index: Index, values: dict[str, int]) -> int:
    return index.offset + sum(k * values[name] for name, k in index.terms)


def solved(tree: Tree, number: int, values: dict[str, int]) -> dict[str, int]:
    """Loop iterators of an iteration; the iterators of the tests' schedules are shifted axes."""
    found: dict[str, int] = {}
    for axis, value in tree.domains[number].iterators.items():
        ((name, factor),) = value.terms
        found[name] = (values[axis] - value.offset) * factor
    for loop in tree.path(number):
        if loop.tile:
            found[loop.name] = found[loop.name.removesuffix("t")] // loop.tile
    return found


def position(tree: Tree, number: int, values: dict[str, int]) -> list[int]:
    """Time of an iteration, to be compared lexicographically."""
    iterators, time = solved(tree, number, values), []
    body = tree.body
    for loop in tree.path(number):
        time += [body.index(loop), iterators[loop.name]]
        body = loop.body
    return [*time, body.index(number)]


def brute_force(tree: Tree) -> bool:
    """Whether every pair of conflicting iterations keeps its order."""
    program, plain = tree.program, Tree(tree.program)
    by_element: dict[tuple[str, int], list[tuple[bool, int, dict[str, int]]]] = {}
    for number, statement in enumerate(program.statements):
        for values in instances(program, number):
            for n, access in enumerate(statement.accesses):
                key = access.buffer, at(access.index, values)
                by_element.setdefault(key, []).append((n == 0, number, values))
    for accesses in by_element.values():
        for (writes, a, x), (overwrites, b, y) in itertools.combinations(accesses, 2):
            commute = a == b and program.statements[a].reduce is not None and all(
                x[n] == y[n] for n in program.statements[a].axes
                if program.axis[n].kind != "reduce"
            )  # fmt: skip
            if not (writes or overwrites) or commute or (a == b and x == y):
                continue
            before = position(plain, a, x) < position(plain, b, y)
            if before != (position(tree, a, x) < position(tree, b, y)):
                return False
    return True


def random_steps(rng: random.Random, program: Program) -> list[Step]:
    steps: list[Step] = []
    if len(program.statements) > 1 and rng.random() < 0.8:
        if rng.random() < 0.3:
            steps.append(Shift(1, rng.choice(program.statements[1].axes), rng.choice((-1, 1, 2))))
        steps.append(Fuse(0, 1, rng.randint(1, 3)))
    number = rng.randrange(len(program.statements))
    axes = program.statements[number].axes
    if len(axes) > 1:
        steps.append(Interchange(number, *rng.sample(axes, 2)))
    if rng.random() < 0.3:
        steps.append(Reverse(number, rng.choice(axes)))
    if rng.random() < 0.7:
        some = tuple(rng.sample(axes, rng.randint(1, len(axes))))
        steps.append(Tile(number, some, tuple(rng.choice((2, 3)) for _ in some)))
    return steps


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 1), pytest.param(1000, 2, marks=pytest.mark.full)]
)
def test_accepted_schedules_are_those_that_keep_every_order(
    count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, rejected, needless, accepted = random.Random(seed), 0, 0, 0
    while accepted + rejected < count:
        program = tiny_program(rng, monkeypatch)
        if sum(len(list(instances(program, n))) for n in range(len(program.statements))) > 300:
            continue
        schedule = Schedule(tuple(random_steps(rng, program))).canonical(program)
        try:
            tree = Tree(program, schedule)
        except ScheduleError:
            continue
        try:
            check(tree)
        except IllegalScheduleError as error:
            rejected += 1
            # Uses of a sum inside the loops that accumulate it are refused by a simpler rule.
            needless += error.dependence is not None and brute_force(tree)
        else:
            accepted += 1
            assert brute_force(tree), (program, schedule)
    assert min(accepted, rejected) > count // 10
    assert needless <= count // 100


def test_signs_of_a_sweep() -> None:
    program = seidel(3, 4, 5)
    names = ("t.0", "i.0", "j.0")
    signs = {s for d in dependences(program) for s in directions(program, d, names, names)}
    assert {(0, 0, 1), (0, 1, 0), (1, -1, 0), (1, 0, -1)} <= signs
    assert all(next(s for s in vector if s) > 0 for vector in signs)


def test_violations_name_the_statement_and_the_dependence() -> None:
    with pytest.raises(IllegalScheduleError, match="reverses the order") as caught:
        check(Tree(seidel(2, 4, 4), Schedule((Interchange(0, "t", "i"),))))
    assert caught.value.statement == 0
    assert str(caught.value.dependence) == "statement 0 -> statement 0 through 'a'"
    with pytest.raises(IllegalScheduleError, match=r"loop i\.0 depend on each other"):
        check(Tree(seidel(2, 4, 4), Schedule((Parallel(0, "i"),))))
    with pytest.raises(IllegalScheduleError, match="reduce loop"):
        check(Tree(matmul(4, 4, 4), Schedule((Parallel(0, "k"),))))


def test_a_free_axis_with_a_dependence_is_refused() -> None:
    a = Buffer("a", (9,), role="inout")
    value = Load("a", Index((("i", 1),)))
    statement = Statement("a", Index((("i", 1),), 1), value, ("i",))
    with pytest.raises(IllegalScheduleError, match="free axis 'i' depend"):
        dependences(Program((a,), (Axis("i", 8),), (statement,)))


def test_loops_of_a_fused_nest_alternate() -> None:
    """A consumer of neighbours can be fused only if it is shifted."""
    a, b, c = Buffer("a", (10,)), Buffer("b", (10,), role="out"), Buffer("c", (9,), role="out")
    program = Program(
        (a, b, c), (Axis("i", 9), Axis("j", 9)),
        (Statement("b", b.at("i"), Load("a", a.at("i")), ("i",)),
         Statement("c", c.at("j"), Load("b", b.at({"j": 1, "": 1})), ("j",))),
    )  # fmt: skip
    with pytest.raises(IllegalScheduleError):
        check(Tree(program, Schedule((Fuse(0, 1),))))
    tree = Tree(program, Schedule((Shift(1, "j", 1), Fuse(0, 1))))
    check(tree)
    assert isinstance(tree.body[0], Loop)
    assert list(tree.body[0].statements()) == [0, 1]
