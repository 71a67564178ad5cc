"""Predicted bursts: settings, reasons against them, plans, times and memory of the step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from known_durations import context_for, timed_by_bytes
from slipstream.cluster import Cluster
from slipstream.errors import InvalidArgumentError, UsageError, WorkloadError
from slipstream.graph import Graph, Kind, StepPhase, replay
from slipstream.report.plans import plans_svg
from slipstream.technique import parse, refusal
from slipstream.techniques.burst.technique import Burst
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted
from slipstream.workload.built import build_from
from small_steps import FAST, SLOW, context, graph_of, shared, tail_heavy
from tiny_models import parts


@pytest.fixture(scope="module")
def graph() -> Graph:
    return tail_heavy()


def test_settings_are_checked_and_written_back() -> None:
    (technique,) = parse("burst:4,plan=4/1@6,amplification=2")
    assert str(technique) == "burst:4,amplification=2.0,plan=4/1@6"
    for text, problem in (
        ("burst:1", "1 is not between 2 and"),
        ("burst:2,amplification=0.5", "0.5 is not at least 1"),
        ("burst:2,deadline_ms=-1", "-1.0 is not at least 0"),
        ("burst:2,plan=2/1", "'1' in '2/1' cannot be read"),
        ("burst:2,plan=x", "'x' in 'x' cannot be read"),
        ("burst:2,plan=4", "4 is not between 1 and workers=2"),
    ):
        with pytest.raises(InvalidArgumentError, match=problem):
            parse(text)
    with pytest.raises(UsageError, match="'burst' cannot be combined with 'ddp'"):
        parse("ddp:2+burst:2")


def test_reasons_against_bursts(graph: Graph) -> None:
    assert "batch norm 'model.stem.1' would normalise" in str(refusal(Burst(), graph_of("conv")))
    assert refusal(Burst(5, plan="5"), graph) == "256 samples do not divide among 5 devices"
    assert refusal(Burst(4, plan="1"), graph) == "its plan is a single device"
    with pytest.raises(WorkloadError, match="needs 2 processes, but this is a single one"):
        build_from(parts("transformer"), (Burst(),), 0, "test")
    with pytest.raises(InvalidArgumentError, match="no later layer begins module 'x'"):
        shared(graph, FAST, "burst:2,plan=2/1@x")


def test_one_device_takes_the_plain_step(graph: Graph) -> None:
    alone = shared(graph, SLOW, "burst:4,plan=1")
    assert replay(alone).step_ns == replay(graph).step_ns
    assert alone.workers == 1
    # Gradients and activations over this network take longer than all computing.
    assert shared(graph, SLOW, "burst:4").edits[-1].what == "plan=1"
    assert shared(graph, SLOW, "burst:4").workers == 1


def test_moves_and_gradients_are_sent_by_the_devices_of_their_layers(graph: Graph) -> None:
    made = shared(graph, SLOW, "burst:4,plan=4/2@3/1@6")
    assert (made.samples, made.workers) == (256, 4)
    rows = {
        (row.collective.group.ranks, len(row.collective.servers), row.collective.kind): row
        for row in made.exchanges
        if row.collective.group is not None
    }
    assert sorted(rows) == [
        (1, 2, "reshard"), (2, 0, "all_reduce"), (2, 1, "reshard"), (2, 4, "reshard"),
        (4, 0, "all_reduce"), (4, 2, "reshard"),
    ]  # fmt: skip
    # 256 rows of 48 numbers; three layers of 48 x 48 weights and 48 biases.
    assert rows[4, 2, "reshard"].collective.nbytes == 256 * 48 * 4
    assert rows[4, 0, "all_reduce"].collective.nbytes == 3 * 49 * 48 * 4
    # Device 2 sends its quarter of the batch to device 0.
    assert rows[4, 2, "reshard"].sent_bytes == 64 * 48 * 4
    tasks = made.tasks
    communicates = np.flatnonzero(tasks.kind == Kind.COMMUNICATION)
    assert len(communicates) == 6
    assert (tasks.phase[communicates] != StepPhase.OPTIMIZER).all()
    assert replay(made).peak_bytes < replay(graph).peak_bytes


def test_a_loss_module_runs_with_the_last_layer(graph: Graph) -> None:
    spec = "burst:4,plan=4/2@3/1@6"
    made, expected = (
        shared(tail_heavy(nn.CrossEntropyLoss()), SLOW, spec),
        shared(graph, SLOW, spec),
    )
    assert [row.sent_bytes for row in made.exchanges] == [
        row.sent_bytes for row in expected.exchanges
    ]


def test_limits_choose_cheaper_plans() -> None:
    graph, technique = timed_by_bytes(tail_heavy()), Burst(8)
    cluster = Cluster.load("workers=8,link=10gbit,latency=5us")
    timed = replace(context_for(technique, graph), cluster=cluster)
    plans = technique.candidates(graph, timed)
    assert plans[0].time_ns < plans[-1].time_ns
    assert plans[0].device_ns > plans[-1].device_ns
    assert set(plans[-1].devices) == {1}
    budget = plans[len(plans) // 2]
    cheaper = Burst(8, device_ms=budget.device_ns / 1e6 + 1e-9).predict(graph, timed)
    assert cheaper.edits[-1].what == f"plan={budget.spec}"
    assert "plan=" + budget.spec in cheaper.edits[-1].note
    assert f"; or {plans[0].spec}: " in cheaper.edits[-1].note
    assert "; or 1: " in cheaper.edits[-1].note
    fastest = replay(technique.predict(graph, timed)).step_ns
    assert fastest < replay(cheaper).step_ns < replay(graph).step_ns
    # The time of what all plans share counts towards the deadline.
    deadline = Burst(8, deadline_ms=replay(graph).step_ns / 1e6).predict(graph, timed)
    assert deadline.edits[-1].what == "plan=1"
    for limit in ("device_ms", "deadline_ms"):
        match = f"^burst:{limit}: no plan of the layers is within"
        with pytest.raises(InvalidArgumentError, match=match):
            replace(technique, **{limit: 1e-9}).predict(graph, timed)


def test_predict_reports_what_bursts_send(graph: Graph) -> None:
    after, refused = predict(graph, ["burst:2,plan=2/1@6", "burst:3,plan=3"], cluster=FAST)
    assert isinstance(after, Predicted)
    assert after.shared is not None
    assert after.shared.workers == 2
    assert after.shared.sent_bytes > 0
    assert "do not divide among 3 devices" in str(refused.why_not)


def test_compared_plans_are_drawn_with_their_limits(graph: Graph) -> None:
    front = Burst(4).candidates(graph, context(FAST))
    limit_ms = front[-1].device_ns / 1e6 + 1.0
    drawn = plans_svg([graph, shared(graph, FAST, f"burst:4,device_ms={limit_ms}")])
    assert (drawn.count("<circle"), drawn.count(">limit ")) == (len(front), 1)
    with pytest.raises(UsageError, match="applies here compared plans"):
        plans_svg([shared(graph, FAST, "burst:4,plan=4/1@6")])


def test_a_plan_is_a_placement_of_nested_devices(graph: Graph) -> None:
    plan = Burst(4).candidates(graph, context(FAST))[0]
    placement = plan.placement(graph.samples)
    assert placement.samples == 256
    assert [len(part.devices) for part in placement.parts] == [g for g, _ in plan.bursts]
