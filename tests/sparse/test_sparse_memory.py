"""Working memory stays within the block budget; the index is a few times the matrix."""

from __future__ import annotations

import tracemalloc

import pytest

from slipstream.sparse.matrix import as_rows
from slipstream.sparse.search import Limits, Searcher
from slipstream_bench.systems.sparse.samples import skewed_rows


@pytest.mark.parametrize("metric", ["cosine", "jaccard", "kl"])
@pytest.mark.parametrize("budget", [2**20, 2**23])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_search_stays_within_its_budget(metric: str, budget: int, threads: int) -> None:
    rows = as_rows(skewed_rows(20_000, 10_000, 1.0, seed=1, entries=30), "X")
    searcher = Searcher(rows, metric, {}, Limits(budget, threads))
    run = searcher.against(rows.slice(0, 1500))
    result_bytes = 1500 * 5 * (4 + 8)
    tracemalloc.start()
    try:
        run.nearest(5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 1.1 * budget + 2 * result_bytes


def test_the_index_is_a_few_times_the_matrix() -> None:
    rows = as_rows(skewed_rows(50_000, 10_000, 1.0, seed=1), "X")
    run = Searcher(rows, "cosine", {}, Limits()).against(rows.slice(0, 10))
    matrix = rows.data.nbytes + rows.indices.nbytes + rows.indptr.nbytes
    assert run.index is not None
    assert run.index.nbytes <= 2**25 + 5 * matrix
