"""The loop form: its table of operations, its invariants, and its JSON."""

from __future__ import annotations

import json
import math
import random

import pytest
from loop_programs import matmul, seidel

from slipstream.codegen.ops import OPS, Argument, folded
from slipstream.codegen.program import (
    Axis,
    Buffer,
    Const,
    Index,
    Load,
    Program,
    ProgramError,
    Statement,
    apply,
    substituted,
)  # fmt: skip
from slipstream.codegen.schedule import (
    Fuse,
    Interchange,
    Reverse,
    Schedule,
    ScheduleError,
    Shift,
    Step,
    Tile,
    Tree,
    Unroll,
    Vectorise,
)  # fmt: skip
from slipstream.techniques.loops.generate import random_program, random_schedule


def test_every_operation_names_all_of_its_arguments() -> None:
    for op in OPS.values():
        for text in (op.c, op.triton):
            assert all(f"{{{n}}}" in text for n in range(op.arity))
            assert f"{{{op.arity}}}" not in text


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", (None, 0.0), Argument(0)),
        ("sub", (0.0, None), Argument(1, negative=True)),
        ("mul", (None, 1.0), Argument(0)),
        ("mul", (None, 0.0), None),
        ("div", (1.0, 0.0), math.inf),
        ("where", (0.0, None, 2.0), Argument(2)),
        ("sigmoid", (-1000.0,), 0.0),
        ("lt", (1.0, 2.0), 1.0),
    ],
)
def test_constants_fold_where_every_value_allows_it(
    name: str, arguments: tuple[float | None, ...], result: object
) -> None:
    assert folded(name, arguments) == result


def test_terms_of_an_absent_child_disappear() -> None:
    left, right = Load("left", Index()), Load("right", Index())
    gate = apply("sigmoid", apply("add", left, right))
    state = apply("add", apply("mul", gate, left), apply("mul", gate, right))
    absent = Const(0.0, absent=True)
    assert substituted(state, {left: absent, right: absent}) == Const(0.0, absent=True)
    folded = substituted(state, {right: absent})
    assert folded == apply("mul", apply("sigmoid", left), left)
    # A 0 that is a value stays a factor, since the other one may be infinite.
    assert substituted(state, {right: Const(0.0)}) != folded


def test_programs_and_schedules_survive_json() -> None:
    rng = random.Random(3)
    for _ in range(20):
        program = random_program(rng)
        schedule = random_schedule(rng, program)
        again = Program.from_json(json.loads(program.key))
        assert again == program
        assert hash(again) == hash(program)
        assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def program_with(**changes: object) -> Program:
    """A program of one statement with some of its parts replaced."""
    a, out = Buffer("a", (8,)), Buffer("out", (8,), role="out")
    parts = {
        "target": "out", "index": Index((("i", 1),)), "value": Load("a", Index((("i", 1),))),
        "axes": ("i",), "reduce": None,
    } | changes  # fmt: skip
    axes = (Axis("i", 8), Axis("j", 2), Axis("k", 3, "reduce"))
    return Program((a, out), axes, (Statement(**parts),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": Load("a", Index((("i", 1),), 1))}, "indices 1 to 8 of 'a' exceed its 8"),
        ({"value": Load("b", Index())}, "there is no buffer 'b'"),
        ({"value": Load("a", Index((("j", 1),)))}, "not an axis of the statement"),
        ({"target": "a"}, "'a' cannot be written"),
        ({"index": Index()}, "write the same element"),
        ({"axes": ("i", "j")}, "write the same element"),
        ({"axes": ("i", "k")}, "reduction 'None' over axes"),
        ({"axes": ("i", "x")}, "there is no axis 'x'"),
        ({"value": Load("a", Index((), 0, ("a", Index())))}, "is float32"),
    ],
)
def test_broken_programs_are_refused_with_the_place(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        program_with(**changes)
    assert caught.value.where == f"statement 0 (of {changes.get('target', 'out')})"


def test_what_is_not_a_program_is_refused() -> None:
    for value in (None, [], {}, {"buffers": [["a"]]}, {"buffers": [], "axes": [], "statements": 3}):
        with pytest.raises(ProgramError):
            Program.from_json(value)
    for value in (None, [["Melt", 0]], [["Tile", 0]], [["Interchange", 0, 1]]):
        if value != [["Interchange", 0, 1]]:
            with pytest.raises(ScheduleError):
                Schedule.from_json(value)


def test_canonical_schedules_have_one_form() -> None:
    program = matmul(16, 32, 8)
    steps = (
        Interchange(0, "i", "j"), Interchange(0, "i", "j"), Tile(0, ("i", "j", "k"), (16, 8, 1)),
        Unroll(0, "j", 64), Vectorise(0, "k"), Unroll(0, "i", 1), Shift(0, "i", 0),
    )  # fmt: skip
    assert Schedule(steps).canonical(program) == Schedule(
        (Tile(0, ("j",), (8,)), Unroll(0, "j", 8), Vectorise(0, "k"))
    )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Interchange(0, "t", "x"),), "no axis 'x'"),
        ((Interchange(3, "t", "i"),), "there is no statement 3"),
        ((Fuse(0, 1),), "there is no statement 1"),
        ((Tile(0, ("i",), (2,)), Tile(0, ("j",), (2,))), "already tiled"),
        ((Vectorise(0, "i"),), "not an innermost loop"),
    ],
)
def test_steps_that_do_not_fit_are_refused(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        Tree(seidel(2, 4, 4), Schedule(steps))
    assert caught.value.where == str(Schedule(steps[-1:]))


def test_reduce_axes_are_not_reversed() -> None:
    """The order does not matter, and gcc 12.2 vectorises some such sums wrongly."""
    with pytest.raises(ScheduleError, match="'k' is a reduce axis"):
        Tree(matmul(4, 4, 4), Schedule((Reverse(0, "k"),)))
