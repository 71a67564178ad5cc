"""Users of a storage, and the allocation that its number refers to at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.errors import GraphError
from slipstream.graph import Allocations, Edges, Editor, Graph, Tasks, unique_in_order
from slipstream.graph.graph import cached_per_graph
from slipstream.graph.uses import uses_of
from slipstream.provenance import Provenance

_TASKS, _STORAGES, _ALLOCATIONS = 30, 5, 40


def _drawn(seed: int) -> Graph:
    """Return tasks with arbitrary storages, and allocations of arbitrary lifetimes."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, _TASKS)
    producer = rng.integers(-1, _TASKS, _ALLOCATIONS)
    release = np.minimum(producer + rng.integers(0, 6, _ALLOCATIONS), _TASKS - 1)
    release[rng.random(_ALLOCATIONS) < 0.1] = -1
    return Graph(
        tasks=Tasks(**{name: np.zeros(_TASKS, dtype) for name, dtype in Tasks.dtypes.items()}),
        edges=Edges.none(),
        strings=("",),
        calls=(),
        operand_start=np.append(0, np.cumsum(counts)),
        operands=rng.integers(-1, _STORAGES, counts.sum()).astype(np.int32),
        parameters=np.empty(0, np.int32),
        lanes=("host",),
        samples=0,
        memory=Allocations.of(
            np.ones(_ALLOCATIONS), rng.integers(-1, _STORAGES, _ALLOCATIONS),
            np.zeros(_ALLOCATIONS), producer, release,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_a_number_refers_to_the_first_allocation_that_covers_the_task(seed: int) -> None:
    graph = _drawn(seed)
    memory = graph.memory
    storages, tasks = np.divmod(np.arange(_STORAGES * _TASKS), _TASKS)
    found = uses_of(graph).allocations(storages, tasks)
    for storage, task, allocation in zip(storages, tasks, found, strict=True):
        covers = (memory.storage == storage) & (memory.producer <= task)
        covers &= (memory.release < 0) | (memory.release >= task)
        assert allocation == next(iter(np.flatnonzero(covers)), -1)
    assert uses_of(graph).allocations(np.array([-1]), np.array([3])) == [-1]


@pytest.mark.parametrize("seed", range(5))
def test_uses_are_the_distinct_tasks_with_that_operand(seed: int) -> None:
    graph = _drawn(seed)
    uses = uses_of(graph)
    for first, last in ((0, _TASKS), (7, 19), (19, 7)):
        storages = np.arange(-1, _STORAGES)
        spans = uses.between(storages, np.full(len(storages), first), np.full(len(storages), last))
        for asker, storage in enumerate(storages):
            expected = [
                t for t in range(first, min(last + 1, _TASKS)) if storage in graph.storages(t)
            ]
            assert uses.task[spans.place[spans.asker == asker]].tolist() == expected


def test_uses_by_some_tasks_are_distinguished() -> None:
    graph = _drawn(0)
    uses = uses_of(graph)
    chosen = np.flatnonzero(uses.task % 3 == 0)
    found = uses.among(uses.storage[chosen], uses.task[chosen])
    assert np.flatnonzero(found).tolist() == chosen.tolist()


def test_numbers_are_distinct_in_order_of_first_use() -> None:
    drawn = np.random.default_rng(0).integers(0, 50, 200)
    assert unique_in_order(drawn, 60).tolist() == list(dict.fromkeys(drawn.tolist()))
    assert len(unique_in_order(drawn[:0], 60)) == 0


def test_cached_results_of_a_graph_do_not_apply_to_a_changed_copy() -> None:
    calls = []

    @cached_per_graph
    def count(graph: Graph, more: int) -> int:
        calls.append(more)
        return len(graph.lanes) + more

    graph = _drawn(0)
    assert [count(graph, 1), count(graph, 1), count(graph, 2)] == [2, 2, 3]
    assert count(replace(graph, lanes=("a", "b")), 1) == 3
    assert calls == [1, 2, 1]


def test_many_durations_are_refused_if_one_is_invalid() -> None:
    edit = Editor(_drawn(0), "by hand")
    with pytest.raises(GraphError, match="task 4 cannot take -1"):
        edit.set_duration(np.array([3, 4]), [1.0, -1.0], Provenance.USER)
    with pytest.raises(GraphError, match=r"\btask 30\b.*\b30\b"):
        edit.remove(np.array([3, _TASKS]))


def test_many_insertions_keep_their_positions() -> None:
    edit = Editor(_drawn(0), "by hand")
    handles = edit.insert_all(
        np.array([5, 5, 2, 5]), "new", [1.0, 2.0, 3.0, 4.0], Provenance.USER,
        before=[True, False, True, True],
    )  # fmt: skip
    assert handles.tolist() == [30, 31, 32, 33]
    durations = edit.apply("put in").tasks.duration_ns
    assert durations.tolist() == [0, 0, 3, 0, 0, 0, 1, 4, 0, 2, *[0] * 24]
