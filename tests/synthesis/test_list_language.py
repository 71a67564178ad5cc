"""The list language: all kernels against the definition, and programs as Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.synthesis import Program
from slipstream.synthesis.kernels import FAMILY, Task, run
from slipstream.synthesis.language import FUNCTIONS, NAMES, Value
from slipstream_bench.systems.synthesis.reference import reference


def random_inputs(seed: int) -> tuple[Value, ...]:
    """Return two lists and a number: often small, sometimes of the whole range or empty."""
    generator = random.Random(seed)
    most = generator.choice((16, 64, 255))
    first, second = (
        [generator.randint(-most, most) for _ in range(generator.randint(0, 20))] for _ in range(2)
    )
    return first, generator.randint(-5, 25), second


def test_kernels_and_python_follow_the_definition() -> None:
    assert len(FUNCTIONS) == 41
    generator = np.random.default_rng(0)
    inputs = [random_inputs(seed) for seed in range(32)]
    for length in (1, 2, 3, 5, 10):
        programs = generator.integers(41, size=(300, length), dtype=np.uint8)
        if length == 1:
            programs[:41, 0] = range(41)
        first, *others = (
            run(Task(inputs, [0]), programs, number=n) for n in FAMILY.kernels.values()
        )
        for other in others:
            assert np.array_equal(first.counts, other.counts)
            assert np.array_equal(first.lists, other.lists)
        for at, row in enumerate(programs.tolist()):
            expected = [reference(row, values) for values in inputs]
            assert first.valid[at] == (expected[0] is not None)
            if first.valid[at]:
                assert [first.value(at, e) for e in range(len(inputs))] == expected
            assert _called(Program(tuple(row), (True, False, True)), inputs[0]) == expected[0]


def _called(program: Program, inputs: tuple[Value, ...]) -> Value | None:
    try:
        return program(*inputs)
    except SlipstreamError:
        return None


def test_source_computes_what_the_program_does() -> None:
    generator = np.random.default_rng(1)
    compared = 0
    for seed in range(400):
        program = Program(tuple(generator.integers(41, size=4).tolist()), (True, False, True))
        inputs = random_inputs(seed)
        result = _called(program, inputs)
        if result is not None:
            names: dict[str, object] = {}
            exec(program.python_source, names)
            assert names["program"](*inputs) == result  # type: ignore[operator]
            compared += 1
    assert compared > 100


def test_steps_that_do_nothing_are_left_out() -> None:
    program = Program(tuple(NAMES.index(name) for name in ("SORT", "SUM", "MAP *2", "HEAD")))
    assert list(program.live_steps) == [0, 2, 3]
    assert program.python_source == (
        "def program(xs):\n"
        "    v1 = sorted(xs)\n"
        "    v3 = [v * 2 for v in v1]\n"
        "    return v3[0] if v3 else 0\n"
    )


def test_calls_outside_the_language_name_step_and_result() -> None:
    program = Program((NAMES.index("SORT"), NAMES.index("MAP *4")))
    with pytest.raises(SlipstreamError, match=r"step 2, MAP \*4: the result contains 400"):
        program([100, 1])
    with pytest.raises(InvalidArgumentError, match="takes a list"):
        program(3)
