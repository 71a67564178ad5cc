"""Predicted pipelines: settings, reasons against them, steps and memory; stable learning rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import slipstream as ss
from slipstream.errors import InvalidArgumentError, UsageError, WorkloadError
from slipstream.graph import Graph, replay
from slipstream.technique import QualityKind, parse, refusal
from slipstream.techniques.pipeline.technique import Pipeline
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted
from slipstream.workload.built import build_from
from small_steps import FAST, graph_of, shared, tail_heavy
from tiny_models import parts


@pytest.fixture(scope="module")
def graph() -> Graph:
    return tail_heavy()


def test_settings_are_checked_and_written_back() -> None:
    (technique,) = parse("pipeline:4,schedule=async,micro_batches=1")
    assert str(technique) == "pipeline:4,micro_batches=1,schedule=async"
    (technique,) = parse("pipeline:4,schedule=async,correction=0.135,warmup=9")
    assert (technique.warmup_steps(), "correction=0.135,warmup=9" in str(technique)) == (9, True)
    for text, problem in (
        ("pipeline:1", "1 is not between 2 and"),
        ("pipeline:2,micro_batches=0", "0 is not between 1 and"),
        ("pipeline:2,schedule=fast", "'fast' is not possible"),
        ("pipeline:2,schedule=async,correction=1", "1.0 is outside its range"),
        ("pipeline:2,schedule=async,warmup=-1", "-1 is outside its range"),
        ("pipeline:2,schedule=pipedream,correction=0.1", "'pipedream' has no weights to correct"),
        ("pipeline:2,rescheduling=5", "'1f1b' has no weights to correct"),
    ):
        with pytest.raises(InvalidArgumentError, match=problem):
            parse(text)
    with pytest.raises(UsageError, match="'ddp' cannot be combined with 'pipeline'"):
        parse("ddp:2+pipeline:2")


def test_reasons_against_a_pipeline(graph: Graph) -> None:
    reason = refusal(Pipeline(2, 3), graph)
    assert reason == "256 samples do not make 3 equal micro-batches"
    reason = refusal(Pipeline(99), graph)
    assert reason is not None
    assert "at most 13 stages" in reason
    with pytest.raises(WorkloadError, match="needs 2 processes, but this is a single one"):
        build_from(parts("transformer"), (Pipeline(),), 0, "test")


def test_an_asynchronous_pipeline_has_no_bubble_and_gpipe_the_largest_memory(graph: Graph) -> None:
    made = {name: shared(graph, FAST, f"pipeline:4,schedule={name}")
            for name in ("gpipe", "1f1b", "zero_bubble", "async", "pipedream")}  # fmt: skip
    steps = {name: replay(placed).step_ns for name, placed in made.items()}
    assert steps["async"] < steps["zero_bubble"] < steps["1f1b"] <= steps["gpipe"]
    peaks = {name: replay(placed).memory.peak_bytes for name, placed in made.items()}
    assert (peaks["1f1b"] <= peaks["gpipe"]).all()
    assert peaks["pipedream"][0] > peaks["async"][0]
    # One buffer of the first stage's weights; the last stage has no delay.
    extra = replay(
        shared(graph, FAST, "pipeline:4,schedule=async,correction=0.5")
    ).memory.peak_bytes
    assert extra[0] > peaks["async"][0]
    assert extra[-1] == peaks["async"][-1]
    assert peaks["gpipe"].max() < replay(graph).peak_bytes
    for name, placed in made.items():
        assert (placed.samples, placed.workers) == (graph.samples, 4)
        assert "4 stages, cut before" in placed.edits[-1].what
        assert ("updates old" in placed.edits[-1].what) == (name in ("async", "pipedream"))


def test_predict_reports_the_exposed_transfers(graph: Graph) -> None:
    slow = ss.cluster.Cluster.load("workers=4,link=10mbit,latency=1ms")
    after, refused, amp = predict(
        graph, ["pipeline:2,micro_batches=1", "pipeline:2,micro_batches=3", "amp:bf16+pipeline:2"],
        cluster=slow,
    )  # fmt: skip
    assert "3 equal micro-batches" in str(refused.why_not)
    assert isinstance(amp, Predicted)
    assert isinstance(after, Predicted)
    assert after.shared is not None
    # Each of the two stages sends one tensor of 256 x 48 numbers.
    assert after.shared.sent_bytes == 256 * 48 * 4
    assert after.shared.exposed_ns > 2 * 256 * 48 * 4 * 8 / 10e6 * 1e9


def test_numerics_follow_the_schedule() -> None:
    assert Pipeline(4, 4, "1f1b").quality().kind is QualityKind.ROUNDING
    assert Pipeline(4, 4, "async").quality().kind is QualityKind.NEEDS_TRAINING
    assert "is 0.22x the synchronous one" in Pipeline(4, 1, "async").quality().advice
    assert "fewer than 2250 updates" in Pipeline(16, 1, "pipedream").quality().advice
    assert Pipeline().quality(graph_of("conv")).kind is QualityKind.NEEDS_TRAINING
    assert Pipeline().quality(graph_of("mlp")).kind is QualityKind.ROUNDING


def diverges(rate: float, delay: int) -> bool:
    """Whether gradient descent with delayed gradients on a quadratic of curvature 1 diverges."""
    weights = [1.0] * (delay + 1)
    steps = 4000 * (delay + 1)
    for _ in range(steps):
        weights.append(weights[-1] - rate * weights[-1 - delay])
        if abs(weights[-1]) > 1e3:
            return True
    return bool(np.abs(weights[-delay - 1 :]).max() > 1.0)


@pytest.mark.parametrize("delay", [0, 1, 3, 8])
def test_simulated_training_diverges_at_the_largest_stable_rate(delay: int) -> None:
    limit = ss.pipeline.largest_stable_rate(delay)
    assert not diverges(0.99 * limit, delay)
    assert diverges(1.01 * limit, delay)
    assert ss.pipeline.largest_stable_rate(delay, 4.0) == pytest.approx(limit / 4)


def test_correction_enlarges_the_stable_rate() -> None:
    """The published correction; limits for a delay of 10."""
    for discrepancy, plain, corrected in (
        (1, 0.0593, 0.1312),
        (5, 0.0176, 0.0973),
        (20, 0.0048, 0.0489),
    ):
        assert ss.pipeline.largest_stable_rate(10, 1.0, discrepancy) == pytest.approx(
            plain, rel=0.01
        )
        improved = ss.pipeline.largest_stable_rate(10, 1.0, discrepancy, math.exp(-2))
        assert improved == pytest.approx(corrected, rel=0.01)
    for delay in (-1, 1.5, "3"):
        with pytest.raises(InvalidArgumentError, match=f"{delay!r} is outside its range"):
            ss.pipeline.largest_stable_rate(delay)  # type: ignore[arg-type]


def test_stable_rates_are_those_of_the_largest_eigenvalue_of_the_hessian() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 5) * torch.tensor([3.0, 1.0, 1.0, 0.5, 0.1]), torch.randn(60, 1)
    model, order = nn.Linear(5, 1, bias=False), Pipeline(3, 1, "async").order
    found = ss.pipeline.stable_rates(model, (x, y), nn.functional.mse_loss, order)
    curvature = float(torch.linalg.eigvalsh(2 * x.T @ x / 60).max())
    assert found.curvature == pytest.approx(curvature, rel=1e-3)
    assert found.delays == (2, 1, 0)
    expected = [ss.pipeline.largest_stable_rate(delay, curvature) for delay in (2, 1, 0)]
    assert found.rates == pytest.approx(expected, rel=1e-3)
    assert found.stay_synchronous(299)
    assert not found.stay_synchronous(300)
    norm = nn.BatchNorm1d(5)
    ss.pipeline.stable_rates(nn.Sequential(norm, model), (x, y), nn.functional.mse_loss, order)
    assert norm.num_batches_tracked == 0
    assert not norm.get_buffer("running_mean").any()
    with pytest.raises(WorkloadError, match="curvature of Linear cannot be computed"):
        ss.pipeline.stable_rates(model.requires_grad_(False), (x, y), nn.functional.mse_loss, order)
