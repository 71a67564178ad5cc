"""The cost model of loops, texts of schedules, and the search."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream as ss
from slipstream.codegen import why_no_compiler
from slipstream.codegen.compiler import compiler
from slipstream.codegen.schedule import Tree
from slipstream.errors import ChildError, SlipstreamError, UsageError
from slipstream.techniques.loops.boosting import fit
from slipstream.techniques.loops.dataset import Measured, distinct_schedules
from slipstream.techniques.loops.features import NAMES, features
from slipstream.techniques.loops.model import part_of
from slipstream.techniques.loops.searching import execute_candidates

loops = ss.loops
needs_compiler = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


def product(n: int = 64) -> ss.loops.Program:
    return loops.einsum("ik,kj->ij", i=n, j=n, k=n)


def sweep() -> ss.loops.Program:
    a = loops.Buffer("a", (66,), role="inout")
    value = loops.apply("add", loops.Load("a", a.at("i")), loops.Load("a", a.at({"i": 1, "": 2})))
    axes = loops.Axis("t", 8, "sequential"), loops.Axis("i", 64, "sequential")
    statement = loops.Statement("a", a.at({"i": 1, "": 1}), value, ("t", "i"))
    return loops.Program((a,), axes, (statement,))


def test_trees_fit_a_product_of_columns() -> None:
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (2000, 5)).astype(np.float32)
    target = np.sign(rows[:, 1]) * (rows[:, 3] > 0.3)
    forest = fit(rows, lambda sums: (sums - target, np.ones(len(sums))), 80, rng, columns=1.0)
    assert np.abs(forest(rows) - target).mean() < 0.1
    assert set(np.unique(forest.features)) >= {1, 3}


def test_features_describe_the_innermost_loop_and_equal_trees_equally() -> None:
    program = product()
    plain, swapped, same = (
        Tree(program, loops.schedule(program, text) if text else None)
        for text in ("", "interchange(j,k)", "interchange(k,j)")
    )
    rows, owner = features([plain, swapped, same])
    assert owner.tolist() == [0, 1, 2]
    assert np.isfinite(rows).all()
    values = [dict(zip(NAMES, row, strict=True)) for row in rows]
    assert (values[0]["reduced_0"], values[0]["far_0"], values[0]["unit_0"]) == (1, 1, 1)
    assert (values[1]["reduced_0"], values[1]["unit_0"], values[1]["write_unit_0"]) == (0, 1, 1)
    np.testing.assert_array_equal(rows[1], rows[2])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("tile(i,j,8,16)+vectorise(j)", [["Tile", 0, ["i", "j"], [8, 16]], ["Vectorise", 0, "j"]]),
        (" unroll(k, 4) ", [["Unroll", 0, "k", 4]]),
        ("interchange(i,j)@0", [["Interchange", 0, "i", "j"]]),
        ("fuse(0,1,2)", [["Fuse", 0, 1, 2]]),
    ],
)
def test_texts_of_schedules(text: str, steps: list[Any]) -> None:
    schedule = loops.schedule(product(), text)
    assert schedule.to_json() == steps
    assert loops.schedule(product(), str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [("tile(i,8,8)", "not a step"), ("tile(z,8)", "no axis 'z'"), ("speed(i)", "not a step"),
     ("tile", "not a step"), ("unroll(k)", "not a step")],
)  # fmt: skip
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(loops.ScheduleError, match=message):
        loops.schedule(product(), text)


def test_predictions_are_intervals_and_nothing_changes_nothing() -> None:
    program, model = product(256), loops.CostModel.load()
    texts = ("interchange(j,k)", "tile(k,256)")
    better, nothing = model.predict(program, [loops.schedule(program, t) for t in texts])
    # Products with contiguous inner loops are several times as fast.
    assert better.speedup > 2
    assert better.low < better.speedup < better.high
    assert (nothing.low, nothing.speedup, nothing.high) == (1, 1, 1)


def test_what_cannot_be_predicted_is_named() -> None:
    model, program = loops.CostModel.load(), sweep()
    with pytest.raises(loops.IllegalScheduleError, match="reverses") as caught:
        model.predict(program, [loops.schedule(program, "interchange(t,i)")])
    assert "statement 0" in str(caught.value.where)
    with pytest.raises(SlipstreamError, match="one thread"):
        model.predict(product(), [loops.schedule(product(), "parallel(i)")])
    table, words = loops.Buffer("table", (5, 4)), loops.Buffer("words", (6,), "int64")
    out = loops.Buffer("out", (6, 4), role="out")
    load = loops.Load("table", table.at(0, "h", through=("words", words.at("i"))))
    statement = loops.Statement("out", out.at("i", "h"), load, ("i", "h"))
    axes = loops.Axis("i", 6), loops.Axis("h", 4)
    with pytest.raises(SlipstreamError, match="not affine") as error:
        loops.autoschedule(loops.Program((table, words, out), axes, (statement,)), execute=0)
    assert error.value.where == "statement 0 (of out)"


def measured(count: int) -> list[Measured]:
    """Return programs with times that depend on the innermost loop only."""
    found = []
    for seed in range(count):
        rng = random.Random(seed)
        program = loops.random_program(rng)
        schedules = tuple(distinct_schedules(rng, program, 5))
        rows, owner = features([Tree(program, s) for s in schedules])
        column = {name: rows[:, n].astype(float) for n, name in enumerate(NAMES)}
        row_ns = 2 ** column["iterations"] * np.where(column["write_unit_0"] > 0, 1.0, 4.0)
        ns = np.bincount(owner, row_ns)
        found.append(Measured(program, schedules, tuple(ns), (0.0,) * len(ns)))
    return found


def test_a_model_learns_from_programs_and_is_stored(tmp_path: Path) -> None:
    samples = measured(90)
    assert {part_of(m.program) for m in samples} == {"train", "calibrate", "evaluate"}
    model, accuracy = loops.train(samples, trees=60)
    assert accuracy.programs == sum(part_of(m.program) == "evaluate" for m in samples)
    assert accuracy.median < 0.1
    assert accuracy.spearman > 0.8
    path = tmp_path / "model.npz"
    model.save(path)
    loaded = loops.CostModel.load(path)
    assert loops.evaluate(loaded, samples) == accuracy
    assert loops.evaluate(loaded, samples[:3], part=None).programs == 3
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SlipstreamError):
        loops.CostModel.load(tmp_path / "missing.npz")
    with pytest.raises(SlipstreamError, match="too few"):
        loops.train(samples[:3])


def test_the_search_returns_legal_schedules_and_code() -> None:
    for program in (product(128), sweep()):
        result = loops.autoschedule(program, beam=4, execute=0)
        assert result.scored > 10
        for candidate in result.candidates:
            assert loops.is_legal(program, candidate.schedule)
            assert candidate.measured is None
        assert result.best.predicted.speedup >= 1
        assert "loops_0" in result.code


@needs_compiler
def test_the_best_schedules_are_executed() -> None:
    result = loops.autoschedule(product(128), beam=4, execute=3, budget_s=0.1)
    speedups = [candidate.measured or 0.0 for candidate in result.candidates]
    assert len(speedups) == 4
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 1


@needs_compiler
def test_a_schedule_with_other_results_or_a_crash_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = product(16)
    step = loops.schedule(program, "interchange(i,j)")
    candidate = loops.Candidate(step, loops.Estimate(1.0, 1.0, 1.0))
    wrong = loops.Timing(1.0, (1.0, 1.0), math.inf)
    monkeypatch.setattr(loops.Runner, "time", lambda *_: [wrong, wrong])
    with pytest.raises(SlipstreamError, match="changes a result"):
        execute_candidates(program, [candidate])
    hangs = 'extern "C" void loops_0(void**, void*, int) { for (volatile int i = 0;; ) i = i; }\n'
    compiler().build(hangs, tmp_path / "hangs.so")
    with loops.Runner(timeout_s=1.0) as runner, pytest.raises(ChildError):
        runner.time_library(tmp_path / "hangs.so", program, 1, seed=0)


def test_programs_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "nests.py"
    path.write_text(
        "from slipstream import loops\n"
        "product = loops.einsum('ik,kj->ij', i=8, j=8, k=8)\n"
        "def function(): return product\nnumber = 3\n"
    )
    expected = loops.einsum("ik,kj->ij", i=8, j=8, k=8)
    assert loops.read_program(f"{path}:product") == expected
    assert loops.read_program(f"{path}:function") == expected
    (tmp_path / "p.json").write_text(expected.key)
    assert loops.read_program(str(tmp_path / "p.json")) == expected
    with pytest.raises(UsageError, match="is a int"):
        loops.read_program(f"{path}:number")
    with pytest.raises(UsageError, match="does not name"):
        loops.read_program("product")
    with pytest.raises(loops.ProgramError, match="no extent"):
        loops.einsum("ik,kj->ij", i=8)
    with pytest.raises(loops.ProgramError, match="sum of products"):
        loops.einsum("ik,kj", i=8)
