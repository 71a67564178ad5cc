"""`measure.compare`: from two functions to a reliable verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import measure
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.measure import memory
from slipstream.measure.records import Environment, Verdict
from slipstream.measure.store import Store

ENVIRONMENT = Environment({}, "env")
HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}


def compare(arms, **options):
    # On a simulated clock a run is narrow enough long before, and deterministic.
    options = {"budget": "60s", "environment": ENVIRONMENT, **options}
    plan = measure.RunPlan(minimum_warmup_s=0.0, maximum_warmup_s=0.0, red_factor=1.0)
    options.setdefault("plan", plan)
    return measure.compare(arms, **options)


@pytest.fixture
def work(clock):
    """Return a function that takes this work on a clock that nothing else advances."""
    return lambda n: lambda: clock.work(10.0 * n)


def test_half_the_work_is_faster_by_that_ratio(work):
    result = compare({"base": work(40_000), "fast": work(20_000)})
    assert result.verdict is Verdict.FASTER
    low, high = result.ratio("fast", "base").ci
    assert 0.49 < low <= high < 0.51


def compare_really(arms, **options):
    """Compare with as many blocks on a busy machine as on an idle one."""
    plan = measure.RunPlan(
        minimum_warmup_s=0.0, maximum_warmup_s=0.0, maximum_blocks=20, red_factor=1.0
    )
    return compare(arms, plan=plan, budget="600s", **options)


def test_functions_are_really_timed():
    arms = {"base": lambda: sum(range(40_000)), "fast": lambda: sum(range(10_000))}
    claim = compare_really(arms, metrics=["cpu"]).ratio("fast", metric="cpu")
    # How certain that is, and so the verdict, depends on the machine.
    assert 0.05 < claim.ratio < 0.8


def test_a_waiting_arm_is_judged_by_wall_time(clock):
    result = compare({"base": lambda: clock.wait(6e6), "slow": lambda: clock.wait(9e6)})
    claim = result.ratio("slow")
    assert claim.metric == "wall"
    assert "waits" in claim.reason
    assert claim.verdict is Verdict.SLOWER


def test_workers_are_compared_like_functions():
    arms = [
        measure.WorkerArm(
            name, "workers:setup", "workers:sample", arguments={"work": n}, environment=HERE
        )
        for name, n in (("base", 400_000), ("fast", 100_000))
    ]
    assert 0.05 < compare_really(arms).ratio("fast").ratio < 0.8


def test_both_clocks_are_recorded_and_one_carries_the_claim(work):
    result = compare({"base": work(40_000), "fast": work(20_000)})
    assert {claim.metric for claim in result.claims if claim.arm == "fast"} == {"wall", "cpu"}
    assert sum(claim.carries for claim in result.claims) == 1


@pytest.mark.skipif(not memory.resettable(), reason="peaks cannot be reset here")
def test_peak_memory_is_that_of_a_call():
    # In a separate process: a long-running one may serve a call from memory that it
    # freed and still holds, so that the call needs no new memory.
    code = """
from slipstream.measure import compare

def needs(megabytes):
    return lambda: bytearray(megabytes << 20).count(0)

metrics = ["wall", "cpu", "peak_mem"]
result = compare({"base": needs(40), "lean": needs(20)}, metrics=metrics, budget=1.0)
claim = result.ratio("lean", metric="peak_mem")
print(claim.ratio, claim.verdict, claim.blocks)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ratio, verdict, blocks = done.stdout.split()
    assert float(ratio) == pytest.approx(0.5, rel=0.02)
    assert verdict == Verdict.FASTER
    assert blocks == "8"


def test_several_candidates_have_several_verdicts(work):
    result = compare({"base": work(20_000), "b": work(10_000), "c": work(40_000)})
    assert result.verdicts == {"b": Verdict.FASTER, "c": Verdict.SLOWER}
    with pytest.raises(InvalidArgumentError, match=r"use \.verdicts"):
        _ = result.verdict
    between = result.ratio("c", "b")
    assert 3 < between.ratio < 5
    assert "not corrected" in between.reason


def test_any_arm_may_be_the_baseline(work):
    result = compare({"fast": work(20_000), "base": work(40_000)}, baseline="base")
    assert result.ratio("fast").ratio < 0.7


def test_it_prints_and_saves_and_loads_from_the_store(tmp_path, work):
    result = compare({"base": work(40_000), "fast": work(20_000)})
    assert "fast" in str(result)
    identity = result.save(tmp_path / "r.db")
    with Store(tmp_path / "r.db") as store:
        again = measure.Comparison.of(store.load(identity))
        assert repr(again.claims) == repr(result.claims) == repr(store.claims(identity))


def test_a_store_keeps_it_while_it_runs(tmp_path, work):
    with Store(tmp_path / "r.db") as store:
        compare({"base": work(40_000), "fast": work(20_000)}, store=store)
        assert store.load("last").status == "complete"


def test_speed_without_quality_is_refused_for_techniques_that_change_numerics(work):
    arms = {"base": work(40_000), "fast": work(20_000)}
    with pytest.raises(InvalidArgumentError, match="'fast' changes numerics"):
        compare(arms, changes_numerics=["fast"])
    outcomes = {"base": [True, True, False, True], "fast": [True, False, False, True]}
    result = compare(arms, changes_numerics=["fast"], quality=outcomes)
    (row,) = (event.detail for event in result.experiment.events if event.kind == "quality")
    assert (row["lost"], row["gained"]) == (1, 0)


def test_arms_that_return_different_shapes_do_different_work():
    import numpy as np

    arms = {"base": lambda: np.ones((3, 4)), "fast": lambda: np.ones((3, 5))}
    with pytest.raises(InvalidArgumentError, match=r"shapes.*\(3, 4\).*\(3, 5\)"):
        compare(arms)


@pytest.mark.parametrize(
    ("arms", "options", "argument", "what"),
    [
        ({}, {}, "arms", ""),
        ({"a": print}, {}, "arms", ""),
        ({"a": print, "b": print}, {"budget": "0s"}, "budget", ""),
        ({"a": print, "b": print}, {"budget": -1}, "budget", ""),
        ({"a": print, "b": print}, {"budget": "soon"}, "budget", "'soon'"),
        ({"a": print, "b": print}, {"level": 1.0}, "level", "0 and 1"),
        ({"a": print, "b": print}, {"metrics": []}, "metrics", ""),
        ({"a": print, "b": print}, {"baseline": "c"}, "baseline", "'c'"),
        ({"a": print, "b": 3}, {}, "arm 'b'", ""),
    ],
)
def test_incomparable_arms_are_refused(arms, options, argument, what):
    with pytest.raises(InvalidArgumentError) as error:
        compare(arms, **options)
    assert error.value.argument == argument
    assert what in error.value.what


def test_an_unknown_arm_or_metric_is_named(work):
    result = compare({"base": work(40_000), "fast": work(20_000)})
    with pytest.raises(UnknownNameError, match="unknown arm 'fats'"):
        result.ratio("fats")
    with pytest.raises(UnknownNameError, match="unknown metric 'energy'"):
        result.ratio("fast", metric="energy")


def test_importing_measure_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from slipstream import measure; measure.phase;"
        "assert not {'torch', 'numpy', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves():
    for name in measure.__all__:
        assert getattr(measure, name) is not None
    with pytest.raises(AttributeError):
        _ = measure.nonsense
