"""Neighbours: correct and ordered, for all threads, tiles and kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp
from formulas import FORMULAS, OPTIONS, skewed

import slipstream as ss
from slipstream.errors import InvalidArgumentError
from slipstream.sparse import METRICS, Semiring, kernels, knn_graph
from slipstream.sparse.matrix import as_rows
from slipstream.sparse.search import Limits, Searcher

KNN_METRICS = tuple(m for m in METRICS if m not in ("inner_product", "kl_intersection"))


def by_sorting(
    distances: npt.NDArray[np.floating], k: int
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.int64]]:
    """Return distances and rows of the nearest: by distance, ties by row; undefined ones last."""
    filled = np.where(np.isnan(distances), np.inf, distances)
    order = np.argsort(filled, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(filled, order, axis=1), order


def search(
    a: sp.csr_matrix, b: sp.csr_matrix, metric: str, limits: Limits
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.int64], npt.NDArray[np.floating]]:
    run = Searcher(as_rows(b, "B"), metric, dict(OPTIONS.get(metric, {})), limits).against(
        as_rows(a, "A")
    )
    block = np.empty((len(run.left), len(run.right)), run.dtype)
    run.distances(block)
    return *run.nearest(9), block


@pytest.mark.parametrize("instructions", ["avx512bw", "avx2", "scalar"])
@pytest.mark.parametrize("metric", KNN_METRICS)
def test_nearest_equal_those_of_the_whole_matrix_bitwise(
    metric: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_INSTRUCTION_SET", instructions)
    if kernels.level() != {"avx512bw": 2, "avx2": 1}.get(instructions, 0):
        pytest.skip(f"{instructions} is not available")
    # Small integers: many equal distances, so that ties are tested throughout.
    a, b = (skewed(rows, 70, seed) for rows, seed in ((40, 1), (700, 2)))
    a.data, b.data = np.ceil(a.data / 2), np.ceil(b.data / 2)
    for dtype in (np.float32, np.float64):
        distance, row, block = search(a.astype(dtype), b.astype(dtype), metric, Limits())
        expected_distance, expected_row = by_sorting(block, 9)
        assert np.array_equal(distance, expected_distance)
        assert np.array_equal(row, expected_row)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "metric", ["cosine", "dice", "jaccard", "ruzicka", "braycurtis", "russellrao", "euclidean"]
)
def test_rows_without_a_common_column_are_found_too(metric: str, dtype: npt.DTypeLike) -> None:
    """Few rows share a column with a query, often fewer than k, so that others fill up in order."""
    rng = np.random.default_rng(3)
    rows = sp.random(3000, 2500, density=0.001, random_state=7, format="csr")
    rows.data = rng.integers(1, 4, rows.nnz).astype(np.float64)
    # Columns of many rows, for queries that share more of them.
    rows = sp.hstack([rows, sp.random(3000, 3, density=0.02, random_state=1)]).tocsr()
    if metric in ("cosine", "euclidean"):
        # Sums that cancel to zero on the way, and stay zero.
        rows.data *= rng.choice([-1.0, 1.0], rows.nnz)
    rows, queries = rows.astype(dtype), rows[::7].astype(dtype)
    assert (np.diff(queries.indptr) == 0).any()
    first = search(queries, rows, metric, Limits())
    expected = by_sorting(first[2], 9)
    for limits in (Limits(), Limits(tile_rows=128), Limits(threads=2, tile_rows=512)):
        distance, row, _ = search(queries, rows, metric, limits)
        assert np.array_equal(distance, expected[0])
        assert np.array_equal(row, expected[1])


@pytest.mark.parametrize("metric", ["cosine", "manhattan", "jaccard", "chebyshev", "braycurtis"])
def test_threads_tiles_and_budgets_do_not_change_a_bit(metric: str) -> None:
    rows = skewed(500 if metric == "chebyshev" else 1500, 300, 3)
    rows.data = np.ceil(rows.data)
    first = search(rows, rows, metric, Limits())
    for limits in (
        Limits(threads=2),
        Limits(threads=3, block_bytes=2**17),
        Limits(tile_rows=128),
        Limits(threads=2, tile_rows=1024),
    ):
        for made, expected in zip(search(rows, rows, metric, limits), first, strict=True):
            assert np.array_equal(made, expected)


def test_a_single_query_has_the_same_distances_as_in_a_batch() -> None:
    rows = skewed(300, 200, 4)
    whole = ss.sparse.pairwise_distances(rows, metric="euclidean")
    for i in (1, 17, 299):
        assert np.array_equal(ss.sparse.pairwise_distances(rows[i], rows)[0], whole[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_without_a_distance_hide_no_others(dtype: npt.DTypeLike) -> None:
    # Constant rows have no correlation with any; here most have none, in every block.
    rows = skewed(400, 60, 8).tolil()
    rows[np.arange(400) % 5 != 3] = 0.0
    rows = rows.tocsr().astype(dtype)
    distance, row, block = search(rows, rows, "correlation", Limits())
    expected = by_sorting(block, 9)
    assert np.array_equal(distance, expected[0])
    assert np.array_equal(row, expected[1])
    assert np.isfinite(distance[3]).all()


def test_the_graph_is_accepted_by_umap() -> None:
    rows = skewed(120, 60, 5)
    index, distance = knn_graph(rows, 6, "manhattan")
    assert index.shape == distance.shape == (120, 6)
    assert np.array_equal(index[:, 0], np.arange(120))
    assert (distance[:, 0] == 0).all()
    assert (np.diff(distance, axis=1) >= 0).all()
    others, far = knn_graph(rows, 5, "manhattan", include_self=False)
    assert np.array_equal(others, index[:, 1:])
    assert np.array_equal(far, distance[:, 1:])
    dense = FORMULAS["manhattan"](rows.toarray(), rows.toarray())
    np.fill_diagonal(dense, np.inf)
    assert np.allclose(far, np.sort(dense, axis=1)[:, :5])


def test_a_row_displaced_by_its_duplicates_is_still_excluded() -> None:
    rows = sp.csr_matrix(np.tile([[1.0, 2.0, 0.0]], (20, 1)))
    index, distance = knn_graph(rows, 3, include_self=False)
    assert (distance == 0).all()
    assert (index != np.arange(20)[:, None]).all()
    assert np.array_equal(index[10], [0, 1, 2])


def test_a_semiring_has_neighbours_too() -> None:
    rows = skewed(60, 40, 6)
    overlap = Semiring(lambda a, b: -np.ones_like(a))
    index, distance = knn_graph(rows, 4, overlap, include_self=False)
    shared = -((rows != 0).astype(int) @ (rows != 0).astype(int).T).toarray().astype(float)
    np.fill_diagonal(shared, np.inf)
    expected = by_sorting(shared, 4)
    assert np.array_equal(distance, expected[0])
    assert np.array_equal(index, expected[1])


def test_results_may_exceed_two_to_the_31_entries() -> None:
    a, b = skewed(3, 30, 1).astype(np.float32), skewed(20, 30, 2).astype(np.float32)
    try:
        # Of its 12 GiB only the written pages exist; row 2 begins at 2^31.
        wide = np.empty((3, 2**30), np.float32)
    except MemoryError:
        pytest.skip("no address space")
    for metric in ("manhattan", "chebyshev"):
        made = ss.sparse.pairwise_distances(a, b, metric, out=wide[:, :20])
        assert np.array_equal(made, ss.sparse.pairwise_distances(a, b, metric))


def test_tiles_are_parts_of_the_matrix() -> None:
    a, b = skewed(33, 80, 1), skewed(90, 80, 2)
    whole = ss.sparse.pairwise_distances(a, b, "canberra")
    for arguments in ({"rows": 7}, {"block_bytes": 2**16}, {}):
        tiles = list(ss.sparse.distance_tiles(a, b, "canberra", **arguments))
        assert [tile.first for tile in tiles] == list(
            np.cumsum([0, *(len(tile.distances) for tile in tiles[:-1])])
        )
        assert np.array_equal(np.vstack([tile.distances for tile in tiles]), whole)


def test_the_result_can_be_written_into_an_array_of_the_caller() -> None:
    a = skewed(20, 30, 1)
    wide = np.full((20, 40), 7.0)
    made = ss.sparse.pairwise_distances(a, metric="l1", out=wide[:, 10:30])
    assert made.base is wide
    assert np.array_equal(made, ss.sparse.pairwise_distances(a, metric="cityblock"))
    assert (wide[:, :10] == 7).all()
    assert (wide[:, 30:] == 7).all()
    with pytest.raises(InvalidArgumentError, match="out: float32"):
        ss.sparse.pairwise_distances(a, out=np.empty((20, 20), np.float32))
    fixed = np.empty((20, 20))
    fixed.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=r"^out: .*\bread-only\b"):
        ss.sparse.pairwise_distances(a, out=fixed)
