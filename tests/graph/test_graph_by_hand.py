"""Manual edits: tasks chosen by their properties, and lanes with priorities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cluster import Collective
from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.graph import Exchange, Graph, StepPhase, replay, schedule
from slipstream.provenance import Provenance
from slipstream.workload import build_from
from small_graphs import graph_of, graphs
from tiny_models import parts, record


@pytest.fixture(scope="module")
def step() -> Graph:
    return record(build_from(parts("conv"), (), 0, "conv"))


def test_halving_the_chosen_tasks_shortens_the_step_accordingly(step: Graph) -> None:
    edit = step.what_if("halved")
    chosen = edit.select(op="aten::*convolution*", phase="backward")
    assert len(chosen)
    for task in chosen:
        assert "convolution" in step.string(step.tasks.name[task])
        assert step.tasks.phase[task] == StepPhase.BACKWARD
    chosen.scale(0.5)
    faster = edit.apply("convolutions twice as fast")
    saved = step.tasks.duration_ns[chosen.tasks].sum() / 2
    assert replay(step).step_ns - replay(faster).step_ns == pytest.approx(
        saved, abs=2 * len(chosen)
    )
    assert faster.edits[-1].tasks == len(chosen)
    assert faster.edits[-1].technique == "halved"


def test_conditions_are_combined(step: Graph) -> None:
    edit = step.what_if()
    every = set(edit.select())
    assert every == set(range(len(step)))
    phases = [set(edit.select(phase=phase.name.lower())) for phase in StepPhase]
    assert set.union(*phases) == every
    assert sum(map(len, phases)) == len(every)
    long = edit.select(where=lambda task: step.tasks.duration_ns[task] > 1e3)
    assert set(long) == set(np.flatnonzero(step.tasks.duration_ns > 1e3).tolist())
    assert not len(edit.select(op="no such operator"))
    modules = {step.string(m) for m in step.tasks.module.tolist()} - {""}
    assert all(len(edit.select(module=module)) for module in modules)


def test_chosen_tasks_can_get_a_time_and_be_removed(step: Graph) -> None:
    edit = step.what_if()
    update = edit.select(phase="optimizer").set_duration(5.0)
    found = edit.apply("set")
    assert (found.tasks.duration_ns[update.tasks] == 5.0).all()
    again = found.what_if()
    again.select(phase="optimizer").remove()
    assert len(again.apply("without update")) == len(step) - len(update)


def test_an_unknown_phase_is_named(step: Graph) -> None:
    with pytest.raises(InvalidArgumentError, match="phase: 'sideways'"):
        step.what_if().select(phase="sideways")
    with pytest.raises(InvalidArgumentError, match="kind: 'thing'"):
        step.what_if().select(kind="thing")


def test_a_lane_takes_the_most_urgent_ready_task() -> None:
    # One task on lane 0 makes three tasks of lane 1 ready together; the last one is awaited.
    rows = [(0, 10, 0), (1, 30, 0), (1, 20, 0), (1, 10, 0), (0, 5, 0)]
    graph = graph_of(rows, [(0, 1), (0, 2), (0, 3), (3, 4)])
    assert replay(graph).end_ns[4] == 75
    first = schedule(graph, graph.lanes[1], lambda task: task, "the last first")
    first.check()
    assert first.tasks.duration_ns.tolist() == [10, 10, 20, 30, 5]
    assert replay(first).end_ns[4] == 25
    back = schedule(first, graph.lanes[1], lambda task: task, "unchanged")
    assert replay(back).end_ns[4] == 75


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_another_order_preserves_every_task_and_dependency(graph: Graph, random: object) -> None:
    lane = graph.lanes[int(graph.tasks.lane[0])]
    values = np.random.default_rng(len(graph)).random(len(graph))
    found = schedule(graph, lane, lambda task: float(values[task]), "shuffled")
    found.check()
    replay(found)
    assert sorted(found.tasks.duration_ns.tolist()) == sorted(graph.tasks.duration_ns.tolist())
    assert len(found.edges) == len(graph.edges)
    assert sorted(found.memory.nbytes.tolist()) == sorted(graph.memory.nbytes.tolist())
    same = schedule(graph, lane, lambda task: 0.0, "ties keep their order")
    assert len(same) == len(graph)


def test_impossible_orders_are_named() -> None:
    graph = graph_of([(0, 1, 0), (0, 2, 0)])
    with pytest.raises(InvalidArgumentError, match="'gpu'"):
        schedule(graph, "gpu", lambda task: 0.0, "no")
    with pytest.raises(InvalidArgumentError, match=r"\btask 0\b"):
        schedule(graph, graph.lanes[0], lambda task: float("nan"), "no")
    edit = graph.what_if()
    with pytest.raises(GraphError, match="every task exactly once"):
        edit.reorder(np.array([0, 0]))
    edit.scale(0, 0.5, Provenance.USER)
    edit.reorder(np.array([1, 0]))
    with pytest.raises(GraphError, match="reordered"):
        edit.remove(0)
    assert edit.apply("swapped").tasks.duration_ns.tolist() == [2.0, 0.5]


@given(graphs())
@settings(max_examples=60)
def test_equally_urgent_tasks_keep_their_order(graph: Graph) -> None:
    for lane, name in enumerate(graph.lanes):
        names = graph.tasks.name[graph.tasks.lane == lane]
        found = schedule(graph, name, lambda task: 1.0, "unchanged")
        scheduled = found.tasks.name[found.tasks.lane == lane]
        ready = replay(found).start_ns[found.tasks.lane == lane]
        # The first ready task runs first; ties keep their original order.
        at = {int(index): place for place, index in enumerate(names)}
        for begin in np.unique(ready):
            places = [at[int(index)] for index in scheduled[ready == begin]]
            assert places == sorted(places)


def test_ties_among_many_ready_tasks_keep_their_order() -> None:
    # Twenty of zero length, all ready together, of two priorities: NumPy's default sort mixes them.
    graph = graph_of([(0, 5, 0), *[(1, 1, 0)] * 40], [(0, task) for task in range(1, 41)])
    found = schedule(graph, graph.lanes[1], lambda task: task % 2, "odd ones first")
    order = [graph.strings[name] for name in found.tasks.name.tolist()]
    odd, even = [f"task {n}" for n in range(1, 41, 2)], [f"task {n}" for n in range(2, 41, 2)]
    assert [name for name in order if name != "task 0"] == odd + even


@pytest.mark.parametrize("place", ["ready", "awaited"])
@pytest.mark.parametrize("task", [-2, 2])
def test_an_exchange_of_nonexistent_tasks_is_refused(place: str, task: int) -> None:
    graph = graph_of([(0, 1, 0), (1, 1, 0)])
    row = Exchange(1, 0, -1, Collective("all_reduce", 8.0), (), 0.0, 0.0, "")
    replace(graph, exchanges=(row,)).check()
    with pytest.raises(GraphError, match="an exchange refers to"):
        replace(graph, exchanges=(replace(row, **{place: task}),)).check()
