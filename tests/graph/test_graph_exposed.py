"""The time that a step waits for communication, and the gradients it waits for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.cluster import Cluster, Collective, Group
from slipstream.graph import (
    Editor,
    Exchange,
    Graph,
    Kind,
    StepPhase,
    TensorSpec,
    exposed_by_module,
    exposed_stretches,
    insert_exchange,
    load,
    replace_tasks,
    replay,
    save,
)
from slipstream.graph.views.exposed import computing_lane
from slipstream.technique import combine, parse
from small_graphs import graph_of
from small_steps import FAST, context, tail_heavy
from small_steps import graph_of as step_of

PAIR = Group.of([0, 1])
BIG, SMALL = TensorSpec("float32", (300,), (1,)), TensorSpec("float32", (100,), (1,))


def exchange(task: int, modules: tuple[str, ...], lag: int = 0) -> Exchange:
    tensors = (BIG, SMALL)[: len(modules)]
    return Exchange(
        task, -1, -1, Collective("all_reduce", 1.0, PAIR), tensors, lag=lag, modules=modules
    )


def with_exchanges(graph: Graph, *rows: Exchange) -> Graph:
    kinds = graph.tasks.kind.copy()
    kinds[[row.task for row in rows]] = Kind.COMMUNICATION
    return replace_tasks(replace(graph, exchanges=rows), kind=kinds)


def test_only_unhidden_communication_counts() -> None:
    # a 0-10, its exchange 10-40 on lane 1; b 10-22 with a gap of 2 after it, c waits until 40.
    graph = graph_of([(0, 10, 0), (1, 30, 0), (0, 12, 2), (0, 5, 0)], [(0, 1), (1, 3)])
    timeline = replay(with_exchanges(graph, exchange(1, ("big", "small"))))
    (stretch,) = exposed_stretches(timeline)
    begin = stretch.begin_ns - float(timeline.schedule.step_end_ns[0])
    assert (stretch.task, stretch.exchange.task, begin, stretch.waited_ns) == (3, 1, 24, 16)
    assert exposed_by_module(timeline) == {"big": 12, "small": 4}


def test_the_next_step_may_wait_for_this_one() -> None:
    # Released at the end of b (15), 20 long, awaited by a of the next step.
    graph = graph_of([(0, 10, 0), (0, 5, 0), (1, 20, 0)], [(1, 2), (2, 0, 0.0, 1)])
    timeline = replay(with_exchanges(graph, exchange(2, ("big",), lag=1)))
    assert timeline.step_ns == 35
    assert exposed_by_module(timeline) == {"big": 20}


def test_a_helping_thread_waits_on_behalf_of_the_step() -> None:
    # The exchange (lane 1) is decoded on lane 2; that is what the last task waits for.
    graph = graph_of([(0, 10, 0), (1, 20, 0), (2, 7, 0), (0, 5, 0)], [(0, 1), (1, 2), (2, 3)])
    timeline = replay(with_exchanges(graph, exchange(1, ("big",))))
    assert exposed_by_module(timeline) == {"big": 27}


def test_other_waits_are_not_communication() -> None:
    # Lane 2 computes what the last task waits for, while an exchange ends earlier.
    graph = graph_of(
        [(0, 10, 0), (1, 3, 0), (2, 30, 0), (0, 30, 0), (0, 5, 0)], [(0, 1), (0, 2), (2, 3), (1, 4)]
    )
    assert exposed_stretches(replay(with_exchanges(graph, exchange(1, ("big",))))) == []


def test_exchanges_without_gradients_are_counted_by_name() -> None:
    graph = graph_of([(0, 10, 0), (1, 20, 0), (0, 5, 0)], [(0, 1), (1, 2)])
    timeline = replay(with_exchanges(graph, exchange(1, ())))
    name = graph.string(int(graph.tasks.name[1]))
    assert exposed_by_module(timeline) == {f"({name})": 20}


def test_a_step_on_one_device_waits_for_no_communication() -> None:
    timeline = replay(step_of("transformer"))
    assert exposed_stretches(timeline) == []
    assert exposed_by_module(timeline) == {}
    assert computing_lane(replay(graph_of([]))) == -1


SLOWER = Cluster.load("workers=2,link=20mbit,latency=50us")


@pytest.mark.parametrize(
    "text", ["ddp:2", "ddp:2,bucket_mb=0.02", "priority_sync:2,slice=5000", "adasum:2", "fsdp:2"]
)
@pytest.mark.parametrize("cluster", [SLOWER, FAST], ids=["slow", "fast"])
def test_all_parts_sum_to_the_step_minus_one_with_free_communication(
    text: str, cluster: Cluster
) -> None:
    graph = combine(tail_heavy(), parse(text), context(cluster))
    found = exposed_by_module(replay(graph))
    tasks = graph.tasks
    talks = tasks.kind == Kind.COMMUNICATION
    free = replace_tasks(graph, duration_ns=np.where(talks, 0.0, tasks.duration_ns))
    saved = replay(graph).step_ns - replay(free).step_ns
    assert sum(found.values()) == pytest.approx(saved, rel=1e-6, abs=1.0)


def test_gradients_needed_late_by_the_forward_pass_are_no_longer_exposed() -> None:
    # A link that takes about as long as the step computes.
    cluster = Cluster.load("workers=2,link=400mbit,latency=1us")
    ddp, priority = (
        exposed_by_module(replay(combine(tail_heavy(), parse(text), context(cluster))))
        for text in ("ddp:2", "priority_sync:2,slice=2000")
    )
    last = max(ddp, key=lambda layer: ddp[layer])
    assert last == "model.6"
    assert priority.get(last, 0.0) < 0.5 * ddp[last]


def test_encoding_on_a_thread_is_part_of_the_wait() -> None:
    graph = combine(tail_heavy(), parse("ddp:2+topk:0.1"), context(SLOWER))
    lane = computing_lane(replay(graph))
    chosen = graph.tasks.lane == lane
    computes = float((graph.tasks.duration_ns + graph.tasks.gap_ns)[chosen].sum())
    found = exposed_by_module(replay(graph))
    assert sum(found.values()) == pytest.approx(replay(graph).step_ns - computes, rel=1e-6)


def test_modules_are_stored_with_the_step(tmp_path: Path) -> None:
    graph = step_of("transformer")
    edit = Editor(graph, "by hand")
    last = int(np.flatnonzero(graph.tasks.phase == StepPhase.BACKWARD)[-1])
    insert_exchange(
        edit, FAST, Collective("all_reduce", 1600.0, PAIR), beside=last, ready=last, awaited=-1,
        tensors=(BIG, SMALL), modules=("big", "small"),
    )  # fmt: skip
    made = edit.apply("one")
    save(made, tmp_path / "one.slipgraph")
    (row,) = load(tmp_path / "one.slipgraph").exchanges
    assert row.modules == ("big", "small")
    plain = row.to_json()
    old = {name: value for name, value in plain.items() if name != "modules"}
    assert Exchange.from_json(old).modules == ()
    with pytest.raises(ValueError, match="1 modules for 2 tensors"):
        Exchange.from_json({**plain, "modules": ["big"]})
