"""The bench harness: ratios, their guards, and rows of them."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest

from slipstream_bench.harness import Ratio, guarded, paired, times_s
from slipstream_bench.rows import Bar


def work(count: int) -> int:
    return sum(range(count))


def ratio(*, trusted: bool | None = True) -> Ratio:
    return Ratio(2.0, 1.9, 2.1, 1.95, 2.05, 15, "cpu", 1.0, trusted, {"green": 15})


def test_a_ratio_is_that_of_the_work() -> None:
    taken = paired({"three": lambda: work(30_000), "one": lambda: work(10_000)}, blocks=12)
    found = taken.ratio("three", "one")
    assert found.value == pytest.approx(3.0, rel=0.2)
    assert found.low <= found.first <= found.third <= found.high
    assert found.n == 12
    assert found.guard == pytest.approx(1.0, rel=0.2)
    assert sum(found.gate.values()) == 12
    assert taken.minimum_s("three") <= taken.median_s("three")


def test_too_few_blocks_give_no_interval_and_an_undecided_guard() -> None:
    found = paired({"a": lambda: work(1000), "b": lambda: work(1000)}, blocks=3).ratio("a", "b")
    assert (found.n, found.trusted, found.data["low"], found.data["high"]) == (3, None, None, None)


def test_wall_time_counts_waiting_and_cpu_time_does_not() -> None:
    arms = {"waits": lambda: time.sleep(0.02), "computes": lambda: work(20_000)}
    wall = paired(arms, clock="wall", blocks=6).ratio("waits", "computes")
    assert wall.value > 2 * paired(arms, blocks=6).ratio("waits", "computes").value


def test_an_arm_is_called_once_per_sample_or_after_a_warm_up_call() -> None:
    calls = {"a": 0, "b": 0}

    def count(name: str) -> None:
        calls[name] += 1

    arms = {name: lambda name=name: count(name) for name in calls}
    paired(arms, blocks=4, once=True, settle_s=0.0)
    # In addition to the blocks, one call to warm up and one for the shape; each block has a guard.
    assert calls == {"a": 9, "b": 5}
    paired(arms, blocks=4, once=True, warm=True, settle_s=0.0)
    assert calls == {"a": 27, "b": 15}


def test_an_arm_that_raises_is_named_in_the_error() -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    with pytest.raises(Exception, match="'b' failed"):
        paired({"a": lambda: work(10), "b": fails, "c": lambda: work(10)}, blocks=2)


def test_times_of_one_function_have_one_entry_per_call() -> None:
    taken = times_s(lambda: work(10_000), 4)
    assert taken.shape == (4,)
    assert (taken > 0).all()


def test_a_row_of_a_ratio_carries_its_data_as_json() -> None:
    row = ratio().at_least("b", 1.5, detail="a sentence")
    assert (row.value, row.holds, row.n, row.target) == (2.0, True, 15, ">= 1.5")
    assert json.loads(json.dumps(row.data)) == row.data
    assert row.data["quartiles"] == [1.95, 2.05]
    assert ratio().at_most("b", 1.5).holds is False
    assert ratio().reported("b").holds is None


def test_a_row_whose_baseline_differs_from_itself_is_not_judged() -> None:
    row = ratio(trusted=False).at_least("b", 1.5)
    assert row.holds is None
    assert re.search(r"^not judged\b.*\bbaseline\b", row.detail)


@pytest.mark.parametrize(
    ("ratios", "broken", "judged"), [(5, 1, False), (30, 1, True), (30, 3, False)]
)
def test_some_of_many_guards_fail_by_chance(ratios: int, broken: int, judged: bool) -> None:
    row = replace(Bar("b", 1.0, "x", ">= 1", True), data={"more": 1})
    found = guarded(row, {str(n): ratio(trusted=n >= broken) for n in range(ratios)})
    assert (found.holds is True) == judged
    assert found.data["more"] == 1
    assert len(found.data["ratios"]) == ratios
