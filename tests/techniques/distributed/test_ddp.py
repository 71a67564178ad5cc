"""Replicas: buckets as in torch, communication during the backward pass, and its cost."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slipstream.cluster import Calibration, Cluster, Collective, Quantity
from slipstream.errors import InvalidArgumentError, SlipstreamError, UsageError, WorkloadError
from slipstream.graph import (
    Editor,
    Graph,
    Kind,
    StepPhase,
    TensorSpec,
    Work,
    communication,
    load,
    replace_exchange,
    replay,
    save,
    with_overlap,
)
from slipstream.provenance import Provenance
from slipstream.technique import parse, registry
from slipstream.techniques.accumulation import Accumulation
from slipstream.techniques.distributed.ddp import DDP
from slipstream.techniques.distributed.gradients import Gradient, buckets, gradients
from slipstream.verbs.predicting import predict
from slipstream.workload import BuiltWorkload
from small_steps import COPY_NS, FAST, SLOW, Copies, context, graph_of, shared
from tiny_models import MODELS, parts


@pytest.fixture(scope="module")
def transformer() -> Graph:
    return graph_of("transformer")


@pytest.mark.parametrize("seed", range(20))
def test_buckets_equal_those_of_torch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, most = int(rng.integers(1, 5000)), int(rng.integers(5000, 50_000))
    shapes = [(int(rng.integers(1, 60)), int(rng.integers(1, 60))) for _ in range(30)]
    kinds = [("float32", "float64")[int(rng.integers(0, 8) == 0)] for _ in shapes]
    ours = buckets(
        [
            Gradient(i, TensorSpec(kind, shape, (shape[1], 1)), "")
            for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
        ],
        first,
        most,
    )
    tensors = [torch.zeros(s, dtype=getattr(torch, k)) for s, k in zip(shapes, kinds, strict=True)]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, most])
    assert sorted([gradient.task for gradient in bucket] for bucket in ours) == sorted(theirs)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_parameter_has_one_ready_gradient(name: str) -> None:
    model = parts(name)[0]
    found = gradients(graph_of(name))
    assert sorted(gradient.spec.shape for gradient in found) == sorted(
        tuple(p.shape) for p in model.parameters()
    )
    assert [gradient.task for gradient in found] == sorted(gradient.task for gradient in found)


def test_gradients_are_exchanged_after_the_last_of_several_passes(transformer: Graph) -> None:
    several = Accumulation(3).predict(transformer, context(None))
    made = shared(several, FAST)
    assert sum(row.collective.nbytes for row in made.exchanges) == sum(
        gradient.spec.nbytes for gradient in gradients(transformer)
    )
    passes = np.flatnonzero(several.tasks.phase == StepPhase.BACKWARD)
    assert min(gradient.task for gradient in gradients(several)) > passes[len(passes) // 2]


def test_the_update_waits_for_the_slowest_bucket_and_compute_does_not(transformer: Graph) -> None:
    small = "ddp:4,bucket_mb=0.004"
    made = shared(transformer, SLOW, small)
    assert len(made.exchanges) > 3
    timeline = replay(made)
    rows = list(made.exchanges)
    for before, after in itertools.pairwise(rows):
        assert timeline.start_ns[after.task] >= timeline.end_ns[before.task]
    for row in rows:
        assert timeline.start_ns[row.task] >= timeline.end_ns[row.ready]
        assert timeline.start_ns[row.awaited] >= timeline.end_ns[row.task]
    update = np.flatnonzero(made.tasks.phase == StepPhase.OPTIMIZER)
    last = max(timeline.end_ns[row.task] for row in rows)
    assert timeline.start_ns[update].min() >= last
    # The backward pass ends as on an infinitely fast network.
    backward = (made.tasks.phase == StepPhase.BACKWARD) & (made.tasks.kind == Kind.OP)
    awaited = min(row.awaited for row in rows)
    fast = replay(shared(transformer, FAST, small))
    chosen = np.flatnonzero(backward)
    chosen = chosen[chosen < awaited]
    np.testing.assert_allclose(timeline.end_ns[chosen], fast.end_ns[chosen])


def test_a_slow_network_adds_the_time_of_the_closed_form(transformer: Graph) -> None:
    """With one bucket nothing is hidden, so the step grows by the all-reduce and the copies."""
    copies = 2 * COPY_NS * len(gradients(transformer))
    made = shared(transformer, SLOW, "ddp:4,bucket_mb=100")
    (row,) = made.exchanges
    cost = SLOW.cost(row.collective)
    grown = replay(made).step_ns - replay(transformer).step_ns
    assert grown == pytest.approx(cost.duration_ns + copies, rel=1e-6)
    nbytes = sum(gradient.spec.nbytes for gradient in gradients(transformer))
    assert row.collective.nbytes == nbytes
    assert row.sent_bytes == pytest.approx(2 * 3 / 4 * nbytes)
    assert [spec.shape for spec in row.tensors] == [g.spec.shape for g in gradients(transformer)]


def test_a_prediction_reports_communication_cost_memory_and_bounds(transformer: Graph) -> None:
    priced = Cluster.load("workers=8,link=1mbit,latency=1ms,device=v100")
    slow, fast = (
        predict(transformer, ["ddp:4"], durations=Copies(), cluster=cluster)[0]  # type: ignore[arg-type]
        for cluster in (priced, FAST)
    )
    assert slow.shared is not None
    assert fast.shared is not None
    assert slow.samples == (transformer.samples, 4 * transformer.samples)
    assert slow.shared.walls[0].name == "bandwidth"
    assert fast.shared.walls[0].name == "compute"
    assert slow.shared.exposed_ns > 0.9 * (slow.step_ns - slow.baseline_ns)
    assert slow.shared.dollars(3600e9) == pytest.approx(4 * 3.06)
    assert fast.shared.dollars(1.0) is None
    assert slow.memory[1] - slow.memory[0] == pytest.approx(
        sum(gradient.spec.nbytes for gradient in gradients(transformer))
    )
    assert slow.shared.fits is True
    # If the network dominates, its 25 % are the interval's; if it is hidden, they are not.
    assert slow.high / slow.low > 1.4 > fast.high / fast.low
    shown = slow.to_json()["shared"]
    assert shown["workers"] == 4
    assert shown["sent_bytes_per_worker"] == slow.shared.sent_bytes


def test_more_workers_wait_longer_for_the_slowest(transformer: Graph) -> None:
    without, few, many = (
        replay(shared(transformer, FAST, text)).step_ns
        for text in ("ddp:2", "ddp:2,jitter=0.1", "ddp:8,jitter=0.1")
    )
    busy = transformer.tasks.phase != StepPhase.OPTIMIZER
    busy_ns = float((transformer.tasks.duration_ns + transformer.tasks.gap_ns)[busy].sum())
    assert few - without == pytest.approx(0.1 * 0.5642 * busy_ns, rel=0.1)
    assert many - without == pytest.approx(0.1 * 1.4236 * busy_ns, rel=0.1)


def test_distributed_and_inference_steps_are_refused(transformer: Graph) -> None:
    made = shared(transformer, FAST)
    assert "already runs on several workers" in str(DDP().why_not(made))
    assert "no backward pass" in str(DDP().why_not(graph_of("mlp inference")))
    assert DDP().why_not(transformer) is None


def test_too_few_devices_and_no_cluster_are_named(transformer: Graph) -> None:
    durations: Any = Copies()
    with pytest.raises(InvalidArgumentError, match=r":workers: 16\b.*\b8\b"):
        predict(transformer, ["ddp:16"], durations=durations, cluster=FAST)
    (refused,) = predict(transformer, ["ddp:4"], durations=durations)
    assert "needs a cluster" in str(refused.why_not)
    with pytest.raises(UsageError, match="needs a cluster"):
        DDP().predict(transformer, context(None))


@pytest.mark.parametrize("text", ["ddp:1", "ddp:0", "ddp:4,bucket_mb=0", "ddp:4,jitter=1"])
def test_invalid_settings_are_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse(text)


def test_it_cannot_be_applied_alone() -> None:
    assert registry()["ddp"] is DDP
    with pytest.raises(WorkloadError, match="a single one"):
        DDP(2).apply(object.__new__(BuiltWorkload))


def test_an_exchange_can_be_replaced_by_encoding_transfers_and_decoding(transformer: Graph) -> None:
    made = shared(transformer, SLOW, "ddp:4,bucket_mb=0.01")
    edit, work = Editor(made, "half"), functools.partial(Work, provenance=Provenance.ASSUMED)
    for row in made.exchanges:
        half = replace(row.collective, nbytes=row.collective.nbytes / 4)
        replace_exchange(
            edit, row, SLOW,
            encode=[work("project", 100.0), work("pack", 50.0)],
            transfers=[half, half],
            decode=[work("unpack", 70.0), work("add", 5.0)],
        )  # fmt: skip
    halved = edit.apply("half of the bytes")
    halved.check()
    assert len(halved.exchanges) == 2 * len(made.exchanges)
    before, after = (sum(r.sent_bytes for r in g.exchanges) for g in (made, halved))
    assert after == pytest.approx(before / 2)
    timeline = replay(halved)
    names = [halved.string(int(n)) for n in halved.tasks.name]
    for first, second in zip(halved.exchanges[::2], halved.exchanges[1::2], strict=True):
        assert names[first.ready] == "pack"
        assert names[first.ready - 1] == "project"
        assert second.ready == first.task
        assert names[second.awaited] == "unpack"
        assert timeline.start_ns[first.task] >= timeline.end_ns[first.ready]
        assert timeline.start_ns[second.task] >= timeline.end_ns[first.task]
        assert timeline.start_ns[second.awaited] >= timeline.end_ns[second.task]
    assert sum(len(row.tensors) for row in halved.exchanges) == len(gradients(transformer))


def test_exchanges_are_stored_in_the_file(transformer: Graph, tmp_path: Any) -> None:
    made = shared(transformer, SLOW)
    save(made, tmp_path / "shared.slipgraph")
    back = load(tmp_path / "shared.slipgraph")
    assert [row.to_json() for row in back.exchanges] == [row.to_json() for row in made.exchanges]
    assert back.workers == 4
    assert replay(back).step_ns == replay(made).step_ns


def test_a_disconnected_cluster_is_named_before_anything_runs(transformer: Graph) -> None:
    from slipstream.cluster import LinkKind, from_edges

    cable = LinkKind.of("cable", 1e9)
    torn = replace(
        FAST, topology=from_edges([("a", "b", cable), ("c", "d", cable)], ["a", "b", "c", "d"])
    )
    with pytest.raises(SlipstreamError):
        torn.cost(Collective("all_reduce", 8.0))
    with pytest.raises(SlipstreamError):
        shared(transformer, torn)


def test_compute_during_communication_is_slowed_by_the_clusters_penalty(
    transformer: Graph,
) -> None:
    link = "workers=8,link=1gbit"
    penalised = replace(Cluster.load(link), overlap_penalty=Quantity(0.5))
    text = "ddp:4,bucket_mb=0.004"
    made = shared(transformer, Cluster.load(link), text)
    slowed = with_overlap(made, penalised)
    hidden = communication(replay(made)).total_ns - communication(replay(made)).exposed_ns
    longer = float(slowed.tasks.duration_ns.sum() - made.tasks.duration_ns.sum())
    assert hidden > 0
    assert longer == pytest.approx(0.5 * hidden, rel=1e-6)
    assert with_overlap(made, Cluster.load(link)) is made
    (found,) = predict(
        transformer,
        [text],
        durations=Copies(),
        cluster=penalised,  # type: ignore[arg-type]
    )
    assert found.step_ns == pytest.approx(replay(slowed).step_ns)


def test_the_interval_is_that_of_the_calibration(transformer: Graph) -> None:
    """A network fitted within 4 % is less uncertain than an unmeasured one."""
    calibration = Calibration("2026-01-01", "elsewhere", "gloo", 0.02, 0.04, 1.0)
    fitted = replace(SLOW, calibration=calibration)
    reach = [
        found.high / found.low
        for cluster in (SLOW, fitted)
        for found in predict(transformer, ["ddp:4"], durations=Copies(), cluster=cluster)  # type: ignore[arg-type]
    ]
    # Nearly all of the step is communication: twice 4 %, plus the error of any prediction.
    assert 1.08 < reach[1] < 1.12 < 1.4 < reach[0]


@pytest.mark.parametrize(
    ("workers", "shape"), [(8, (8,)), (16, (2, 8)), (17, (17,)), (12, (12,)), (32, (4, 8))]
)
def test_workers_on_whole_hosts_can_communicate_by_hosts(
    workers: int, shape: tuple[int, ...]
) -> None:
    group = DDP(workers).group(Cluster.load("h100x8-100gbe", hosts=4))
    assert group.shape == shape
    assert group.members.reshape(-1).tolist() == list(range(workers))
