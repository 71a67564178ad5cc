"""The "grads" statistic: norms, noise and concentration of gradients, against planted values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from slipstream.capture.spectra import Gradients
from slipstream.graph import GradientNoise


def noise_of(*gradients: torch.Tensor, model: nn.Module | None = None) -> GradientNoise:
    parameter = nn.Parameter(torch.zeros_like(gradients[0].to_dense()))
    optimizer = torch.optim.SGD([parameter], 0.1)
    with Gradients(model, noise=True, spectra=False) as found:
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    (noise,) = found.noise()
    noise.check()
    return noise


def test_norm_and_concentration_of_one_gradient() -> None:
    gradient = torch.zeros(200)
    gradient[:4] = torch.tensor([3.0, -2.0, 1.0, 1.0])
    found = noise_of(gradient)
    assert (found.elements, found.steps) == (200, 1)
    assert found.norm == pytest.approx(math.sqrt(15))
    assert found.mean_square == pytest.approx(15 / 200)
    assert found.zeros == pytest.approx(196 / 200)
    assert found.top_energy == pytest.approx(13 / 15)  # two of 200 are 1 %
    assert found.variance is None
    assert found.noise_scale is None


def test_the_noise_scale_of_planted_noise() -> None:
    random = torch.Generator().manual_seed(0)
    signal = torch.randn(20_000, generator=random)
    steps = [signal + 2.0 * torch.randn(20_000, generator=random) for _ in range(4)]
    found = noise_of(*steps)
    assert found.variance == pytest.approx(4.0, rel=0.05)
    assert found.noise_scale == pytest.approx(4.0, rel=0.1)
    stacked = torch.stack(steps)
    assert found.variance == pytest.approx(float(stacked.var(0).mean()), rel=1e-4)


def test_equal_gradients_have_no_noise_and_opposite_ones_only_noise() -> None:
    same = torch.ones(5)
    assert noise_of(same, same).noise_scale == pytest.approx(0.0, abs=1e-6)
    assert noise_of(same, -same).noise_scale == math.inf
    assert noise_of(0 * same, 0 * same).noise_scale == 0.0


def test_a_sparse_gradient_counts_absent_rows_as_zeros() -> None:
    gradient = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 4), (10, 4)).coalesce()
    found = noise_of(gradient)
    assert found.zeros == pytest.approx(0.9)
    assert found.norm == pytest.approx(4.0)


def test_steps_that_a_scaler_would_skip_are_left_out() -> None:
    found = noise_of(torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 1.0]))
    assert found.steps == 1
    assert found.mean_square == pytest.approx(1.0)


def test_it_sees_the_gradients_of_the_optimizer_and_the_spectrum_of_the_last_step() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    last = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    with Gradients(model, noise=True, spectra=True) as found:
        for number, gradient in enumerate((torch.ones(2, 3), 10 * last)):
            found.last_step = number == 1
            model.weight.grad = gradient.clone()
            nn.utils.clip_grad_norm_(model.parameters(), math.sqrt(5))
            optimizer.step()
            optimizer.zero_grad()
    (noise,) = found.noise()
    assert noise.parameter == "model.weight"
    assert noise.norm == pytest.approx(math.sqrt(5), rel=1e-4)
    (spectrum,) = found.spectra()
    assert (spectrum.parameter, spectrum.of) == ("model.weight", "gradient")
    assert spectrum.values == pytest.approx([2.0, 1.0], rel=1e-4)
    model.weight.grad = torch.full((2, 3), 7.0)
    optimizer.step()  # outside of it, nothing is observed
    assert found.noise() == (noise,)
