"""The "sparsity" statistic: zeros around modules, in place or not, with and without backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.capture.zeros import Zeros
from slipstream.graph import ModuleZeros


def zeros_of(model: nn.Module, batch: torch.Tensor, *, backward: bool) -> dict[str, ModuleZeros]:
    with Zeros(model) as zeros:
        output = model(batch)
        if backward:
            output.sum().backward()
    found = {layer.module: layer for layer in zeros.result(1)}
    for zero_counts in found.values():
        zero_counts.check()
    return found


@pytest.mark.parametrize("inplace", [False, True])
def test_zeros_in_and_out_of_a_relu(inplace: bool) -> None:
    first = nn.Linear(1, 4, bias=False)
    first.weight.data = torch.tensor([[1.0], [-1.0], [0.0], [2.0]])
    model = nn.Sequential(first, nn.ReLU(inplace=inplace), nn.Linear(4, 1))
    found = zeros_of(model, torch.tensor([[1.0], [3.0]]), backward=True)
    assert list(found) == ["model.0", "model.1", "model.2"]
    linear, relu, last = found.values()
    assert (linear.kind, linear.elements, linear.inputs, linear.weights) == ("Linear", 8, 0.0, 0.25)
    assert linear.outputs == 0.25  # before the activation, in place or not
    assert relu.outputs == last.inputs == 0.5
    assert linear.gradients == 0.5  # where the activation is flat
    assert relu.gradients == 0.0
    assert relu.weights is None
    assert last.weights == 0.0


def test_inference_has_no_gradients_and_integers_have_no_share() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    with torch.no_grad():
        found = zeros_of(model, torch.tensor([0, 1]), backward=False)
    assert found["model.0"].inputs is None
    assert found["model.0"].outputs == 0.0
    assert found["model.1"].gradients is None


def test_hooks_are_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    zeros_of(model, torch.ones(1, 2), backward=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
