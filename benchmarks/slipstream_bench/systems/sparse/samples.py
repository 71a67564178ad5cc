"""Matrices of the bench, and measurements on them in a separate process."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.spatial.distance import cdist

from slipstream.sparse.matrix import as_rows
from slipstream.sparse.metrics import NON_NEGATIVE
from slipstream.sparse.pairwise import pairwise_distances
from slipstream.sparse.search import Limits, Searcher, SearchRun
from slipstream.sparse.semiring import Semiring
from slipstream_bench.datasets import newsgroups

# SciPy's names; the other metrics are computed from their formula below.
_SCIPY = {"manhattan": "cityblock", "inner_product": "", "hellinger": "", "ruzicka": ""}
_SETS = ("dice", "jaccard", "russellrao")


def newsgroups_rows() -> sp.csr_matrix:
    """Return TF-IDF of 20 Newsgroups, words of at least two posts, float32 [18846, 75875].

    Raises:
        MissingDataError: the data set is not in the data folder.
        ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    posts = newsgroups()
    made = TfidfVectorizer(min_df=2, dtype=np.float32).fit_transform([*posts.train, *posts.test])
    return sp.csr_matrix(made)


def skewed_rows(
    rows: int, columns: int, skew: float, seed: int, entries: int = 50
) -> sp.csr_matrix:
    """Generate columns with popularity by Zipf's law and rows of log-normal length; float32.

    Args:
        skew: the exponent: popularity of the n-th column is ``n ** -skew``.
        entries: entries per row, on average, before columns drawn twice are merged.
    """
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.lognormal(np.log(entries) - 0.18, 0.6, rows).astype(np.int64), 1)
    popularity = np.cumsum(1 / np.arange(1, columns + 1) ** skew)
    total = int(lengths.sum())
    drawn = np.searchsorted(popularity, rng.random(total) * popularity[-1]).astype(np.int32)
    values = rng.gamma(2.0, size=total).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    made = sp.csr_matrix((values, drawn, starts), shape=(rows, columns))
    made.sum_duplicates()
    return made


def heavy_row() -> sp.csr_matrix:
    """Generate 20,000 rows of about 50 entries, and one in the middle with half of all columns."""
    rows = skewed_rows(20_000, 20_000, 0.8, seed=5)
    rng = np.random.default_rng(6)
    dense = np.where(rng.random(20_000) < 0.5, rng.random(20_000), 0.0).astype(np.float32)
    return sp.vstack([rows[:10_000], sp.csr_matrix(dense), rows[10_001:]]).tocsr()


def worst_error(metric: str, dtype: npt.DTypeLike, seeds: int) -> float:
    """Return a metric's error against dense float64 rows: float64 absolute, float32 relative."""
    worst = 0.0
    for seed in range(seeds):
        rows = skewed_rows(180, 400, 1.0, seed).astype(np.float64)
        if metric not in NON_NEGATIVE:
            rows.data *= np.random.default_rng(seed).choice([-1.0, 1.0], rows.nnz)
        rows = sp.vstack([rows, sp.csr_matrix((2, 400)), rows[:5]]).tocsr()
        queries = rows[::9].astype(dtype)
        options: dict[str, Any] = {"p": 3} if metric == "minkowski" else {}
        distances = pairwise_distances(queries, rows.astype(dtype), metric, **options)
        expected = _dense(metric, queries.astype(np.float64).toarray(), rows.toarray())
        finite = np.isfinite(expected)
        scale = 1.0 if dtype == np.float64 else max(1.0, float(np.abs(expected[finite]).max()))
        worst = max(worst, float(np.abs(distances[finite] - expected[finite]).max()) / scale)
    return worst


def _dense(metric: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return distances of dense rows; NaN where SciPy leaves them undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if metric == "inner_product":
            return np.asarray(a @ b.T)
        if metric == "hellinger":
            left, right = (x / np.where(x.any(1), x.sum(1), 1)[:, None] for x in (a, b))
            return np.asarray(cdist(np.sqrt(left), np.sqrt(right)) / np.sqrt(2))
        if metric == "ruzicka":
            pairs = [(np.minimum(x, b).sum(1), np.maximum(x, b).sum(1)) for x in a]
            return np.stack([1 - small / large for small, large in pairs])
        if metric in ("kl", "kl_intersection"):
            terms = np.stack([np.where(x > 0, x * np.log(x / b), 0.0) for x in a])
            if metric == "kl":
                return np.asarray(terms.sum(axis=2))
            return np.asarray(np.where(b > 0, terms, 0.0).sum(axis=2) / 2)
        if metric in _SETS:
            return np.asarray(cdist(a != 0, b != 0, metric))
        options = {"p": 3} if metric == "minkowski" else {}
        return np.asarray(cdist(a, b, _SCIPY.get(metric, metric), **options))


def peak(rows: int, block_bytes: int) -> None:
    """Print bytes of a kNN search beyond its matrix, bytes beyond index and result, and entries.

    They are tracemalloc's counts; the kernels allocate nothing themselves.
    """
    matrix = skewed_rows(rows, rows // 2, 1.0, seed=1)
    queries = as_rows(matrix[:500], "A")
    right = as_rows(matrix, "B")
    tracemalloc.start()
    run = Searcher(right, "cosine", {}, Limits(block_bytes)).against(queries)
    run.nearest(10)
    whole = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    run.nearest(10)
    print(whole, tracemalloc.get_traced_memory()[1] - held, matrix.nnz)


def sample(rows: sp.csr_matrix, count: int) -> sp.csr_matrix:
    """Return `count` of the rows, in their order."""
    chosen = np.random.default_rng(0).choice(rows.shape[0], min(count, rows.shape[0]), False)
    return rows[np.sort(chosen)]


def prepared(
    queries: sp.csr_matrix, rows: sp.csr_matrix, metric: str | Semiring, threads: int = 1
) -> SearchRun:
    """Return a search among `rows` with its index built."""
    options = {"p": 3} if metric == "minkowski" else {}
    searcher = Searcher(as_rows(rows, "B"), metric, options, Limits(threads=threads))
    return searcher.against(as_rows(queries, "A"))


def block_of(run: SearchRun) -> Callable[[], object]:
    """Return an arm that computes all distances of a search."""
    out = np.empty((len(run.left), len(run.right)), run.dtype)
    return functools.partial(run.distances, out)
