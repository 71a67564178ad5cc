"""Shards, sharded updates, grids and priorities: bytes, memory and hidden communication."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from slipstream.cluster import Cluster
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.graph import Graph, Kind, StepPhase, find_critical_path, replay
from slipstream.technique import parse, refusal
from slipstream.techniques.distributed.gradients import first_uses, gradients
from slipstream.verbs.predicting import predict
from small_steps import FAST, SLOW, Copies, context, graph_of, shared, tail_heavy

_N = 4
ALL = (
    "ddp:4", "ddp:4+sharded_update", "fsdp:4,stage=1", "fsdp:4,stage=2", "fsdp:4,unit_mb=0.01",
    "fsdp:4", "priority_sync:4", "priority_sync:4,slice=300", "ddp:4+two_d_allreduce:2",
)  # fmt: skip


def sent(graph: Graph) -> float:
    return sum(row.sent_bytes for row in graph.exchanges)


def gradient_bytes(graph: Graph) -> int:
    return sum(gradient.spec.nbytes for gradient in gradients(graph))


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("name", ["transformer", "dropout"])
def test_every_technique_gives_a_complete_graph_that_runs(name: str, text: str) -> None:
    graph = graph_of(name)
    made = shared(graph, SLOW, text)
    made.check()
    assert made.workers == _N
    timeline = replay(made)
    for row in made.exchanges:
        if row.lag == 0 and row.awaited >= 0:
            assert timeline.start_ns[row.awaited] >= timeline.end_ns[row.task]
    assert timeline.step_ns > replay(shared(graph, FAST, text)).step_ns
    path = find_critical_path(timeline)
    assert float(path.busy_ns.sum() + path.waited_ns.sum()) == pytest.approx(timeline.step_ns)


def test_bytes_equal_those_of_the_papers() -> None:
    """ZeRO 1 and 2 send as much as an all-reduce, ZeRO 3 half as much again (all but one unit)."""
    graph = graph_of("transformer")
    whole = 2 * (_N - 1) / _N * gradient_bytes(graph)
    for text in ("ddp:4", "ddp:4+sharded_update", "fsdp:4,stage=2", "priority_sync:4"):
        assert sent(shared(graph, SLOW, text)) == pytest.approx(whole), text
    units = shared(graph, SLOW, "fsdp:4,unit_mb=0.01")
    gathers = [r for r in units.exchanges if r.collective.kind == "all_gather"]
    scatters = [r for r in units.exchanges if r.collective.kind == "reduce_scatter"]
    assert len(gathers) == 2 * len(scatters) - 1
    last = scatters[0].collective.nbytes
    assert sent(units) == pytest.approx(1.5 * whole - (_N - 1) / _N * last)


def test_later_stages_need_less_memory() -> None:
    graph = graph_of("transformer")
    peaks = [
        replay(shared(graph, FAST, text)).peak_bytes
        for text in ("ddp:8", "fsdp:8,stage=1", "fsdp:8,stage=2", "fsdp:8,stage=3,unit_mb=0.005")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_the_update_is_divided() -> None:
    graph = graph_of("transformer")
    update = graph.tasks.phase == StepPhase.OPTIMIZER
    whole = float((graph.tasks.duration_ns + graph.tasks.gap_ns)[update].sum())
    made = shared(graph, FAST, "ddp:4+sharded_update")
    updates = (made.tasks.phase == StepPhase.OPTIMIZER) & (made.tasks.kind != Kind.COMMUNICATION)
    left = float((made.tasks.duration_ns + made.tasks.gap_ns)[updates].sum())
    assert left == pytest.approx(whole / _N)


def test_gathering_for_the_next_layer_is_hidden_behind_this_one() -> None:
    graph = tail_heavy()
    network = Cluster.load("workers=8,link=100gbit,latency=1us")
    made = shared(graph, network, "fsdp:4,unit_mb=0.005")
    timeline = replay(made)
    gathers = [r for r in made.exchanges if r.collective.kind == "all_gather"]
    compute = replay(shared(graph, FAST, "fsdp:4,unit_mb=0.005")).step_ns
    total = sum(float(made.tasks.duration_ns[r.task]) for r in made.exchanges)
    assert len(gathers) > 4
    assert timeline.step_ns - compute < 0.9 * total


def test_urgent_slices_overtake_and_a_layer_waits_for_its_own_gradients_only() -> None:
    graph = tail_heavy()
    spent = replay(graph).step_ns
    nbytes = gradient_bytes(graph)
    # Communication takes about as long as the step computes.
    rate = int(1.5 * nbytes / spent * 1e9 * 8 / 1e6)
    network = Cluster.load(f"workers=8,link={rate}mbit")
    by_priority = shared(graph, network, "priority_sync:4,slice=3000")
    whole = replay(shared(graph, network, "ddp:4")).step_ns
    assert replay(by_priority).step_ns < 0.9 * whole
    uses = first_uses(by_priority, StepPhase.FORWARD)
    assert all(row.lag == 1 for row in by_priority.exchanges)
    assert all(row.awaited <= max(uses.values()) for row in by_priority.exchanges)
    order = [row.awaited for row in sorted(by_priority.exchanges, key=lambda row: row.task)]
    assert order != sorted(order, reverse=True), "nothing overtook"
    names = [by_priority.string(int(n)) for n in by_priority.tasks.name]
    assert names.count("update") == len(gradients(graph))
    tasks = by_priority.tasks
    updates = np.array([name == "update" for name in names])
    whole = (graph.tasks.duration_ns + graph.tasks.gap_ns)[
        graph.tasks.phase == StepPhase.OPTIMIZER
    ].sum()
    assert float(tasks.duration_ns[updates].sum()) == pytest.approx(float(whole))
    assert not (by_priority.tasks.phase == StepPhase.OPTIMIZER).any()


def test_the_best_slice_size_gives_the_shortest_step() -> None:
    graph = tail_heavy()
    sizes = (12_500, 50_000, 200_000, 800_000, 3_200_000)
    every = [shared(graph, SLOW, f"priority_sync:4,slice={size}") for size in sizes]
    assert shared(graph, SLOW, "priority_sync:4") == min(every, key=lambda g: replay(g).step_ns)


def test_a_grid_helps_if_one_dimension_is_slower() -> None:
    """Hosts of eight joined by slower links: only an eighth of the bytes crosses them."""
    graph = graph_of("transformer")
    hosts = Cluster.load("h100x8-100gbe", hosts=4)
    flat = shared(graph, hosts, "ddp:32,algo=ring")
    grid = shared(graph, hosts, "ddp:32,algo=ring+two_d_allreduce")
    assert all(row.collective.algo == "2d" for row in grid.exchanges)
    busy = [
        float(g.tasks.duration_ns[g.tasks.kind == Kind.COMMUNICATION].sum()) for g in (flat, grid)
    ]
    assert busy[1] < busy[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharded_update", "combine it, for example ddp"),
        ("two_d_allreduce:2", "combine it, for example ddp"),
    ],
)
def test_alone_they_name_the_techniques_to_combine_with(text: str, message: str) -> None:
    (technique,) = parse(text)
    assert message in str(refusal(technique, graph_of("mlp")))


def test_an_invalid_grid_is_named() -> None:
    found = predict(
        graph_of("mlp"), ["ddp:4+two_d_allreduce:3", "ddp:4+two_d_allreduce"],
        durations=Copies(), cluster=FAST,  # type: ignore[arg-type]
    )  # fmt: skip
    assert re.search(r"\b3 rows\b", str(found[0].why_not))
    assert "form no grid" in str(found[1].why_not)


@pytest.mark.parametrize(
    "text",
    ["fsdp:1", "fsdp:4,stage=4", "fsdp:4,unit_mb=0", "priority_sync:4,slice=3",
     "priority_sync:1", "two_d_allreduce:-1"],
)  # fmt: skip
def test_invalid_settings_are_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse(text)


@pytest.mark.parametrize("text", ["ddp+fsdp", "fsdp+sharded_update", "ddp+priority_sync"])
def test_two_ways_to_distribute_one_step_conflict(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        parse(text)


def test_too_few_devices_are_named_before_anything_is_measured() -> None:
    class Never(Copies):
        def measure(self, calls: Any, report: Any = None, until: Any = None) -> None:
            raise AssertionError("measured")

    for text in ("fsdp:9", "priority_sync:9"):
        with pytest.raises(InvalidArgumentError, match=r":workers: 9\b.*\b8\b"):
            predict(graph_of("mlp"), [text], durations=Never(), cluster=FAST)  # type: ignore[arg-type]


def test_inference_has_nothing_to_shard() -> None:
    graph = graph_of("mlp inference")
    assert not np.any(graph.tasks.phase == StepPhase.BACKWARD)
    for text in ("fsdp:4", "priority_sync:4"):
        (technique,) = parse(text)
        assert "no backward pass" in str(technique.why_not(graph))
        assert context(None).cluster is None
