"""Shapes, initial values and decompositions of tensor trains agree with theory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import slipstream as ss
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding import tt_init
from slipstream.techniques.embedding.tt_shape import TTShape, nearest_dimension
from slipstream.techniques.embedding.tt_svd import tt_svd


@pytest.mark.parametrize(
    ("dim", "factors"),
    [(16, (2, 2, 4)), (32, (2, 4, 4)), (64, (4, 4, 4)), (128, (4, 4, 8)), (30, (2, 3, 5))],
)
def test_dimensions_are_factored_evenly(dim: int, factors: tuple[int, ...]) -> None:
    assert TTShape.of(1000, dim, (4, 4)).columns == factors


@pytest.mark.parametrize("rows", [1, 7, 1000, 1001, 11_000_000, 10**15])
@pytest.mark.parametrize("cores", [2, 3, 4])
def test_rows_fit_with_little_excess(rows: int, cores: int) -> None:
    shape = TTShape.of(rows, 64, (4,) * (cores - 1))
    total = math.prod(shape.rows)
    assert total >= rows
    # Each factor is at most one more than the root, so the excess is at most a face of the cube.
    assert total < rows + 2 * cores * (rows ** (1 / cores) + 1) ** (cores - 1)


def test_the_cost_of_the_published_shape() -> None:
    shape = TTShape.of(11_000_000, 64, 32, ((200, 220, 250), (4, 4, 4)))
    assert shape.flops == 36_864
    assert shape.numbers == 200 * 4 * 32 + 220 * 32 * 4 * 32 + 250 * 32 * 4
    assert shape.digits == [55_000, 250, 1]
    assert nearest_dimension(17, 3) in (16, 18)
    assert nearest_dimension(1, 3) == 8


@pytest.mark.parametrize(
    "ranks", [(2,), (2, 2), (8, 8), (32, 32), (2, 2, 2), (8, 8, 8), (32, 32, 32)]
)
def test_initial_values_are_normal_with_the_requested_deviation(ranks: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    drawn, rows = [], 100 if max(ranks) < 32 else 800
    while sum(part.numel() for part in drawn) < 100_000:
        # Many trains, few rows of each: rows of one train share slices.
        train = ss.nn.TTEmbedding(30**3, 16, ranks, init_std=0.25)
        drawn.append(train(torch.randint(0, 30**3, (rows,))).detach().flatten().double())
    made = torch.cat(drawn)
    assert float(made.std()) == pytest.approx(0.25, rel=0.02)
    kurtosis = float((made**4).mean() / (made**2).mean() ** 2 - 3)
    assert abs(kurtosis) <= 0.3
    excess = tt_init.excess_kurtosis
    if tt_init.needs_rotations(ranks):
        excess = tt_init.rotated_excess_kurtosis
    expected = excess(ranks, tt_init._moments(tt_init._threshold(ranks))[1])
    assert kurtosis == pytest.approx(expected, abs=0.15)


def test_rotations_preserve_norms() -> None:
    core = torch.empty(5, 6, 3, 6)
    turned = tt_init._rotations(core)
    assert turned.shape == core.shape
    row = torch.randn(6, dtype=torch.float64)
    made = torch.einsum("r,prqs->pqs", row, turned)
    lengths = torch.linalg.vector_norm(made, dim=-1)
    assert torch.allclose(lengths, math.sqrt(6) * row.norm())


def test_plain_normal_cores_have_the_computed_kurtosis() -> None:
    assert tt_init.excess_kurtosis((2, 2), 3.0) == pytest.approx(9.0)
    assert tt_init.excess_kurtosis((32, 32), 3.0) == pytest.approx(0.38, abs=0.01)
    second, fourth = tt_init._moments(2.0)
    assert second == pytest.approx(5.7464, abs=1e-4)
    assert tt_init.excess_kurtosis((2, 2), fourth) == pytest.approx(-0.26, abs=0.02)
    train = ss.nn.TTEmbedding(1000, 8, (64, 64), init="gaussian")
    assert float(train.to_dense().std()) == pytest.approx(1 / math.sqrt(3000), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [(5,), (3, 4), (2, 3, 2)])
def test_tables_of_exact_rank_are_recovered(ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    shapes: dict[int, Any] = {
        1: ((20, 30), (4, 4)), 2: ((8, 9, 10), (2, 2, 4)), 3: ((4, 5, 6, 7), (2, 2, 2, 2)),
    }  # fmt: skip
    factors = shapes[len(ranks)]
    rows = math.prod(factors[0])
    table = ss.nn.TTEmbedding(rows, 16, ranks, factors, init_std=1.0, dtype=dtype).to_dense()
    wider = tuple(rank + 1 for rank in ranks)
    for requested in (ranks, wider):
        found = ss.nn.TTEmbedding.from_dense(table, requested, factors).to_dense()
        assert float((found - table).abs().max() / table.abs().max()) <= 1e-5


@pytest.mark.parametrize("ranks", [(6,), (6, 8), (4, 6, 5)])
def test_the_error_of_any_table_is_within_its_bound(ranks: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    table = torch.randn(500, 16)
    found = tt_svd(table, TTShape.of(500, 16, ranks))
    bound = math.sqrt(sum(float(values.square().sum()) for values in found.discarded))
    made = ss.nn.TTEmbeddingBag.from_dense(table, ranks).to_dense()
    assert float((made - table).norm()) <= 1.01 * bound


def test_row_weights_improve_heavy_rows() -> None:
    torch.manual_seed(0)
    table, weights = torch.randn(500, 16), torch.rand(500) ** 8
    plain, weighted = (
        (ss.nn.TTEmbedding.from_dense(table, (4, 6), row_weights=row_weights).to_dense() - table)
        .square()
        .sum(1)
        for row_weights in (None, weights)
    )
    assert float((weighted * weights).sum()) < 0.98 * float((plain * weights).sum())


def test_invalid_tables_are_refused() -> None:
    table = torch.randn(50, 8)
    bad = table.clone()
    bad[3, 3] = math.nan
    for weight, weights, message in (
        (bad, None, r"^weight: .*\bNaN\b"),
        (table[0], None, "weight: has 1 dimensions"),
        (table.long(), None, "dtype"),
        (table.numpy(), None, r"^weight: .*\bndarray\b"),
        (table, [1.0] * 50, r"^row_weights: .*\blist\b"),
        (table, torch.ones(49), r"^row_weights: .*\b49\b"),
        (table, -torch.ones(50), "row_weights: must be"),
        (table, torch.zeros(50), "row_weights: must be"),
        (table, torch.full((50,), math.nan), "row_weights: must be"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            ss.nn.TTEmbedding.from_dense(weight, (2, 2), row_weights=weights)
