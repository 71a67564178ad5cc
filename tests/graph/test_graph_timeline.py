"""Replay: the timeline of a graph against sums and timelines by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from slipstream.errors import GraphError
from slipstream.graph import Edges, Graph, replay
from slipstream.native import RESOLUTION_NS
from small_graphs import graph_of, graphs


@given(graphs(most_lanes=1))
def test_one_lane_takes_the_sum_of_durations_and_gaps(graph: Graph) -> None:
    # A delay could hold up the lane.
    graph = replace(graph, edges=Edges.none())
    total = graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum()
    assert replay(graph).step_ns == pytest.approx(total, abs=RESOLUTION_NS * 2 * len(graph))


def test_two_lanes_with_edges_match_a_timeline_by_hand() -> None:
    # lane 0:  a 0-10, gap 2, c 12-17      lane 1:  b waits for a: 10-30, then e waits for c
    graph = graph_of([(0, 10, 2), (1, 20, 0), (0, 5, 0), (1, 4, 0)], [(0, 1), (2, 3)])
    line = replay(graph)
    assert line.start_ns.tolist() == [0, 10, 12, 30]
    assert line.end_ns.tolist() == [10, 30, 17, 34]


def test_an_edge_delays_by_its_delay() -> None:
    line = replay(graph_of([(0, 10, 0), (1, 1, 0)], [(0, 1, 7)]))
    assert line.start_ns.tolist() == [0, 17]


def test_a_lagging_edge_gates_the_next_step() -> None:
    # Lane 0 could start its next step at 10; it must wait for lane 1's task, done at 40.
    graph = graph_of([(0, 10, 0), (1, 30, 0)], [(0, 1), (1, 0, 0, 1)])
    assert replay(graph).step_ns == 40


def test_without_the_lagging_edge_steps_overlap() -> None:
    graph = graph_of([(0, 10, 0), (1, 30, 0)], [(0, 1)])
    assert replay(graph).step_ns == 30


def test_an_edge_against_the_order_of_a_lane_is_a_cycle() -> None:
    with pytest.raises(GraphError, match="task 0"):
        replay(graph_of([(0, 1, 0), (0, 1, 0)], [(1, 0)]))


def test_a_cycle_across_lanes_is_named() -> None:
    with pytest.raises(GraphError, match="task"):
        replay(graph_of([(0, 1, 0), (1, 1, 0)], [(0, 1), (1, 0)]))


@given(graphs())
@settings(max_examples=50)
def test_a_step_takes_at_least_the_work_of_its_busiest_lane(graph: Graph) -> None:
    line = replay(graph)
    work = np.bincount(graph.tasks.lane, graph.tasks.duration_ns, minlength=len(graph.lanes))
    assert line.lane_busy_ns == pytest.approx(work, abs=RESOLUTION_NS * len(graph))
    assert line.end_ns.max() >= work.max() - RESOLUTION_NS * len(graph)


@given(graphs())
@settings(max_examples=50)
def test_every_task_starts_after_what_it_waits_for(graph: Graph) -> None:
    line = replay(graph)
    edges = graph.edges
    within = edges.lag == 0
    ready = line.end_ns[edges.source[within]] + edges.delay_ns[within]
    assert (line.start_ns[edges.target[within]] >= ready - 2 * RESOLUTION_NS).all()
