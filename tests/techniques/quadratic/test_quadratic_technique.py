"""Quadratic layers in the graph and in the model of a workload."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.errors import UnknownNameError, WorkloadError
from slipstream.graph import Graph, Role, StepPhase, replay
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.quadratic.nn import QuadraticConv2d, QuadraticLinear
from slipstream.techniques.quadratic.technique import QuadraticLayers
from slipstream.workload import build_from

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, images, inference, mlp

from known_durations import BytesMoved, timed_by_bytes


@pytest.mark.parametrize("make", [mlp, images])
def test_every_layer_is_found_and_can_be_timed(make) -> None:  # type: ignore[no-untyped-def]
    technique = QuadraticLayers()
    calls = technique.required_timings(graph_of(make))
    assert sum("slipstream::quadratic" in call.op for call in calls) == 2 * 3
    assert cannot_be_timed(calls) == []


def test_a_layer_is_slower_by_the_measured_ratio_and_has_more_weights() -> None:
    graph = timed_by_bytes(graph_of(images))
    technique, durations = QuadraticLayers(only="0"), BytesMoved()
    durations.measure(technique.required_timings(graph))
    edited = technique.predict(graph, Context(durations))  # type: ignore[arg-type]
    before, after = (by_role(step) for step in (graph, edited))
    added = 2 * 8 * 3 * 9 * 4  # two more weights
    assert after[Role.PARAMETER] - before[Role.PARAMETER] == added
    assert after[Role.GRADIENT] - before[Role.GRADIENT] == added
    assert after[Role.OPTIMIZER] - before[Role.OPTIMIZER] == pytest.approx(added, abs=64)
    assert (edited.memory.role == Role.PARAMETER).sum() == 1 + (
        graph.memory.role == Role.PARAMETER
    ).sum()


def wide() -> Any:
    """A model whose peak is within the passes of a convolution."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3))
    batch = torch.randn(8, 3, 32, 32), torch.randn(8, 8, 30, 30)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)


def test_projections_within_a_pass_count_towards_the_peak() -> None:
    graph, durations = timed_by_bytes(graph_of(wide)), BytesMoved()
    technique = QuadraticLayers()
    durations.measure(technique.required_timings(graph))
    edited = technique.predict(graph, Context(durations))  # type: ignore[arg-type]
    predicted = replay(edited).peak_bytes / replay(graph).peak_bytes

    def changed() -> Any:
        model, batch, loss, optimizer = wide()
        built = build_from((model, batch, loss, optimizer), (technique,), 0, "changed")
        return built.model, built.batch, built.loss, built.optimizer

    recorded = replay(graph_of(changed)).peak_bytes / replay(graph).peak_bytes
    assert recorded > 1.5
    assert predicted == pytest.approx(recorded, rel=0.25)


def by_role(graph: Graph) -> dict[Role, int]:
    return {role: int(graph.memory.nbytes[graph.memory.role == role].sum()) for role in Role}


def test_the_update_is_slower_by_its_additional_bytes() -> None:
    graph = timed_by_bytes(graph_of(mlp))
    technique, durations = QuadraticLayers(), BytesMoved()
    durations.measure(technique.required_timings(graph))
    edited = technique.predict(graph, Context(durations))  # type: ignore[arg-type]
    update = graph.tasks.phase == StepPhase.OPTIMIZER
    moved_ns = [step.tasks.duration_ns[update].sum() for step in (graph, edited)]
    weights, biases = 16 * 32 + 32 * 32 + 32 * 4, 32 + 32 + 4
    # The calls of one update move all parameters; a microsecond per call remains.
    calls = sum(graph.task(int(task)).call is not None for task in np.flatnonzero(update))
    growth = (moved_ns[1] - 1000 * calls) / (moved_ns[0] - 1000 * calls)
    assert growth == pytest.approx((3 * weights + biases) / (weights + biases), rel=0.05)


def test_a_step_trains_the_converted_layers() -> None:
    built = build(images, QuadraticLayers(except_="8"))
    layer = built.model[0]
    assert isinstance(layer, QuadraticConv2d)
    assert not isinstance(built.model[8], QuadraticLinear)
    before = layer.weight.detach().clone()
    built.step()
    assert not torch.equal(layer.weight, before)


def test_invalid_requests_are_reported() -> None:
    with pytest.raises(WorkloadError, match=r"is a single layer"):
        build(inference, QuadraticLayers())
    with pytest.raises(UnknownNameError, match="neuron"):
        parse("quadratic:t9")
    (found,) = parse("quadratic:glu,init=random")
    assert found == QuadraticLayers("glu", "random")
    assert found.quality().kind is QualityKind.NEEDS_TRAINING
