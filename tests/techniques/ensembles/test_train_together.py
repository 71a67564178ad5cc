"""A combined step of all members trains each like its own step."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Role
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.ensembles.stacking import StackedConv2d, StackedLinear, fastest
from slipstream.techniques.ensembles.technique import TrainTogether

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, images, inference, mlp

from known_durations import BytesMoved, timed_by_bytes


def member(model: nn.Module, number: int) -> dict[str, torch.Tensor]:
    return {
        name: value[number].detach().clone()
        for name, value in model.state_dict().items()
        if value.dim()
    }


def with_layer_norm() -> Any:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3, bias=False))
    batch = (torch.randn(5, 4, 6), torch.randint(0, 3, (5,)))
    model.append(_Mean())
    return model, batch, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


@pytest.mark.parametrize("way", ["together", "in_turn"])
@pytest.mark.parametrize("make", [mlp, images, with_layer_norm])
def test_each_member_is_trained_as_if_alone(make: Any, way: Any) -> None:
    built = build(make, TrainTogether(3))
    layers = [
        module
        for module in built.model.modules()
        if isinstance(module, StackedLinear | StackedConv2d)
    ]
    assert layers
    for layer in layers:
        layer.way = way
    alone = []
    for number in range(3):
        single = build(make)
        state = {
            n: v for n, v in member(built.model, number).items() if n in single.model.state_dict()
        }
        single.model.load_state_dict(state, strict=False)
        alone.append(single)
    assert not torch.equal(*(next(iter(alone[i].model.parameters())) for i in (0, 1)))
    for _ in range(3):
        built.step()
        for trainer in alone:
            trainer.step()
    for number, single in enumerate(alone):
        for name, value in member(built.model, number).items():
            expected = single.model.state_dict()[name]
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("weights", ["own", "shared"])
@pytest.mark.parametrize("make", [mlp, images])
def test_requested_calls_can_be_timed(make: Any, weights: Any) -> None:
    technique = TrainTogether(2, weights)
    assert technique.why_not(graph_of(make)) is None
    assert cannot_be_timed(technique.required_timings(graph_of(make))) == []


def test_a_combined_step_has_all_samples_and_weights() -> None:
    graph = timed_by_bytes(graph_of(mlp))
    technique, durations = TrainTogether(4), BytesMoved()
    durations.measure(technique.required_timings(graph))
    edited = technique.predict(graph, Context(durations))  # type: ignore[arg-type]
    assert edited.samples == 4 * graph.samples
    assert len(edited) == len(graph)
    for role in (Role.PARAMETER, Role.OPTIMIZER):
        before, after = (g.memory.nbytes[g.memory.role == role].sum() for g in (graph, edited))
        assert after == 4 * before
    assert edited.tasks.duration_ns.sum() > 1.5 * graph.tasks.duration_ns.sum()


def test_shared_weights_train_and_differ_by_factors() -> None:
    built = build(mlp, TrainTogether(2, "shared"))
    first = built.model[0]
    assert first.weight.shape == (32, 16)
    before = copy.deepcopy(first.state_dict())
    built.step()
    assert all(not torch.equal(before[name], value) for name, value in first.state_dict().items())


def test_the_fastest_is_the_one_with_the_least_time() -> None:
    assert fastest({"long": lambda: sum(range(200_000)), "short": lambda: None}) == "short"


class _States(nn.Module):
    """A recurrent layer between linear ones, or an embedding before them."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.first(x)
        scores: torch.Tensor = self.head(
            (states[0] if isinstance(states, tuple) else states)[:, -1]
        )
        return scores


def with_gru() -> Any:
    model = _States(nn.GRU(6, 8, batch_first=True))
    batch = (torch.randn(5, 4, 6), torch.randint(0, 3, (5,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


def with_embedding() -> Any:
    model = _States(nn.Embedding(11, 8))
    batch = (torch.randint(0, 11, (5, 4)), torch.randint(0, 3, (5,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(("make", "kind"), [(with_gru, "gru"), (with_embedding, "embedding")])
def test_unsupported_models_are_not_predicted(make: Any, kind: str) -> None:
    assert f"{kind} of " in str(TrainTogether(2).why_not(graph_of(make)))
    with pytest.raises(WorkloadError, match="cannot be computed for several members"):
        build(make, TrainTogether(2))


def test_invalid_requests_are_reported() -> None:
    with pytest.raises(WorkloadError, match="no optimizer"):
        build(inference, TrainTogether(2))
    with pytest.raises(InvalidArgumentError, match="members are not possible"):
        parse("ensemble:1")
    assert "does not train" in (TrainTogether().why_not(graph_of(inference)) or "")
    (found,) = parse("ensemble:4,weights=shared")
    assert found == TrainTogether(4, "shared")
    assert found.quality().kind is QualityKind.NEEDS_TRAINING
