"""Fake quantization: values of the codes, gradients of the papers."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.errors import InvalidArgumentError
from slipstream.quant import (
    BinaryWeights,
    FakeQuantize,
    Format,
    Granularity,
    binarize,
    dequantize,
    fake_quantize,
    grid_of_range,
    grid_of_weights,
    quantize,
)


def values() -> torch.Tensor:
    return torch.randn(6, 80, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scales", ["tensor", "channel", "block32"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_equals_quantize_and_dequantize(bits: int, scales: str) -> None:
    x = values()
    grid = grid_of_weights(x, Format(bits, signed=True), Granularity.of(scales))
    expected = dequantize(quantize(x, grid), grid)
    assert torch.equal(fake_quantize(x, grid), expected)
    fake = FakeQuantize(grid)
    # The scale is stored as a logarithm.
    assert torch.allclose(fake.scale, grid.scale, rtol=1e-6)
    assert torch.equal(fake(x), dequantize(quantize(x, fake.grid), fake.grid))


@pytest.mark.parametrize("bits", range(1, 9))
def test_equals_quantize_and_dequantize_on_affine_grids(bits: int) -> None:
    x = values() + 0.7
    grid = grid_of_range(x.min(), x.max(), Format(bits))
    assert torch.allclose(fake_quantize(x, grid), dequantize(quantize(x, grid), grid), atol=1e-6)


def test_gradient_is_0_outside_the_range() -> None:
    x = torch.tensor([-9.0, -0.4, 0.3, 9.0], requires_grad=True)
    fake_quantize(x, grid_of_range(-1.0, 1.0, Format(3))).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.tensor([0.0, 1.0, 1.0, 0.0]))


def test_gradient_of_the_scale_matches_the_paper() -> None:
    x = torch.tensor([-9.0, -0.4, 0.3, 0.9, 9.0])
    fake = FakeQuantize(grid_of_range(-1.0, 1.0, Format(3, signed=True), symmetric=True))
    fake(x).sum().backward()
    step = fake.scale.item()
    inside = [round(v / step) - v / step for v in (-0.4, 0.3, 0.9)]
    expected = step * (sum(inside) - 4 + 3) / math.sqrt(5 * 3)
    assert float(fake.log_scale.grad) == pytest.approx(expected, rel=1e-5)


def test_training_the_scale_lowers_the_error() -> None:
    x = values()
    fake = FakeQuantize(grid_of_range(-8.0, 8.0, Format(3)))
    before = (fake(x) - x).square().mean().item()
    optimizer = torch.optim.Adam(fake.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        (fake(x) - x).square().mean().backward()
        optimizer.step()
    assert (fake(x) - x).square().mean().item() < 0.5 * before
    assert torch.allclose(fake(x), dequantize(quantize(x, fake.grid), fake.grid))
    fixed = FakeQuantize(fake.grid, learn=False)
    assert not list(fixed.parameters())
    assert set(fixed.state_dict()) == {"log_scale", "zero"}


def test_binary_weights_are_scaled_signs() -> None:
    weight = values().requires_grad_()
    codes, scale = binarize(weight, Granularity.of("channel"))
    result = BinaryWeights(Granularity.of("channel"))(weight)
    assert torch.equal(result, codes * scale[:, None])
    result.sum().backward()
    assert weight.grad is not None
    assert bool(weight.grad.abs().sum() > 0)


def test_refuses_a_grid_of_another_shape() -> None:
    grid = grid_of_weights(torch.ones(2, 3), Format(4, signed=True), Granularity.of("channel"))
    with pytest.raises(InvalidArgumentError, match="grid"):
        fake_quantize(torch.ones(3, 3), grid)
