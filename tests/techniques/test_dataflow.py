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
