"""Random loop programs have legal schedules with equal results, and are timed in a child."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.codegen import why_no_compiler
from slipstream.codegen.compiler import compiler
from slipstream.codegen.legality import check
from slipstream.codegen.program import ProgramError, loads
from slipstream.codegen.schedule import ScheduleError, Tree
from slipstream.errors import ChildError, SlipstreamError
from slipstream.techniques.loops.dataset import distinct_schedules, generate_samples, read_samples
from slipstream.techniques.loops.generate import random_program
from slipstream.techniques.loops.programs import einsum, is_legal, schedule
from slipstream.techniques.loops.running import Runner

needs_compiler = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


@pytest.mark.parametrize("seed", range(12))
def test_programs_are_reproducible_and_their_schedules_are_legal(seed: int) -> None:
    program = random_program(random.Random(seed))
    assert program == random_program(random.Random(seed))
    for statement in program.statements:
        read_axes = {name for load in loads(statement.value) for name, _ in load.index.terms}
        sequential = {a for a in statement.axes if program.axis[a].kind == "sequential"}
        assert set(statement.axes) <= read_axes | sequential
    schedules = distinct_schedules(random.Random(seed), program, 6)
    trees = [Tree(program, schedule) for schedule in schedules]
    assert len({tree.key for tree in trees}) == len(trees)
    for tree in trees:
        check(tree)


@needs_compiler
def test_schedules_keep_the_results_of_the_program() -> None:
    with Runner(budget_s=0.05) as runner:
        for seed in range(5):
            program = random_program(random.Random(seed))
            schedules = distinct_schedules(random.Random(seed), program, 5)
            timings = runner.time(program, schedules)
            assert len(timings) == len(schedules)
            for timing in timings:
                assert timing.error <= 1e-3
                assert 0 < timing.ns == min(timing.halves)


@needs_compiler
def test_a_kernel_that_crashes_ends_only_the_child(tmp_path: Path) -> None:
    program = random_program(random.Random(0))
    crash = 'extern "C" void loops_0(void**, void*, int) { __builtin_trap(); }\n'
    compiler().build(crash, tmp_path / "crash.so")
    with Runner(budget_s=0.05) as runner:
        with pytest.raises(ChildError):
            runner.time_library(tmp_path / "crash.so", program, 1, seed=0)
        assert len(runner.time(program, distinct_schedules(random.Random(0), program, 1))) == 2


@needs_compiler
def test_generation_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert generate_samples(path, programs=1, schedules=2, budget_s=0.05) == 1
    first = path.read_text()
    path.write_text(first + '{"program":')
    assert generate_samples(path, programs=2, schedules=2, budget_s=0.05) == 1
    assert path.read_text().startswith(first)
    programs = [json.loads(line)["program"] for line in path.read_text().splitlines()]
    assert [measured.program.to_json() for measured in read_samples(path)] == programs


def test_generation_does_not_change_another_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("notes")
    with pytest.raises(SlipstreamError, match="does not hold measured programs"):
        generate_samples(path, programs=1, schedules=2)
    assert path.read_text() == "notes"


def test_a_missing_or_binary_file_of_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="there is no file"):
        list(read_samples(tmp_path / "missing.jsonl"))
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SlipstreamError, match="not a measured program"):
        list(read_samples(path))


@pytest.mark.parametrize(
    ("spec", "extents"),
    [("i->ii", {"i": 4}), ("ij->k", dict.fromkeys("ijk", 4)), ("i->i", {"i": 4.5})],
)
def test_a_sum_without_a_program_is_refused(spec: str, extents: dict[str, Any]) -> None:
    with pytest.raises(ProgramError):
        einsum(spec, **extents)


@pytest.mark.parametrize("text", ["unroll(i,k)", "unroll(k,0)", "unroll(k,k)", "vectorise(3)"])
def test_a_step_with_wrong_arguments_is_refused(text: str) -> None:
    program = einsum("ik,kj->ij", i=8, j=8, k=8)
    with pytest.raises(ScheduleError):
        is_legal(program, schedule(program, text))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"error": "the compiler timed out"}\n{"program": 1}\n')
    with pytest.raises(SlipstreamError, match="not a measured program") as error:
        list(read_samples(path))
    assert error.value.where == f"{path}:2"
