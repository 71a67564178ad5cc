"""Generated C++ computes what the interpreter of programs computes, in every legal schedule."""

from __future__ import annotations

import random

import numpy as np
import pytest
from interpreter import run
from loop_programs import arrays_of, executed, matmul, seidel, tiny_program

from slipstream.codegen.legality import IllegalScheduleError, check
from slipstream.codegen.program import (
    Axis,
    Buffer,
    Draw,
    Index,
    Load,
    Program,
    Statement,
    Symbol,
    apply,
)  # fmt: skip
from slipstream.codegen.schedule import (
    Interchange,
    Parallel,
    Schedule,
    ScheduleError,
    Skew,
    Tile,
    Tree,
    Unroll,
    Vectorise,
)  # fmt: skip
from slipstream.codegen.walker import source
from slipstream.techniques.loops.generate import random_schedule


@pytest.mark.parametrize("seed", range(24))
def test_random_schedules_of_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    program = tiny_program(rng, monkeypatch)
    trees = [Tree(program), *(Tree(program, random_schedule(rng, program)) for _ in range(6))]
    arrays = arrays_of(program)
    expected = run(program, {name: array.copy() for name, array in arrays.items()})
    for result in executed(trees, arrays):
        for name, array in expected.items():
            np.testing.assert_allclose(result[name], array, rtol=1e-9)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule((Interchange(0, "j", "k"), Interchange(0, "i", "k"), Tile(0, ("i", "j"), (4, 8)),
                  Unroll(0, "i", 4), Vectorise(0, "j"))),
        Schedule((Tile(0, ("i", "j", "k"), (3, 5, 2)), Vectorise(0, "k"), Parallel(0, "i"))),
        Schedule((Interchange(0, "i", "k"),)),
    ],
)  # fmt: skip
def test_matmul_with_incomplete_tiles(schedule: Schedule) -> None:
    program = matmul(9, 21, 7)
    arrays = arrays_of(program)
    (result,) = executed([Tree(program, schedule)], arrays)
    a, b = arrays["a"].reshape(9, 7), arrays["b"].reshape(7, 21)
    np.testing.assert_allclose(result["c"].reshape(9, 21), a @ b, rtol=1e-5)


def test_tiles_of_a_sum_over_decreasing_addresses() -> None:
    a, out = Buffer("a", (8, 256)), Buffer("out", (8,), role="out")
    value = Load("a", a.at("i", {"j": -1, "": 255}))
    statement = Statement("out", out.at("i"), value, ("i", "j"), "sum")
    program = Program((a, out), (Axis("i", 8), Axis("j", 256, "reduce")), (statement,))
    arrays = arrays_of(program)
    for size in (4, 8, 16):
        tree = Tree(program, Schedule((Tile(0, ("j",), (size,)),)))
        (result,) = executed([tree], arrays)
        np.testing.assert_allclose(result["out"], arrays["a"].reshape(8, 256).sum(1), rtol=1e-5)


def test_skewed_and_tiled_sweeps_are_executed_in_order() -> None:
    program = seidel(3, 9, 11)
    steps = (Skew(0, "t", "i"), Skew(0, "t", "j"), Tile(0, ("t", "i", "j"), (2, 4, 4)))
    tree = Tree(program, Schedule(steps))
    check(tree)
    arrays = arrays_of(program)
    (result,) = executed([tree], arrays)
    np.testing.assert_allclose(result["a"], run(program, arrays)["a"], rtol=1e-6)
    with pytest.raises(IllegalScheduleError, match="reverses"):
        check(Tree(program, Schedule((Tile(0, ("t", "i", "j"), (2, 4, 4)),))))


def test_a_symbolic_extent_a_restricted_domain_and_an_indirect_row() -> None:
    table, words = Buffer("table", (Symbol("rows"), 4)), Buffer("words", (6,), "int64")
    out = Buffer("out", (Symbol("n"), 4), role="out")
    axes = (Axis("i", Symbol("n")), Axis("h", 4))
    index = table.at(0, "h", through=("words", words.at("i")))
    # Only for h <= i.
    statement = Statement("out", out.at("i", "h"), Load("table", index), ("i", "h"),
                          where=(Index((("i", 1), ("h", -1))),))  # fmt: skip
    program = Program((table, words, out), axes, (statement,))
    symbols = {"rows": 5, "n": 6}
    arrays = arrays_of(program, symbols) | {"words": np.array([4, 0, 3, 3, 1, 2])}
    (result,) = executed([Tree(program)], arrays, symbols)
    expected = np.tril(arrays["table"].reshape(5, 4)[arrays["words"]])
    np.testing.assert_array_equal(result["out"].reshape(6, 4), expected)
    np.testing.assert_array_equal(run(program, arrays, symbols)["out"], result["out"])


def test_random_numbers_are_refused_with_the_statement() -> None:
    seed, out = Buffer("seed", (2,), "int64"), Buffer("out", (8,), role="out")
    drawn = Draw(0.5, "seed", Index((("i", 1),)))
    statement = Statement("out", out.at("i"), apply("mul", drawn, 2.0), ("i",))
    program = Program((seed, out), (Axis("i", 8),), (statement,))
    with pytest.raises(ScheduleError, match="random numbers") as caught:
        source([Tree(program)])
    assert caught.value.where == "statement 0 (of out)"
