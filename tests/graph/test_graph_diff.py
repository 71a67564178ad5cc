"""The difference of two graphs, attributed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from slipstream.graph import Dependency, Graph, difference, replace_tasks
from slipstream.graph.views.diff import MIN_HALF_WIDTH
from small_graphs import graph_of, graphs


def _named(graph: Graph, names: list[str]) -> Graph:
    from dataclasses import replace

    strings = ("", *dict.fromkeys(names))
    column = np.array([strings.index(name) for name in names], np.int32)
    return replace(replace_tasks(graph, name=column), strings=strings)


def test_changes_are_attributed_to_operators() -> None:
    before = _named(graph_of([(0, 10, 2), (0, 20, 0), (0, 5, 0)]), ["mm", "relu", "mm"])
    after = _named(graph_of([(0, 14, 1), (0, 20, 0), (0, 5, 0)]), ["mm", "relu", "gelu"])
    found = difference(before, after)
    assert (found.before_ns, found.after_ns, found.change_ns) == (37, 40, 3)
    assert found.change == pytest.approx(3 / 37)
    rows = {row.name: row for row in found.rows["operator"]}
    assert rows["mm"].before_ns == 15
    assert rows["mm"].after_ns == 14
    assert (rows["mm"].tasks_before, rows["mm"].tasks_after) == (2, 1)
    assert rows["relu"].change_ns == -1  # its gap before it
    assert [row.name for row in found.added()] == ["gelu"]
    assert found.removed() == ()
    assert found.gaps_before_ns == {Dependency.THREAD_ORDER: 2}
    assert found.gaps_after_ns == {Dependency.THREAD_ORDER: 1}


def test_tasks_off_the_path_are_work_but_no_change() -> None:
    before = _named(graph_of([(0, 100, 0), (1, 10, 0)]), ["long", "short"])
    after = _named(graph_of([(0, 100, 0), (1, 30, 0)]), ["long", "short"])
    found = difference(before, after)
    short = next(row for row in found.rows["operator"] if row.name == "short")
    assert (found.change_ns, short.change_ns) == (0, 0)
    assert (short.work_before_ns, short.work_after_ns) == (10, 30)


@settings(max_examples=150)
@given(graphs(), graphs())
def test_changes_of_every_group_add_up(before: Graph, after: Graph) -> None:
    found = difference(before, after)
    for rows in found.rows.values():
        total = sum(row.change_ns for row in rows)
        assert total == pytest.approx(found.change_ns, abs=1e-2)


@given(graphs())
def test_a_graph_does_not_differ_from_itself(graph: Graph) -> None:
    found = difference(graph, graph)
    assert found.change_ns == 0
    assert all(row.change_ns == 0 and not row.status for row in found.rows["operator"])


def _recorded(spread: float = 0.0, **meta: object) -> Graph:
    graph = graph_of([(0, 100, 0), (0, 100, 0)], meta=meta)
    return replace_tasks(graph, spread=np.full(2, spread))


def test_the_interval_grows_with_disturbance_and_shrinks_with_steps() -> None:
    quiet = _recorded(aligned_steps=16)

    def width(other: Graph) -> float:
        return difference(quiet, other).half_width

    assert width(quiet) == pytest.approx(MIN_HALF_WIDTH, rel=0.01)
    assert width(_recorded(contended=True)) > 1.5 * width(quiet)
    assert width(_recorded(unaligned_share=0.1)) > 2 * width(quiet)
    few, many = (_recorded(0.3, aligned_steps=steps) for steps in (4, 64))
    assert width(few) > 2 * width(many) > 2 * width(quiet)
    shaky = {"relative_spread": 0.2}
    few, many = (_recorded(aligned_steps=steps, step_ns=shaky) for steps in (4, 64))
    assert width(few) > 2 * width(many) > 2 * width(quiet)


@pytest.mark.parametrize(
    ("after", "verdict"), [(100, "within noise"), (105, "slower"), (103, "within noise"),
                           (94, "faster")],
)  # fmt: skip
def test_a_change_counts_only_beyond_the_interval(after: float, verdict: str) -> None:
    found = difference(graph_of([(0, 100, 0)]), graph_of([(0, after, 0)]))
    assert found.verdict == verdict
    low, high = found.interval
    assert low < found.work_change < high
    assert found.work_change == pytest.approx(after / 100 - 1)
