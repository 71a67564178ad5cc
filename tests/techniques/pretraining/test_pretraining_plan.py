"""Plans: the limits that bind, and numbers that follow from the recorded step."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, cast

import pytest
from encoders import BATCH, bert
from recorded import graph_of

from known_durations import BytesMoved, timed_by_bytes
from slipstream.cluster import Cluster
from slipstream.durations import Durations
from slipstream.errors import SlipstreamError
from slipstream.graph import replay
from slipstream.provenance import Provenance
from slipstream.techniques.pretraining.training import PretrainingConfig, TrainingPhase
from slipstream.units import format_bytes, parse_bytes, parse_duration_ns
from slipstream.verbs.predicting import predict
from slipstream.verbs.pretraining import (
    _CHECKPOINTING,
    PretrainingPlan,
    _deadline,
    _dollars,
    _memory,
    plan_pretraining,
)
from slipstream.verbs.results import Predicted

CONFIG = PretrainingConfig(
    workload="work.py:make",
    phases=(TrainingPhase(100, 16 * BATCH), TrainingPhase(10, 8 * BATCH, length=512)),
    cluster="workers=4,link=10gbit,latency=10us",
    price_per_hour=2.0,
    techniques="masked_head+unpad",
)


def plan(config: PretrainingConfig) -> PretrainingPlan:
    graph = timed_by_bytes(graph_of(bert))
    return plan_pretraining(config, graph, durations=cast("Durations", BytesMoved()))


def test_a_plan_is_the_fastest_run_and_its_numbers_follow_from_a_step() -> None:
    found = plan(CONFIG)
    assert found.chosen is not None
    assert found.chosen.hours == min(run.hours for run in found.runs)
    alone = next(run for run in found.runs if run.workers == 1)
    assert len(found.sizes) > 2
    assert alone.accumulation == tuple(
        -(-phase.global_batch // alone.micro_batch) for phase in CONFIG.phases
    )
    assert found.chosen.techniques == "masked_head+unpad"
    assert alone.dollars == pytest.approx(2.0 * alone.hours)
    assert alone.low < alone.hours < alone.high
    assert set(found.ladder) == {"masked_head", "unpad"}
    rows = {row[0]: row for row in found.table().rows}
    assert {"micro-batch", "checkpointing", "devices", "memory", "time", "cost"} <= set(rows)
    run = replace(found.chosen, techniques="masked_head")
    others = replace(found, chosen=run, ladder={"unpad": 0.9, "sdpa": 1.2}).table().rows
    assert [row[1] for row in others[:2]] == ["no", "no"]
    assert others[1][2] == "predicted 1.20x, but not with checkpointing"
    longer = replace(CONFIG, phases=(*CONFIG.phases, CONFIG.phases[0]))
    more = next(run for run in plan(longer).runs if run.workers == 1)
    assert 1.5 < more.hours / alone.hours < 2.0


def test_further_micro_batches_take_what_accumulation_is_predicted_to_take() -> None:
    config = replace(CONFIG, micro_batch=BATCH, phases=CONFIG.phases[:1])
    sized = max((run for run in plan(config).runs if run.workers == 2), key=lambda r: r.micro_batch)
    text = f"{config.techniques}+accumulation:{sized.accumulation[0]}+ddp:2+{sized.wire}"
    (whole,) = predict(
        timed_by_bytes(graph_of(bert)), [text.rstrip("+")], cluster=Cluster.load(config.cluster),
        durations=cast("Durations", BytesMoved()),
    )  # fmt: skip
    assert isinstance(whole, Predicted)
    assert sized.hours == pytest.approx(100 * whole.step_ns / 3600e9, rel=0.02)


def test_a_plan_without_techniques_has_the_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.verbs.pretraining.RUNGS", ())
    phases = (TrainingPhase(100, BATCH),)
    runs = plan(replace(CONFIG, techniques="", cluster="", phases=phases)).runs
    recorded = replay(timed_by_bytes(graph_of(bert)))
    run = next(run for run in runs if run.micro_batch == BATCH)
    assert (run.techniques, run.peak_bytes) == ("", recorded.peak_bytes)
    assert run.hours == pytest.approx(100 * recorded.step_ns / 3600e9)
    assert run.low < run.hours < run.high


def test_a_technique_that_does_not_apply_has_a_row_with_its_reason() -> None:
    found = plan(replace(CONFIG, techniques="", phases=CONFIG.phases[:1]))
    rows = {row[0]: row[1:] for row in found.table().rows}
    assert found.refused
    for name, reason in found.refused.items():
        assert rows[name] == ["no", reason]
        assert name not in found.ladder


def test_memory_decides_on_micro_batch_and_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.verbs.pretraining.RUNGS", ("masked_head", "unpad"))
    config = replace(CONFIG, techniques="", cluster="", phases=(TrainingPhase(10, 8 * BATCH),))
    free = plan(config).chosen
    assert free is not None
    assert _CHECKPOINTING not in free.techniques
    for limit in (0.9, 0.5):
        room = int(limit * free.peak_bytes)
        chosen = plan(replace(config, memory=str(room))).chosen
        assert chosen is not None
        assert chosen.peak_bytes <= room
        assert chosen.micro_batch < free.micro_batch or _CHECKPOINTING in chosen.techniques
        assert chosen.hours > free.hours
    none = plan(replace(config, memory="1KiB"))
    assert none.chosen is None
    assert "memory binds: a device has 1.00 KiB" in none.binding
    assert "for micro-batch 1 with" in none.binding
    # A replica's buckets do not fit into the memory of one device alone.
    (alone,) = plan(replace(config, micro_batch=1)).runs
    pair = replace(config, micro_batch=1, cluster=CONFIG.cluster, memory=str(alone.peak_bytes))
    assert {run.workers for run in plan(pair).runs} == {1}
    late = plan(replace(config, memory=str(int(free.peak_bytes / 2)), deadline=_hours(free.hours)))
    assert f"or devices with {format_bytes(free.peak_bytes)} of memory" in late.binding


def _hours(hours: float) -> str:
    return f"{hours * 3600e9 * 1.0001:.0f} ns"


def test_limits_that_no_run_meets_are_named_with_the_cheapest_relaxation() -> None:
    cheapest = min(run.dollars or 0 for run in plan(CONFIG).runs)
    poor = plan(replace(CONFIG, budget=cheapest / 2))
    assert poor.chosen is None
    assert "the budget cannot be met" in poor.binding
    assert f"${math.ceil(100 * cheapest) / 100:,.2f}" in poor.binding
    late = plan(replace(CONFIG, deadline="1 us"))
    assert "the deadline cannot be met" in late.binding
    relaxed = replace(CONFIG, deadline=late.binding.rpartition("a deadline of ")[2])
    assert plan(relaxed).chosen is not None
    assert poor.table().notes == [poor.binding]
    free = plan(replace(CONFIG, budget=1.0, price_per_hour=0.0))
    assert "set price_per_hour" in free.binding
    cheap = plan(replace(CONFIG, deadline="1000 h"))
    assert cheap.chosen is not None
    assert cheap.chosen.dollars == pytest.approx(cheapest)


def test_techniques_that_do_not_apply_are_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"techniques: fused_lamb cannot be predicted: .*SGD"):
        plan(replace(CONFIG, techniques="masked_head+fused_lamb"))


def test_longer_sequences_take_more_memory_if_other_batches_are_unknown() -> None:
    graph = replace(timed_by_bytes(graph_of(bert)), shrunk=())
    first, longer = (
        plan_pretraining(
            replace(CONFIG, cluster="", phases=CONFIG.phases[:count]), graph,
            durations=cast("Durations", BytesMoved()),
        ).runs[0]
        for count in (1, 2)
    )  # fmt: skip
    assert longer.peak_bytes == 4 * first.peak_bytes


def test_batches_below_the_recorded_one_are_refused() -> None:
    graph = replace(timed_by_bytes(graph_of(bert)), shrunk=())
    for config in (replace(CONFIG, phases=(TrainingPhase(1, 2),)), replace(CONFIG, micro_batch=2)):
        with pytest.raises(SlipstreamError, match="is smaller than the recorded batch of 5"):
            plan_pretraining(config, graph, durations=cast("Durations", BytesMoved()))


def test_techniques_of_the_run_are_shown_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.verbs.pretraining.RUNGS", ("fused_optimizer",))
    found = plan(replace(CONFIG, techniques="", cluster=""))
    assert found.chosen is not None
    assert found.chosen.techniques == "fused_optimizer:fused"
    rows = {row[0]: row[1:] for row in found.table().rows}
    assert rows["fused_optimizer:fused"][1] == "predicted on the recorded step"
    assert rows["gradients"] == ["float32", "a single device exchanges none"]


def test_a_cluster_that_cannot_hold_the_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.cluster import Cluster, Device, Quantity

    load: Any = Cluster.load
    small = Device("small", memory_bytes=Quantity(1000.0, Provenance.ASSUMED))
    monkeypatch.setattr(Cluster, "load", lambda text: replace(load(text), device=small))
    found = plan(CONFIG)
    assert "memory binds" in found.binding
    (needed,) = re.findall("cheapest relaxation: (.*), for", found.binding)
    assert plan(replace(CONFIG, memory=needed)).chosen is not None


@pytest.mark.parametrize("value", [0.0, 1.0, 1.001, 1.004, 1.0049, 9.994, 99.951, 1023.6])
def test_a_relaxed_limit_allows_its_run(value: float) -> None:
    assert float(_dollars(value).strip("$").replace(",", "")) >= value
    assert parse_duration_ns(_deadline(value)) >= value * 3600e9
    assert parse_bytes(_memory(int(value * 2**20))) >= int(value * 2**20)
