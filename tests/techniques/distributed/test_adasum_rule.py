"""Adasum's rule: its algebra at every scale, and weights from dot products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from environments import switch_library_off
from slipstream.techniques.distributed.adasum import kernels
from slipstream.techniques.distributed.adasum.rule import left_of, orthogonality, weights
from slipstream_bench.systems.adasum.reference import adasum_of


def vectors(
    count: int, length: int = 1000, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(length, generator=generator)
    return [
        (common + torch.randn(length, generator=generator) * (k + 1)).to(dtype)
        for k in range(count)
    ]


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_orthogonal_gradients_are_summed_and_parallel_ones_averaged(scale: float) -> None:
    a, b = torch.zeros(64), torch.zeros(64)
    a[:32], b[32:] = torch.randn(32) * scale, torch.randn(32) * scale
    assert off(adasum_of([a, b]), a + b) <= 1e-6
    for factor in (1.0, 3.0, 1e-3):
        assert off(adasum_of([a, factor * a]), (a + factor * a) / 2) <= 1e-6
    c = a.clone()
    c[:32] *= -2.0
    assert off(adasum_of([a, c]), (a + c) / 2) <= 1e-6


def test_zero_is_the_neutral_vector() -> None:
    a, zero = torch.randn(10), torch.zeros(10)
    assert torch.equal(adasum_of([a, zero]), a)
    assert torch.equal(adasum_of([zero, a]), a)
    assert torch.equal(adasum_of([zero, zero]), zero)
    tiny = torch.full((10,), 1e-45)
    assert off(adasum_of([a, tiny]), a) <= 1e-6 or adasum_of([a, tiny]).isfinite().all()


def test_it_is_commutative_but_not_associative() -> None:
    a, b, c = vectors(3)
    assert torch.equal(adasum_of([a, b]), adasum_of([b, a]))
    assert off(adasum_of([a, b, c]), adasum_of([a, adasum_of([b, c])])) > 1e-3


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e12])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_scaled_vectors_give_the_scaled_result(scale: float, count: int) -> None:
    rows = vectors(count)
    assert off(adasum_of([scale * vector for vector in rows]) / scale, adasum_of(rows)) <= 1e-6


def test_the_tree_combines_neighbours_first() -> None:
    assert [left_of(n) for n in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 4, 4, 8]
    a, b, c, d, e = vectors(5)
    pairs = adasum_of([adasum_of([adasum_of([a, b]), adasum_of([c, d])]), e])
    assert off(adasum_of([a, b, c, d, e]), pairs) <= 1e-6


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_weights_from_dot_products_give_the_same_vector(count: int) -> None:
    parts = vectors(count, dtype=torch.float64)
    rows = torch.stack(parts)
    found = weights((rows @ rows.T).numpy()[None])[0]
    assert off(torch.from_numpy(found) @ rows, adasum_of(parts)) <= 1e-12


def test_vectors_that_cancel_give_their_branch_zero_weight() -> None:
    a, c = torch.randn(100, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    rows = torch.stack([a, -a, c])
    found = torch.from_numpy(weights((rows @ rows.T).numpy()[None])[0]) @ rows
    assert off(found, c) <= 1e-6


def test_the_gain_is_between_the_mean_and_the_sum() -> None:
    identical, unlike = torch.ones(4, 8, dtype=torch.float64), torch.eye(4, 8, dtype=torch.float64)
    products = torch.stack([identical @ identical.T, unlike @ unlike.T]).numpy()
    assert orthogonality(products).tolist() == pytest.approx([0.25, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_kernels_equal_the_reference_bitwise(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = vectors(count, 4500, dtype)
    starts = np.array([0, 0, 1, 17, 2048, 2048, 4499, 4500])
    factors = np.random.default_rng(0).normal(size=(7, count))
    switch_library_off(monkeypatch)
    expected = kernels.products(rows, starts)
    combined = torch.zeros(4500, dtype=dtype)
    kernels.combine(rows, starts, factors, combined)
    monkeypatch.undo()
    plain = torch.stack([row.double() for row in rows])
    for layer, (a, b) in enumerate(itertools.pairwise(starts.tolist())):
        assert torch.allclose(torch.from_numpy(expected[layer]), plain[:, a:b] @ plain[:, a:b].T)
    if kernels.kernels():
        for level in kernels.kernels():
            assert np.array_equal(kernels.products(rows, starts, level), expected)
            again = [row.clone() for row in rows]
            kernels.combine(again, starts, factors, again[-1], level)
            assert torch.equal(again[-1], combined)


def test_rounding_errors_around_zero_get_no_weight() -> None:
    # Two vectors cancel except for rounding of their products; a third remains.
    a, c = torch.randn(100, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    rows = torch.stack([a, -a, c])
    products = (rows @ rows.T).numpy()
    for error in (1e-15, -1e-15, 3e-16):
        off_by = products.copy()
        off_by[0, 1] *= 1 - error
        off_by[1, 0] *= 1 - error
        # Regardless of the rounding of the product of zero and the third.
        off_by[1, 2] *= 1 - 1e-14
        off_by[2, 1] *= 1 - 1e-14
        factors = weights(off_by[None])[0]
        assert factors == pytest.approx([1.5, 1.5, 1.0])
        assert off(torch.from_numpy(factors) @ rows, c) <= 1e-6


def test_a_layer_with_a_nonfinite_product_has_no_weights_and_others_do() -> None:
    for bad in (np.nan, np.inf):
        for at in np.ndindex(3, 3):
            products = np.stack([np.eye(3)] * 3)
            products[(1, *at)] = bad
            found = weights(products)
            assert np.isnan(found[1]).all()
            assert np.isfinite(found[[0, 2]]).all()
