"""Predicted compressed steps: sent bytes, computation, and dependencies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from known_durations import KnownDurations
from slipstream.cluster import Cluster, Collective, Group
from slipstream.durations import Timing, TimingRequest
from slipstream.errors import UsageError, WorkloadError
from slipstream.graph import Call, Graph, replay
from slipstream.provenance import Provenance
from slipstream.technique import Context, combine, parse, registry
from slipstream.techniques.distributed.compression.compressor import Message
from slipstream.techniques.distributed.compression.technique import LATE, THREAD, exchange_call
from slipstream.techniques.distributed.compression.timing import timer
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import prediction_table
from slipstream.workload import BuiltWorkload, build_from
from tiny_models import parts, record

NAMES = [name for name, kind in registry().items() if kind.traits.compresses]
SLOW = Cluster.load("workers=8,link=1mbit,latency=100us")
FAST = Cluster.load("workers=8,link=10000gbit")
ENCODE_NS, DECODE_NS = 3000.0, 2000.0
BUCKETS = "ddp:4,bucket_mb=0.004"


class Known(KnownDurations):
    """Encoding a bucket takes 3 microseconds and decoding 2; a copy takes none."""

    def lookup(self, call: Any) -> Timing | None:
        requested = call.call if isinstance(call, TimingRequest) else call
        duration = 0.0
        if "compression" in requested.name:
            duration = ENCODE_NS + (DECODE_NS if requested.arguments[3] == "all" else 0.0)
        return Timing(duration, 0.0, Provenance.MICROBENCHMARK)

    def measure(self, calls: Any, report: Any = None, until: Any = None) -> None:
        """There is nothing to measure."""


@pytest.fixture(scope="module")
def transformer() -> Graph:
    return record(build_from(parts("transformer"), (), 0, "transformer"))


def edited(graph: Graph, text: str, cluster: Cluster) -> Graph:
    return combine(graph, parse(text), Context(Known(), cluster))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_compressors_and_include_all_gradients(transformer: Graph, name: str) -> None:
    from slipstream.techniques.distributed.compression.bucket import Layout

    before, after = (edited(transformer, text, SLOW) for text in (BUCKETS, f"{BUCKETS}+{name}"))
    (settings,) = parse(name)
    expected = 0.0
    for row in before.exchanges:
        shapes = {f"p{n}": spec.shape for n, spec in enumerate(row.tensors)}
        expected += sum(
            message.sent_bytes(4)
            for message in settings.messages(Layout.of(shapes))  # type: ignore[attr-defined]
        )
    assert sum(row.sent_bytes for row in after.exchanges) == pytest.approx(expected, rel=0.02)
    tensors = [[spec for row in graph.exchanges for spec in row.tensors]
               for graph in (before, after)]  # fmt: skip
    assert tensors[0] == tensors[1]
    after.check()


def test_between_two_ranks_a_sum_takes_one_message_and_equal_bytes() -> None:
    cluster = Cluster.load("workers=4,link=1mbit,latency=100us")
    message = Message("all_reduce", 4000)
    two, four = (
        cluster.cost(Collective(*message.collective(n), Group.of(range(n)))) for n in (2, 4)
    )
    ring = cluster.cost(Collective("all_reduce", 4000.0, Group.of(range(2)), "ring"))
    assert two.bytes_per_rank == ring.bytes_per_rank == message.sent_bytes(2)
    assert two.latency_ns == ring.latency_ns / 2
    assert four.bytes_per_rank == message.sent_bytes(4)


def test_compressors_that_need_another_learning_rate_report_it(transformer: Graph) -> None:
    names = ("sign", "topk:0.01", "randomk:0.01", "powersgd:4", "block_int:4", "cast:bf16")
    texts = [f"{BUCKETS}+{name}" for name in names]
    found = predict(transformer, texts, cluster=SLOW, durations=Known())  # type: ignore[arg-type]
    notes = prediction_table(transformer, found).notes
    assert [note for note in notes if LATE in note] == [f"{found[0].technique}: {LATE}"]
    assert [p.to_json()["advice"] for p in found] == [LATE] * 3 + [""] * 3


def on_cores(graph: Graph, cores: int) -> Graph:
    """Return the graph as if recorded with one thread on a machine of `cores` cores."""
    return replace(graph, meta={**graph.meta, "threads": 1, "machine": {"cpu.logical": cores}})


def test_on_an_infinitely_fast_link_compression_costs_its_encoding(transformer: Graph) -> None:
    alone = on_cores(transformer, 1)
    before, after = (edited(alone, text, FAST) for text in (BUCKETS, f"{BUCKETS}+topk:0.01"))
    longer = replay(after).step_ns - replay(before).step_ns
    expected = len(before.exchanges) * (ENCODE_NS + DECODE_NS)
    assert longer == pytest.approx(expected, rel=0.02)


def test_on_a_separate_core_the_thread_encodes_buckets_sequentially(
    transformer: Graph,
) -> None:
    """Only the work that remains at the end of the backward pass is awaited."""
    before, after = (
        edited(on_cores(transformer, 2), text, FAST) for text in (BUCKETS, f"{BUCKETS}+topk:0.01")
    )
    after.check()
    timeline = replay(after)
    lane = after.lanes.index(THREAD)
    ours = np.flatnonzero(after.tasks.lane == lane)
    assert len(ours) == 2 * len(before.exchanges)
    begins, ends = timeline.start_ns[ours], timeline.end_ns[ours]
    assert (begins[1:] >= ends[:-1]).all(), "one thread"
    # The thread's remaining work after the last bucket is ready.
    ready = timeline.end_ns[[row.ready for row in after.exchanges]]
    busy, each = 0.0, ENCODE_NS + DECODE_NS
    for moment in ready:
        busy = max(busy, moment) + each
    longer = timeline.step_ns - replay(before).step_ns
    assert 0.99 * each <= longer < len(before.exchanges) * each
    assert longer == pytest.approx(busy - ready[-1], rel=0.05)


def test_a_transfer_delays_the_thread_before_the_next_bucket(transformer: Graph) -> None:
    after = edited(on_cores(transformer, 2), f"{BUCKETS}+topk:0.01", SLOW)
    timeline = replay(after)
    ours = np.flatnonzero(after.tasks.lane == after.lanes.index(THREAD))
    encodes, decodes = ours[::2], ours[1::2]
    for row, decode, following in zip(after.exchanges, decodes, encodes[1:], strict=False):
        assert timeline.start_ns[decode] >= timeline.end_ns[row.task]
        assert timeline.start_ns[following] >= timeline.end_ns[decode]


def test_on_a_slow_link_fewer_bytes_are_faster_and_residual_memory_is_reported(
    transformer: Graph,
) -> None:
    durations: Any = Known()
    plain, half, low = predict(
        transformer, [BUCKETS, f"{BUCKETS}+cast:bf16", f"{BUCKETS}+powersgd:1"],
        durations=durations, cluster=SLOW,
    )  # fmt: skip
    assert low.step_ns < half.step_ns < plain.step_ns
    assert half.memory == plain.memory
    assert low.memory[1] > plain.memory[1]


def test_it_combines_with_ddp_in_any_order_and_alone_reports_that_it_needs_it(
    transformer: Graph,
) -> None:
    first, other = (edited(transformer, text, SLOW) for text in ("sign+ddp:4", "ddp:4+sign"))
    assert replay(first).step_ns == replay(other).step_ns
    (sign,) = parse("sign")
    assert f"ddp:workers=4+{sign.name}" in str(sign.why_not(transformer))
    with pytest.raises(UsageError, match="cannot be combined"):
        parse("sign+topk")
    with pytest.raises(UsageError, match="needs a cluster"):
        sign.predict(edited(transformer, "ddp:4", SLOW), Context(Known()))  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="DistributedDataParallel"):
        sign.apply(BuiltWorkload(model=None, step=lambda: None))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NAMES)
def test_the_timed_call_is_the_exchange_itself(name: str) -> None:
    (settings,) = parse(f"{name}:2,start=0" if name in ("acp", "powersgd") else name)
    for part in ("encode", "all"):
        call = exchange_call(settings, [(30, 40), (30,)], 4, part)  # type: ignore[arg-type]
        run = timer(Call.from_json(call.to_json()))
        assert run() == run() > 0
