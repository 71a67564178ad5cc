"""`Editor`: what edits change, and what they preserve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import GraphError
from slipstream.graph import PROVENANCES, Call, Editor, Graph, TensorSpec, load, replay, save
from slipstream.provenance import Provenance
from small_graphs import graph_of, graphs

MICRO = Provenance.MICROBENCHMARK


def timeline(graph: Graph) -> bytes:
    line = replay(graph)
    return line.start_ns.tobytes() + line.end_ns.tobytes() + np.float64(line.step_ns).tobytes()


def provenance(graph: Graph, task: int) -> Provenance:
    return PROVENANCES[graph.tasks.provenance[task]]


@given(graphs())
@settings(max_examples=60)
def test_an_empty_edit_gives_an_equal_timeline(graph: Graph) -> None:
    assert timeline(Editor(graph, "none").apply("nothing")) == timeline(graph)


@given(graphs(), st.data())
@settings(max_examples=60)
def test_insert_then_remove_restores_the_timeline(graph: Graph, data: st.DataObject) -> None:
    task = data.draw(st.integers(0, len(graph) - 1))
    before = data.draw(st.booleans())
    edit = Editor(graph, "one")
    edit.insert(task, "new", 123.0, MICRO, before=before, gap_ns=7.0)
    longer = edit.apply("put in")
    longer.check()
    place = task if before else task + 1
    assert longer.string(longer.tasks.name[place]) == "new"
    undo = Editor(longer, "two")
    undo.remove(place)
    assert timeline(undo.apply("take out")) == timeline(graph)


@given(graphs(), st.data())
@settings(max_examples=60)
def test_the_original_is_untouched(graph: Graph, data: st.DataObject) -> None:
    columns = {name: column.copy() for name, column in graph.tasks.columns().items()}
    tasks = st.integers(0, len(graph) - 1)
    edit = Editor(graph, "much")
    edit.set_duration(data.draw(tasks), 5.0, MICRO)
    edit.scale(data.draw(tasks), 0.5, MICRO)
    edit.remove(data.draw(tasks))
    edit.insert(data.draw(tasks), "new", 1.0, MICRO)
    edited = edit.apply("much")
    edited.check()
    assert all((graph.tasks.columns()[name] == column).all() for name, column in columns.items())
    assert "new" not in graph.strings
    assert len(edited) == len(graph)


def test_an_inserted_task_lengthens_its_lane_by_its_duration_and_gap() -> None:
    graph = graph_of([(0, 10, 1), (0, 20, 2)])
    edit = Editor(graph, "t")
    edit.insert(0, "cast", 4.0, MICRO, gap_ns=3.0)
    edited = edit.apply("a cast")
    assert replay(edited).step_ns == replay(graph).step_ns + 7
    assert provenance(edited, 1) is MICRO
    assert edited.tasks.lane.tolist() == [0, 0, 0]


def test_tasks_inserted_at_one_position_keep_their_order() -> None:
    graph = graph_of([(0, 10, 0)])
    edit = Editor(graph, "t")
    for name in ("first", "second"):
        edit.insert(0, name, 1.0, MICRO, before=True)
    edit.insert(0, "third", 1.0, MICRO)
    edited = edit.apply("three")
    names = [edited.string(name) for name in edited.tasks.name]
    assert names == ["first", "second", "task 0", "third"]


def test_edits_and_provenance_are_recorded() -> None:
    graph = graph_of([(0, 10, 0), (0, 20, 0), (0, 5, 0)])
    edit = Editor(graph, "amp:bf16")
    edit.set_duration(0, 5.0, MICRO, spread=0.1)
    edit.scale(1, 2.0, Provenance.ASSUMED)
    edited = edit.apply("two changed")
    assert [provenance(edited, t) for t in range(3)] == [
        MICRO, Provenance.ASSUMED, provenance(graph, 2),
    ]  # fmt: skip
    assert edited.tasks.duration_ns.tolist() == [5, 40, 5]
    assert edited.tasks.spread[0] == 0.1
    (note,) = edited.edits
    assert (note.technique, note.what, note.tasks) == ("amp:bf16", "two changed", 2)
    assert Editor(edited, "more").apply("again").edits[0] == note


def test_a_new_call_applies_to_the_edited_task_only() -> None:
    spec = TensorSpec("bfloat16", (2,), (1,))
    call = Call("aten::relu(Tensor self) -> Tensor", (spec,), (spec,))
    graph = graph_of([(0, 10, 0), (0, 20, 0)])
    edit = Editor(graph, "t")
    edit.set_duration(1, 2.0, MICRO, call=call)
    edited = edit.apply("one")
    assert edited.tasks.call.tolist() == [-1, 0]
    assert edited.calls == (call,)


def test_removal_passes_an_edge_on() -> None:
    # a -> b -> c over three lanes; without b, c still waits for a and for both delays.
    graph = graph_of([(0, 10, 0), (1, 5, 0), (2, 1, 0)], [(0, 1, 2), (1, 2, 3)])
    edit = Editor(graph, "t")
    edit.remove(1)
    assert replay(edit.apply("b")).start_ns.tolist() == [0, 15]


def test_removal_of_a_chain_passes_its_edges_on() -> None:
    graph = graph_of([(0, 10, 0), (1, 5, 0), (2, 5, 0), (3, 1, 0)], [(0, 1), (1, 2), (2, 3)])
    edit = Editor(graph, "t")
    edit.remove(1)
    edit.remove(2)
    assert replay(edit.apply("b and c")).start_ns.tolist() == [0, 10]


def test_waiters_of_a_removed_task_wait_for_its_predecessor_on_the_lane() -> None:
    # A stream runs k then r; the host waits for r. Without r it must still wait for k.
    graph = graph_of([(0, 10, 0), (0, 5, 0), (1, 1, 0)], [(1, 2)])
    edit = Editor(graph, "t")
    edit.remove(1)
    assert replay(edit.apply("r")).start_ns.tolist() == [0, 10]


def test_followers_of_a_removed_task_wait_for_its_causes() -> None:
    graph = graph_of([(0, 10, 0), (1, 5, 0), (1, 1, 0)], [(0, 1)])
    edit = Editor(graph, "t")
    edit.remove(1)
    assert replay(edit.apply("r")).start_ns.tolist() == [0, 10]


@given(graphs(), st.data())
@settings(max_examples=100)
def test_removal_is_never_slower_and_preserves_every_order(
    graph: Graph, data: st.DataObject
) -> None:
    """An independent reference: tasks ordered by a path remain ordered."""
    removed = data.draw(st.sets(st.integers(0, len(graph) - 1)))
    edit = Editor(graph, "t")
    for task in removed:
        edit.remove(task)
    edited = edit.apply("some")
    edited.check()
    remaining = [t for t in range(len(graph)) if t not in removed]
    old = reachable(graph)[np.ix_(remaining, remaining)]
    assert (reachable(edited) == old).all()
    if remaining:
        assert replay(edited).end_ns.max() <= replay(graph).end_ns.max()


def reachable(graph: Graph) -> np.ndarray:
    n = len(graph)
    reach = np.zeros((n, n), bool)
    within = graph.edges.lag == 0
    reach[graph.edges.source[within], graph.edges.target[within]] = True
    for i in range(n):
        for j in range(i + 1, n):
            reach[i, j] |= bool(graph.tasks.lane[i] == graph.tasks.lane[j])
    for middle in range(n):
        reach |= np.outer(reach[:, middle], reach[middle])
    return reach


@pytest.mark.parametrize("time_ns", [-1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(time_ns: float) -> None:
    edit = Editor(graph_of([(0, 1, 0)]), "t")
    with pytest.raises(GraphError):
        edit.set_duration(0, time_ns, MICRO)
    with pytest.raises(GraphError):
        edit.insert(0, "new", time_ns, MICRO)
    with pytest.raises(GraphError):
        edit.insert(0, "new", 1.0, MICRO, gap_ns=time_ns)


@pytest.mark.parametrize("task", [-1, 1])
def test_a_nonexistent_task_is_refused(task: int) -> None:
    edit = Editor(graph_of([(0, 1, 0)]), "t")
    for change in (
        lambda: edit.set_duration(task, 1.0, MICRO),
        lambda: edit.scale(task, 1.0, MICRO),
        lambda: edit.remove(task),
        lambda: edit.insert(task, "new", 1.0, MICRO),
    ):
        with pytest.raises(GraphError, match="no task"):
            change()


@given(graph=graphs())
@settings(max_examples=30, deadline=None)
def test_an_edited_graph_can_be_saved(
    graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    edit = Editor(graph, "t")
    edit.insert(0, "new", 1.0, MICRO)
    edited = edit.apply("one")
    path = tmp_path_factory.mktemp("graph") / "edited.slipgraph"
    save(edited, path)
    assert load(path) == edited


def test_an_inserted_call_has_no_form_at_another_number_of_samples() -> None:
    def relu(rows: int) -> Call:
        spec = TensorSpec("float32", (rows, 3), (3, 1))
        return Call("aten::relu(Tensor self) -> Tensor", (spec,), (spec,))

    graph = graph_of([(0, 10, 1), (0, 20, 2)], calls=(relu(4),), shrunk=(relu(2),))
    edit = Editor(graph, "one")
    edit.insert(0, "new", 1.0, MICRO, call=relu(8))
    edit.set_duration(1, 5.0, MICRO, call=relu(6))
    edited = edit.apply("two calls")
    edited.check()
    assert edited.shrunk == (relu(2), None, None)
    unrecorded = Editor(graph_of([(0, 10, 1)], calls=(relu(4),)), "one")
    unrecorded.set_duration(0, 5.0, MICRO, call=relu(6))
    assert unrecorded.apply("a call").shrunk == ()


def test_a_removed_task_cannot_be_connected() -> None:
    edit = Editor(graph_of([(0, 1, 0), (1, 1, 0), (1, 1, 0)]), "late")
    edit.remove(1)
    for ends in ((0, 1), (1, 0)):
        with pytest.raises(GraphError, match=r"\btask 1\b.*\bremoved\b"):
            edit.connect(*ends)
    with pytest.raises(GraphError, match="task -1"):
        edit.connect(-1, 2)
    edit.connect(0, 2)
    with pytest.raises(GraphError, match=r"\btask 2\b.*\bconnected\b"):
        edit.remove(2)
    replay(edit.apply("the rest"))
