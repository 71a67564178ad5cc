"""Rows of ``slipstream bench sparse`` against libraries with the same function, if installed.

None of them is a dependency: a row lists the ones that are installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from slipstream.sparse.semiring import Semiring
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, not_judged
from slipstream_bench.systems.sparse.samples import block_of, prepared

# Required ratio of the best peer's time to ours in a search of the nearest by cosine, by data set.
_TARGETS = {"20 Newsgroups": 1.5}
# GraphBLAS's name of a semiring, and our equivalent; a metric serves for its sums.
_SEMIRINGS: dict[str, str | Semiring] = {
    "plus_times": "inner_product",
    "plus_min": "manhattan",
    "min_plus": Semiring(lambda a, b: a + b, reduce="min"),
}


def optional(name: str) -> Any:
    """Return an optional peer, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@functools.cache
def _graphblas() -> Any:
    """Return python-graphblas over SuiteSparse:GraphBLAS on one thread, or None."""
    found = optional("graphblas")
    if found is None:
        return None
    try:
        found.init("suitesparse", blocking=True)
        found.ss.config["nthreads"] = 1
    except (ImportError, AttributeError):
        return None  # the C library is missing or has another version
    return found


def knn_bars(
    options: BenchOptions, name: str, rows: sp.csr_matrix, queries: sp.csr_matrix, blocks: int
) -> Iterator[Bar]:
    bar = f"kNN cosine against the best peer: {name}"
    if not options.wants(bar):
        return
    options.progress(bar)
    from sklearn.neighbors import NearestNeighbors
    from sklearn.preprocessing import normalize

    run = prepared(queries, rows, "cosine")
    search = NearestNeighbors(n_neighbors=10, metric="cosine", algorithm="brute").fit(rows)
    columns, unit = normalize(rows).T.tocsr(), normalize(queries)
    peers: dict[str, Callable[[], object]] = {
        "scikit-learn": functools.partial(search.kneighbors, queries)
    }
    missing = []
    topn, graphblas = optional("sparse_dot_topn"), _graphblas()
    if topn is None:
        missing.append("sparse_dot_topn is not installed")
    else:
        peers["sparse_dot_topn"] = functools.partial(
            topn.sp_matmul_topn, unit, columns, top_n=10, n_threads=1
        )
    if graphblas is None:
        missing.append("GraphBLAS is not installed")
    else:
        left, right = map(graphblas.io.from_scipy_sparse, (unit, columns))
        peers["GraphBLAS and a top k"] = lambda: _largest(
            _product(graphblas.semiring.plus_times, left, right), 10
        )
    with one_thread():
        taken = paired(
            {"ours": functools.partial(run.nearest, 10), **peers}, blocks=blocks, budget_s=60.0
        )
    ratios = {peer: taken.ratio(peer, "ours") for peer in peers}
    best = min(peers, key=lambda peer: ratios[peer].value)
    detail = f"k=10, {queries.shape[0]} queries, float32, one thread; {taken}; "
    detail += ", ".join([f"{peer} {ratio}" for peer, ratio in ratios.items()] + missing)
    yield ratios[best].at_least(bar, _TARGETS.get(name, 1.0), detail=detail)


def _product(semiring: Any, left: Any, right: Any) -> Any:
    return semiring(left @ right).new()


def _largest(products: Any, k: int) -> list[npt.NDArray[Any]]:
    """Return the columns of the `k` largest values in each row of a matrix, largest first."""
    if products.nvals * 4 > products.nrows * products.ncols:
        dense = products.to_dense(fill_value=0)
        near = np.argpartition(dense, -k, axis=1)[:, -k:]
        order = np.argsort(np.take_along_axis(dense, near, axis=1), axis=1)[:, ::-1]
        return list(np.take_along_axis(near, order, axis=1))
    starts, columns, values = products.to_csr()
    found = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        value = values[begin:end]
        near = np.argpartition(value, -k)[-k:] if len(value) > k else np.arange(len(value))
        found.append(columns[begin:end][near[np.argsort(value[near])[::-1]]])
    return found


def semiring_bars(
    options: BenchOptions, name: str, rows: sp.csr_matrix, queries: sp.csr_matrix, blocks: int
) -> Iterator[Bar]:
    for semiring, metric in _SEMIRINGS.items():
        bar = f"semiring {semiring} against GraphBLAS: {name}"
        if not options.wants(bar):
            continue
        graphblas = _graphblas()
        if graphblas is None:
            yield not_judged(bar, "x", "reported", "GraphBLAS is not installed")
            continue
        options.progress(bar)
        multiply = getattr(graphblas.semiring, semiring)
        left, right = map(graphblas.io.from_scipy_sparse, (queries, rows.T.tocsr()))
        ours = block_of(prepared(queries, rows, metric))
        product = functools.partial(_product, multiply, left, right)
        with one_thread():
            taken = paired({"ours": ours, "GraphBLAS": product}, blocks=blocks, budget_s=60.0)
        detail = f"{queries.shape[0]} queries x all rows, one thread, ours dense"
        detail += ", a Semiring of NumPy in float64" if isinstance(metric, Semiring) else ""
        detail += f", theirs of float32 and without what finishes a distance; {taken}"
        yield taken.ratio("GraphBLAS", "ours").reported(bar, detail=detail)
