"""Sparse Jacobians equal autograd's, and so do gradients of a chain of them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import slipstream as ss
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.scan.jacobians import (
    ChainGradient,
    backprop,
    jacobian_transposed,
)

LAYERS = [
    nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
    nn.Conv2d(3, 3, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1)),
    nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d(3, 1), nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.Flatten(),
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_jacobian_equals_autograds(layer: nn.Module) -> None:
    torch.manual_seed(0)
    layer = layer.double()
    x = torch.randn(getattr(layer, "in_channels", 3), 7, 8, dtype=torch.float64)
    made = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0], x)
    found = jacobian_transposed(layer, x)
    again = found.copy()
    again.has_sorted_indices = False
    again.sort_indices()
    assert (again.indices == found.indices).all()
    found.check_format(full_check=True)
    expected = made.reshape(-1, x.numel()).T.numpy()
    assert abs(found.toarray() - expected).max() <= 1e-14


@pytest.mark.parametrize("layer", LAYERS[:4], ids=str)
def test_the_jacobian_of_a_pruned_convolution_has_no_explicit_zeros(layer: nn.Conv2d) -> None:
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).double()
    with torch.no_grad():
        layer.weight *= torch.rand_like(layer.weight) < 0.2
    x = torch.randn(layer.in_channels, 7, 8, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0], x)
    jacobian = jacobian_transposed(layer, x)
    jacobian.check_format(full_check=True)
    assert jacobian.has_sorted_indices
    assert (jacobian.data != 0).all()
    assert abs(jacobian.toarray() - expected.reshape(-1, x.numel()).T.numpy()).max() <= 1e-14


@pytest.mark.parametrize("layer", LAYERS[:5], ids=str)
def test_new_values_reuse_the_existing_matrix(layer: nn.Module) -> None:
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).double()
    x = torch.randn(getattr(layer, "in_channels", 3), 7, 8, dtype=torch.float64)
    matrix = jacobian_transposed(layer, x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(-2)
    expected = jacobian_transposed(layer, -x)
    assert jacobian_transposed(layer, -x, matrix) is matrix
    assert abs(matrix - expected).max() == 0
    matrix.data = matrix.data[:-1]
    with pytest.raises(InvalidArgumentError, match="as an earlier call"):
        jacobian_transposed(layer, x, matrix)


def test_patterns_that_depend_on_values_are_not_cached() -> None:
    x = torch.randn(3, 6, 6)
    pool, pruned = nn.MaxPool2d(2), nn.Conv2d(3, 2, 3)
    nn.init.zeros_(pruned.weight)
    for layer in (pool, pruned):
        with pytest.raises(InvalidArgumentError, match="into"):
            jacobian_transposed(layer, x, jacobian_transposed(layer, x))


def test_the_table_has_a_row_per_level_and_names_the_shorter_method() -> None:
    chain = ChainGradient([], [[4, 6], [9]], critical=15, sequential=20)
    assert chain.pays
    text = chain.table().to_markdown()
    assert "| 0 | 2 | 10 | 6 |" in text
    assert "15 multiplications, back-propagation 20: a scan is shorter" in text
    assert "is not shorter" in replace(chain, critical=20).table().to_markdown()


def test_gradients_of_a_chain_equal_autograds() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 3),
    ]  # fmt: skip
    activations = [torch.randn(1, 1, 10, 10, dtype=torch.float64, requires_grad=True)]
    for layer in layers:
        activations.append(layer.double()(activations[-1]))
    gradient = torch.randn(3, dtype=torch.float64)
    expected = torch.autograd.grad(activations[-1], activations, gradient[None])
    assert backprop is ss.scan.backprop
    for levels in (None, 0, 1):
        found = backprop(layers, activations[0][0], gradient, levels)
        for own, other in zip(found.gradients, reversed(expected), strict=True):
            assert abs(own - other.numpy().reshape(-1)).max() <= 1e-12
        if levels == 0:  # sequential: everything is on the critical path
            assert found.critical == sum(map(sum, found.operations)) == found.sequential


def test_a_layer_without_a_jacobian_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="GELU"):
        jacobian_transposed(nn.GELU(), torch.zeros(3))
