"""Makers and readers of values, through views and reused storage numbers."""

from __future__ import annotations

from recorded import graph_of, images, inference, mlp

from slipstream.graph import StepPhase
from slipstream.techniques.dataflow import Dataflow


def test_every_input_was_made_before_it_is_read() -> None:
    graph = graph_of(images)
    flow = Dataflow(graph)
    for t in range(len(graph)):
        assert all(maker < t for maker in flow.makers[t])
        assert all(reader > t and t in flow.makers[reader] for reader in flow.readers[t])
        assert all(view in flow.looks and flow.makers[view][0] == t for view in flow.views[t])


def test_views_are_looked_through() -> None:
    graph = graph_of(mlp)
    flow = Dataflow(graph)
    forward = [
        t
        for t in range(len(graph))
        if graph.tasks.phase[t] == StepPhase.FORWARD and graph.string(graph.tasks.module[t])
    ]
    linear = [t for t in forward if graph.string(graph.tasks.name[t]) == "aten::addmm"]
    relu = next(t for t in forward if graph.string(graph.tasks.name[t]) == "aten::relu")
    assert linear[0] in flow.makers[relu]
    assert relu in flow.readers[linear[0]]
    # Its weight is transposed first, which is a view of what was there before the step.
    assert flow.makers[linear[0]] == (-1, -1, -1)


def test_an_inference_ends_with_what_nobody_reads() -> None:
    graph = graph_of(inference)
    assert Dataflow(graph).readers[len(graph) - 1] == []


def test_what_is_written_over_was_read_before() -> None:
    graph = graph_of(mlp)
    flow = Dataflow(graph)
    calls = [t for t in range(len(graph)) if flow.call(t) is not None and t not in flow.looks]
    updates = [t for t in calls if graph.tasks.phase[t] == StepPhase.OPTIMIZER]
    assert updates
    for t in calls:
        assert all(other < t and other not in flow.looks for other in flow.waits[t])
        assert {maker for maker in flow.makers[t] if maker >= 0} <= _all_waits(flow, t)
    for t in updates:
        written = set(flow.operands(t)[0]) if "!" in flow.call(t).op else set()
        for other in calls:
            if other < t and written & set(flow.operands(other)[0]):
                assert other in _all_waits(flow, t)


def _all_waits(flow: Dataflow, task: int) -> set[int]:
    found: set[int] = set()
    todo = [task]
    while todo:
        new = flow.waits[todo.pop()] - found
        found |= new
        todo += new
    return found
