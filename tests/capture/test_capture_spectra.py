"""The "spectra" statistic, against torch's decomposition, exact and by projection."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.capture import spectra
from slipstream.capture.spectra import matrices, spectrum
from slipstream.graph import Spectrum


def of(tensor: torch.Tensor) -> Spectrum:
    found = spectrum("w", tensor, "weight")
    assert found is not None
    found.check()
    return found


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6), (8, 3, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_values_of_a_small_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = of(tensor)
    matrix = tensor.reshape(shape[0], -1).double()
    assert (found.rows, found.columns, found.exact) == (*matrix.shape, True)
    assert found.values == pytest.approx(torch.linalg.svdvals(matrix).tolist(), rel=1e-5)
    assert found.norm == pytest.approx(float(matrix.norm()))
    assert found.energy(len(found.values)) == pytest.approx(1.0)


def test_energy_and_rank_are_inverse_functions() -> None:
    found = of(torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])))
    assert found.energy(1) == pytest.approx(9 / 14)
    assert [found.rank(share) for share in (0.1, 9 / 14 - 1e-6, 0.65, 0.9, 0.99)] == [1, 1, 2, 2, 3]
    assert of(torch.zeros(3, 3)).energy(0) == 1.0


def test_a_large_matrix_gets_its_largest_values(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    left, _ = torch.linalg.qr(torch.randn(120, 60, generator=random))
    right, _ = torch.linalg.qr(torch.randn(90, 60, generator=random))
    true = torch.logspace(0, -3, 60)
    matrix = left * true @ right.t()
    monkeypatch.setattr(spectra, "_MAX_SIDE", 50)
    monkeypatch.setattr(spectra, "_MAX_VALUES", 24)
    state = torch.get_rng_state()
    found = of(matrix)
    assert not found.exact
    assert len(found.values) == 24
    assert found.values == pytest.approx(true[:24].tolist(), rel=0.02)
    assert all(v <= t * (1 + 1e-5) for v, t in zip(found.values, true.tolist(), strict=False))
    assert found.rank(0.9999999) is None
    assert found.norm == pytest.approx(float(matrix.norm()), rel=1e-6)
    assert of(matrix) == found  # the same random numbers every time, from a separate generator
    assert torch.equal(torch.get_rng_state(), state)


def test_a_matrix_with_nonfinite_values_has_no_spectrum() -> None:
    assert spectrum("w", torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), "weight") is None
    assert spectrum("w", torch.tensor([[1.0, float("inf")], [0.0, 1.0]]), "weight") is None


def test_which_parameters_are_matrices() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Linear(1, 5), nn.Linear(5, 2))
    assert [name for name, _ in matrices(model)] == ["model.0.weight", "model.3.weight"]
