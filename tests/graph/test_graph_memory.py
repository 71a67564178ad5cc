"""Allocations: validation, simulated lifetimes, and the effects of edits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import GraphError
from slipstream.graph import Allocations, Editor, Graph, Role, find_peak, load, replay, save
from slipstream.graph.values import stretches
from slipstream.native import changes_in_turn, heap_growth
from slipstream.native._heap import _reference
from slipstream.provenance import Provenance
from small_graphs import graph_of, graphs

MICRO = Provenance.MICROBENCHMARK
Row = tuple[int, int, int, int, int]
"""bytes, storage, role, producer, release"""


def with_memory(graph: Graph, *rows: Row) -> Graph:
    made = replace(graph, memory=Allocations.of(*zip(*rows, strict=True)))
    made.check()
    return made


def chain(n: int, **changes: Any) -> Graph:
    return graph_of([(0, 10, 1)] * n, **changes)


def rows(graph: Graph) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in graph.memory.columns().values()), strict=True))


@st.composite
def allocations(draw: st.DrawFn, n: int) -> list[Row]:
    ends = st.tuples(st.integers(-1, n - 1), st.integers(-1, n - 1))
    found = []
    for _ in range(draw(st.integers(1, 12))):
        producer, release = draw(ends)
        if 0 <= release < producer:
            producer, release = release, producer
        found.append((draw(st.integers(0, 1000)), draw(st.integers(-1, 5)), 7, producer, release))
    return found


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_peak_is_the_maximum_that_any_task_sees_alive(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    found = data.draw(allocations(n))
    graph = with_memory(chain(n), *found)
    alive = [
        sum(
            size
            for size, _, _, producer, release in found
            if producer <= t and (release < 0 or t <= release)
        )
        for t in range(n)
    ]
    line = replay(graph)
    assert line.peak_bytes == max(alive)
    times, level = line.memory_curve()
    changes = np.searchsorted(times, line.start_ns + 5, side="right")
    held = np.concatenate([[0], level])[changes]
    assert held.tolist() == alive


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_changes_in_task_order_are_those_in_order_of_time(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    lasts = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    graph = with_memory(graph_of([(0, each, 0) for each in lasts]), *data.draw(allocations(n)))
    memory, line = graph.memory, replay(graph)
    born, freed = memory.producer >= 0, memory.release >= 0
    times = np.concatenate([line.memory.birth_ns[0][born], line.memory.death_ns[0][freed]])
    changes = np.concatenate([memory.nbytes[born], -memory.nbytes[freed]])
    expected = changes[np.lexsort((changes, times))].tolist()
    assert line.memory_changes.tolist() == expected
    found = changes_in_turn(memory.nbytes, memory.producer, memory.release, n)
    assert found is None or found.tolist() == expected
    assert line.peak_bytes == line.memory.peak_bytes.max(initial=0)


@given(
    st.lists(st.integers(-50, 50), max_size=30),
    st.integers(0, 100),
    st.floats(0, 60),
)
def test_compiled_and_python_heaps_grow_equally(
    changes: list[int], begin: int, retained: float
) -> None:
    assert heap_growth(np.array(changes, np.int64), begin, retained) == _reference(
        changes, begin, retained
    )


def test_a_workspace_counts_even_for_a_task_of_zero_time() -> None:
    graph = with_memory(graph_of([(0, 10, 0), (0, 0, 5)]), (7, -1, 0, -1, -1), (100, -1, 7, 1, 1))
    assert replay(graph).peak_bytes == 107


def test_tasks_of_zero_time_hold_their_workspaces_sequentially() -> None:
    workspaces = (100, -1, 7, 0, 0), (100, -1, 7, 2, 2), (30, -1, 7, 0, 1)
    graph = with_memory(graph_of([(0, 0, 0), (0, 0, 0), (0, 0, 0)]), *workspaces)
    assert replay(graph).peak_bytes == 130


def test_simulated_times_decide_across_lanes() -> None:
    """Two lanes hold 100 bytes each: together, or sequentially if one waits."""
    memory = (100, -1, 7, 0, 0), (100, -1, 7, 1, 1)
    together = with_memory(graph_of([(0, 10, 0), (1, 10, 0)]), *memory)
    waiting = with_memory(graph_of([(0, 10, 0), (1, 10, 0)], [(0, 1)]), *memory)
    assert replay(together).peak_bytes == 200
    assert replay(waiting).peak_bytes == 100


def test_without_recorded_memory_there_is_no_peak() -> None:
    line = replay(chain(2))
    assert line.peak_bytes == 0
    assert [len(part) for part in line.memory_curve()] == [0, 0]
    with pytest.raises(GraphError, match="not recorded"):
        find_peak(line)


def test_the_peak_has_its_task_roles_and_modules() -> None:
    graph = chain(
        3,
        strings=("", "task 0", "task 1", "task 2", "encoder", "head"),
        operand_start=np.array([0, 0, 1, 1]),
        operands=np.array([9], np.int32),
    )
    graph.tasks.module[:] = [0, 4, 5]
    graph = with_memory(
        graph,
        (50, 9, Role.PARAMETER, -1, -1),
        (8, 3, Role.OPTIMIZER, -1, -1),
        (20, -1, Role.ACTIVATION, 1, 2),
        (30, -1, Role.TEMPORARY, 2, 2),
    )
    peak = find_peak(replay(graph))
    assert (peak.nbytes, peak.task, peak.before_bytes) == (108, 2, 58)
    assert peak.by_role == (
        (Role.PARAMETER, 50), (Role.TEMPORARY, 30), (Role.ACTIVATION, 20), (Role.OPTIMIZER, 8),
    )  # fmt: skip
    assert peak.by_module == (("encoder", 70), ("head", 30), ("(optimizer)", 8))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ((-1, 0, 0, 0, 0), "nbytes"),
        ((1, -2, 0, 0, 0), "storage"),
        ((1, 0, 8, 0, 0), "role"),
        ((1, 0, 0, 2, 0), "producer"),
        ((1, 0, 0, 0, -2), "release"),
        ((1 << 62, 0, 0, 0, 0), "nbytes"),
    ],
)
def test_an_impossible_allocation_is_named(row: Row, word: str) -> None:
    with pytest.raises(GraphError, match=f"allocation 0: {word}"):
        with_memory(chain(2), row)


def test_columns_of_different_lengths_are_refused() -> None:
    memory = replace(Allocations.of([1], [0], [0], [0], [0]), release=np.zeros(2, np.int32))
    with pytest.raises(GraphError, match="release"):
        replace(chain(1), memory=memory).check()


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_memory_is_stored_in_the_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    graph = with_memory(chain(4), *data.draw(allocations(4)))
    path = tmp_path_factory.mktemp("graph") / "m.slipgraph"
    save(graph, path)
    assert load(path) == graph


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_insert_then_remove_restores_memory(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    graph = with_memory(chain(n), *data.draw(allocations(n)))
    task, before = data.draw(st.integers(0, n - 1)), data.draw(st.booleans())
    edit = Editor(graph, "one")
    new = edit.insert(task, "new", 5.0, MICRO, before=before)
    edit.allocate(77, Role.TEMPORARY, new, new)
    longer = edit.apply("put in")
    longer.check()
    assert (77, -1, Role.TEMPORARY, *[task + (not before)] * 2) in rows(longer)
    undo = Editor(longer, "two")
    undo.remove(task + (not before))
    assert rows(undo.apply("take out")) == rows(graph)


def test_changes_of_size_and_lifetime() -> None:
    graph = with_memory(chain(3), (10, 1, 6, 0, 2), (20, 2, 6, 0, 2))
    edit = Editor(graph, "t")
    new = edit.insert(1, "cast", 1.0, MICRO)
    edit.resize(0, 5)
    edit.release_after(0, new)
    late = edit.allocate(4, Role.ACTIVATION, new, 2, storage=9)
    edit.release_after(late, -1)
    edited = edit.apply("changed")
    assert rows(edited) == [(5, 1, 6, 0, 2), (20, 2, 6, 0, 3), (4, 9, 6, 2, -1)]
    assert rows(graph) == [(10, 1, 6, 0, 2), (20, 2, 6, 0, 2)]


def test_allocations_of_removed_tasks_only_are_removed() -> None:
    operands = {"operand_start": np.array([0, 1, 2, 3, 4]), "operands": np.array([1, 2, 2, 3])}
    graph = with_memory(chain(4, **operands), (10, 2, 7, 1, 2), (5, -1, 7, 1, 1))
    edit = Editor(graph, "t")
    edit.remove(1)
    edit.remove(2)
    assert rows(edit.apply("gone")) == []


def test_a_later_owner_of_the_number_does_not_keep_an_extended_allocation() -> None:
    operands = {"operand_start": np.array([0, 1, 2, 3, 4]), "operands": np.array([2, 2, 2, 2])}
    graph = with_memory(chain(4, **operands), (10, 2, 7, 0, 1), (5, 2, 7, 2, 3))
    edit = Editor(graph, "t")
    edit.remove(0)
    edit.remove(1)
    edit.release_after(0, edit.insert(3, "last", 1.0, MICRO))
    assert rows(edit.apply("gone")) == [(5, 2, 7, 0, 1)]


def test_an_allocation_that_a_remaining_task_uses_moves_to_the_next_user() -> None:
    operands = {"operand_start": np.array([0, 0, 1, 2, 2]), "operands": np.array([2, 2])}
    graph = with_memory(chain(4, **operands), (10, 2, 7, 1, 3), (6, 4, 3, 1, -1))
    edit = Editor(graph, "t")
    edit.remove(1)
    assert rows(edit.apply("gone")) == [(10, 2, 7, 1, 2), (6, 4, 3, 1, -1)]


def test_frees_of_a_removed_task_move_to_its_predecessor_or_replacement() -> None:
    graph = with_memory(chain(4), (10, 2, 7, 0, 2))
    edit = Editor(graph, "t")
    edit.remove(2)
    assert rows(edit.apply("gone")) == [(10, 2, 7, 0, 1)]
    edit = Editor(graph, "t")
    edit.remove(2)
    edit.insert(2, "instead", 1.0, MICRO)
    assert rows(edit.apply("replaced")) == [(10, 2, 7, 0, 2)]


def test_a_repeated_task_has_the_operands_of_the_first() -> None:
    operands = {"operand_start": np.array([0, 1, 1, 1]), "operands": np.array([8])}
    edit = Editor(chain(3, **operands), "t")
    edit.scale(0, 2.0, MICRO)
    edit.repeat(0, 2, before=True)
    edited = edit.apply("again")
    edited.check()
    assert edited.string(edited.tasks.name[2]) == "task 0"
    assert edited.storages(2).tolist() == [8]
    assert edited.tasks.duration_ns.tolist() == [20, 10, 20, 10]


@pytest.mark.parametrize("task", [-2, 4])
def test_references_to_nothing_are_refused(task: int) -> None:
    edit = Editor(with_memory(chain(3), (10, 1, 6, 0, 2)), "t")
    edit.insert(0, "new", 1.0, MICRO)
    for change in (
        lambda: edit.allocate(1, Role.OTHER, task, 0),
        lambda: edit.allocate(1, Role.OTHER, 0, task),
        lambda: edit.release_after(0, task),
        lambda: edit.release_after(1, 0),
        lambda: edit.resize(1, 1),
        lambda: edit.resize(0, -1),
        lambda: edit.allocate(-1, Role.OTHER, 0, 0),
    ):
        with pytest.raises(GraphError):
            change()


def test_a_graph_of_schema_one_loads_without_memory(tmp_path: Path) -> None:
    import json
    import zipfile

    path, old = tmp_path / "new.slipgraph", tmp_path / "old.slipgraph"
    graph = chain(2)
    save(with_memory(graph, (1, 0, 0, 0, 0)), path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "meta.json":
                content = json.dumps({**json.loads(content), "schema": 1}).encode()
            if not name.startswith("memory/"):
                target.writestr(name, content)
    assert load(old) == graph


def test_columns_are_equal_in_chunks_and_one_by_one() -> None:
    graph = chain(40)
    counts = np.arange(40) % 3
    operands = np.arange(counts.sum(), dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)])
    graph = replace(graph, operand_start=starts, operands=operands)
    order = np.concatenate([np.arange(5, 40), [-1], np.arange(40), [-1], np.arange(20)])
    assert isinstance(stretches(order), list)
    found, joined = graph.gathered(order)
    for place, task in enumerate(order.tolist()):
        expected = graph.storages(task).tolist() if task >= 0 else []
        assert joined[found[place] : found[place + 1]].tolist() == expected
    for name, column in graph.tasks.take(order).columns().items():
        assert np.array_equal(column, getattr(graph.tasks, name)[order])
        assert column.dtype == getattr(graph.tasks, name).dtype


def test_at_the_peak_new_allocations_count_and_freed_ones_do_not() -> None:
    # Task 1 allocates 30 just as the 40 of task 0 are freed: at equal times frees come first.
    graph = with_memory(
        chain(3),
        (10, -1, Role.ACTIVATION, 0, 0),
        (60, -1, Role.ACTIVATION, 1, 2),
        (5, -1, Role.GRADIENT, 2, -1),
    )
    timeline = replay(graph)
    peak = find_peak(timeline)
    assert peak.nbytes == sum(nbytes for _, nbytes in peak.by_role)
    assert peak.nbytes == 65
    assert peak.by_role == ((Role.ACTIVATION, 60), (Role.GRADIENT, 5))


@given(graphs())
def test_roles_at_the_peak_add_up_to_it(graph: Graph) -> None:
    rng = np.random.default_rng(len(graph))
    rows = [
        (int(rng.integers(1, 100)), -1, int(rng.choice([Role.ACTIVATION, Role.TEMPORARY])), a, b)
        for a, b in (sorted(rng.integers(0, len(graph), 2).tolist()) for _ in range(12))
    ]
    graph = with_memory(graph, *rows) if len(graph) else graph
    if len(graph):
        peak = find_peak(replay(graph))
        assert peak.nbytes == sum(nbytes for _, nbytes in peak.by_role)
