"""The nests of ``slipstream bench loops`` are legal as written, and have faster schedules."""

from __future__ import annotations

import pytest

from slipstream.codegen.legality import check
from slipstream.codegen.schedule import Tree
from slipstream.techniques import loops
from slipstream_bench.systems.loops.kernels import KERNELS, chain


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_programs(name: str) -> None:
    program = KERNELS[name]()
    check(Tree(program))
    assert loops.Program.from_json(program.to_json()) == program


def test_the_chain_has_three_statements_and_a_search() -> None:
    program = chain()
    assert [len(statement.axes) for statement in program.statements] == [4, 3, 3]
    result = loops.autoschedule(program, beam=2, execute=0)
    assert result.best.predicted.speedup > 1
