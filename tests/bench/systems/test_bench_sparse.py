"""Verdicts of the sparse bench."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp

from slipstream.sparse import kernels
from slipstream_bench.systems.sparse import scaling
from slipstream_bench.systems.sparse.peers import _largest
from slipstream_bench.systems.sparse.samples import prepared, sample, skewed_rows


@dataclass
class Products:
    """Fake of the GraphBLAS operations that the top k uses."""

    matrix: sp.csr_matrix

    @property
    def nvals(self) -> int:
        return int(self.matrix.nnz)

    @property
    def nrows(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def ncols(self) -> int:
        return int(self.matrix.shape[1])

    def to_dense(self, fill_value: float) -> npt.NDArray[Any]:
        assert fill_value == 0
        return np.asarray(self.matrix.toarray())

    def to_csr(self) -> tuple[npt.NDArray[Any], ...]:
        return self.matrix.indptr, self.matrix.indices, self.matrix.data


@pytest.mark.parametrize("density", [0.05, 0.9])
def test_the_peer_computes_the_correct_top_k(density: float) -> None:
    matrix = sp.random(30, 200, density=density, random_state=5, format="csr")
    for row, found in zip(matrix.toarray(), _largest(Products(matrix), 8), strict=True):
        expected = np.argsort(-row)[: min(8, np.count_nonzero(row))]
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("queries", [20, 200])  # few, so that all sums stay in the cache
def test_a_power_law_is_recovered_from_times_that_follow_it(queries: int) -> None:
    runs = [
        prepared(sample(rows, queries), rows, "cosine")
        for rows in (
            skewed_rows(size, 500, skew, seed=size)
            for size in (300, 1_000, 3_000)
            for skew in (0.8, 1.0, 1.2)
        )
    ]
    table = np.array([scaling._costs(run) for run in runs])
    worth = np.array([2e-9, 30e-9, 0.02e-9, 0.5e-9, 0.4e-9, 70e-9, 3e-4])
    measured = table @ worth
    predicted = scaling._each_from_the_others(table, measured)
    assert np.allclose(predicted, measured, rtol=1e-6)


def test_costs_count_the_work_of_a_search() -> None:
    if kernels.native() is None:
        pytest.skip("no compiled library")
    rows = skewed_rows(2_000, 500, 1.0, seed=1)
    run = prepared(sample(rows, 20), rows, "cosine")
    listed, _, swept, pairs, _, retained, _ = scaling._costs(run)
    index = run.index
    assert index is not None
    of_head = index.head_of[run.left.indices] >= 0
    # Every multiply-add is listed, or in a dense column, which all rows have.
    in_dense = run.right.frequency[run.left.indices[of_head]].sum()
    assert listed + in_dense == run.work().sum()
    assert swept == 2_000 * of_head.sum()
    assert pairs == 20 * 2_000
    rng = np.random.default_rng(2)
    changes = np.mean([_replacements(rng.random(2_000), 10) for _ in range(200)])
    assert retained / 20 == pytest.approx(changes, rel=0.03)


def _replacements(distances: npt.NDArray[np.float64], k: int) -> int:
    nearest: list[float] = []
    changes = 0
    for distance in distances:
        if len(nearest) < k or distance < nearest[-1]:
            nearest = sorted([*nearest, float(distance)])[:k]
            changes += 1
    return changes
