"""``slipstream bench sparse``: exactness and speed of distances of sparse rows.

Speeds are ratios of CPU times of one thread, measured alternately in one process; memory is the
peak of a child process.
"""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

from slipstream.data import MissingDataError
from slipstream.sparse import kernels
from slipstream.sparse.metrics import METRICS
from slipstream.sparse.neighbours import knn_graph
from slipstream_bench.datasets import gowalla, movielens_100k
from slipstream_bench.harness import one_thread, paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.sparse.peers import knn_bars, optional, semiring_bars
from slipstream_bench.systems.sparse.samples import (
    block_of,
    newsgroups_rows,
    prepared,
    sample,
    worst_error,
)
from slipstream_bench.systems.sparse.scaling import (
    device_bars,
    memory_bars,
    threads_bars,
    work_law_bars,
)

_QUERIES_FULL, _QUERIES_QUICK = 200, 60
_BLOCKS = 8
_CHEAP = ("manhattan", "euclidean", "canberra", "hamming")
_DEAR = ("jensenshannon", "kl", "minkowski")
_SEMIRING_SETS = ("20 Newsgroups", "Gowalla")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows; quick takes 60 queries (200 for kNN, as full) and smaller matrices."""
    if kernels.native() is None:
        yield not_judged("native kernels", "", "available", "the compiled library is not here")
        return
    yield from _right(options)
    sets = dict(_real_sets())
    for name, rows in sets.items():
        if isinstance(rows, str):
            for bar in _SPEED_BARS[name]:
                if options.wants(bar):
                    yield not_judged(bar, "x", "see docs/sparse.md", rows)
            continue
        yield from _against_sklearn(options, name, rows)
        yield from _among_metrics(options, name, rows)
    yield from _whole_graph(options, sets.get("20 Newsgroups"))
    yield from threads_bars(options, sets.get("20 Newsgroups"))
    yield from work_law_bars(options)
    yield from memory_bars(options)
    yield from device_bars(options, sets.get("20 Newsgroups"))


_SPEED_BARS = {
    "20 Newsgroups": ["L1 against scikit-learn: 20 Newsgroups"],
    "Gowalla": ["L1 against scikit-learn: Gowalla"],
    "MovieLens-100k": ["kNN cosine against the best peer: MovieLens-100k"],
}


def _real_sets() -> Iterator[tuple[str, sp.csr_matrix | str]]:
    """Yield each data set's rows, float32, or why they are missing."""
    makers: list[tuple[str, Callable[[], sp.csr_matrix]]] = [
        ("20 Newsgroups", newsgroups_rows),
        ("Gowalla", _gowalla_rows),
        ("MovieLens-100k", _movielens_rows),
    ]
    for name, make in makers:
        try:
            yield name, make()
        except (MissingDataError, ModuleNotFoundError) as error:
            yield name, str(error).splitlines()[0]


def _gowalla_rows() -> sp.csr_matrix:
    data = gowalla()
    ones = np.ones(len(data.users), np.float32)
    return sp.csr_matrix((ones, (data.users, data.items)), (data.user_count, data.item_count))


def _movielens_rows() -> sp.csr_matrix:
    data = movielens_100k()
    return sp.csr_matrix((data.ratings.astype(np.float32), (data.users, data.items)))


# ---- right ---------------------------------------------------------------------------------------


def _right(options: BenchOptions) -> Iterator[Bar]:
    for dtype, target in ((np.float64, 1e-10), (np.float32, 1e-5)):
        bar = f"right: every metric against dense rows, {np.dtype(dtype).name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        worst = {metric: worst_error(metric, dtype, 3 if options.full else 1) for metric in METRICS}
        name = max(worst, key=lambda metric: worst[metric])
        unit = "absolute" if dtype == np.float64 else "of the largest"
        detail = f"{len(METRICS)} metrics, empty and equal rows, negative values; worst: {name}"
        yield at_most(bar, worst[name], target, unit, n=len(METRICS), detail=detail)


# ---- speed ---------------------------------------------------------------------------------------


def _against_sklearn(options: BenchOptions, name: str, rows: sp.csr_matrix) -> Iterator[Bar]:
    queries = sample(rows, _QUERIES_FULL if options.full else _QUERIES_QUICK)
    bar = f"L1 against scikit-learn: {name}"
    target = {"20 Newsgroups": 30.0, "Gowalla": 60.0}.get(name)
    if target is not None and options.wants(bar):
        options.progress(bar)
        theirs = importlib.import_module("sklearn.metrics.pairwise").manhattan_distances
        few = queries[: 100 if options.full else 20]
        for dtype in (np.float32, np.float64):
            left, right = few.astype(dtype), rows.astype(dtype)
            ours = block_of(prepared(left, right, "manhattan"))
            with one_thread():
                arms: dict[str, Callable[[], object]] = {
                    "ours": ours,
                    "theirs": functools.partial(theirs, left, right),
                }
                taken = paired(arms, blocks=_BLOCKS, budget_s=60.0)
            detail = f"{few.shape[0]} queries x all rows, one thread, both {dtype.__name__}; "
            detail += f"index built before; {taken}"
            ratio = taken.ratio("theirs", "ours")
            if dtype is np.float32:
                yield ratio.at_least(bar, target, detail=detail)
            else:
                yield ratio.reported(f"{bar}, float64", detail=detail)
    # Always the same number: with few queries, the overhead of the call dominates.
    queries = sample(rows, _QUERIES_FULL)
    yield from knn_bars(options, name, rows, queries, _BLOCKS)
    if name in _SEMIRING_SETS:
        yield from semiring_bars(options, name, rows, queries, _BLOCKS)


def _among_metrics(options: BenchOptions, name: str, rows: sp.csr_matrix) -> Iterator[Bar]:
    if name != "20 Newsgroups":
        return
    queries = sample(rows, _QUERIES_FULL if options.full else _QUERIES_QUICK)
    dot = block_of(prepared(queries, rows, "inner_product"))
    for metric in (*_CHEAP, *_DEAR):
        bar = f"time of {metric} over a dot product: {name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        with one_thread():
            others = {"dot product": dot, metric: block_of(prepared(queries, rows, metric))}
            taken = paired(others, blocks=_BLOCKS)
        detail = f"{queries.shape[0]} queries x all rows, float32, one thread; {taken}"
        target = 1.6 if metric in _CHEAP else 5.0
        yield taken.ratio(metric, "dot product").at_most(bar, target, detail=detail)


def _whole_graph(options: BenchOptions, rows: sp.csr_matrix | str | None) -> Iterator[Bar]:
    bar = "exact kNN graph over pynndescent's approximate one: 20 Newsgroups"
    if not options.wants(bar):
        return
    target = "<= 0.35"
    pynndescent = optional("pynndescent")
    if rows is None or isinstance(rows, str):
        yield not_judged(bar, "x", target, str(rows))
        return
    options.progress(bar)
    ours = _wall_s(lambda: knn_graph(rows, 15, "cosine"))
    if pynndescent is None:
        reason = f"pynndescent is not installed; ours took {ours:.1f} s, recall 1"
        yield not_judged(bar, "x", target, reason)
        return
    if not options.full:
        yield not_judged(bar, "x", target, f"needs --full; ours took {ours:.1f} s, recall 1")
        return

    def build() -> Any:
        made = pynndescent.NNDescent(rows, metric="cosine", n_neighbors=15, n_jobs=1)
        return made.neighbor_graph

    build()
    exact = knn_graph(rows, 15, "cosine")[0]
    theirs = _wall_s(build)
    ours = _wall_s(lambda: knn_graph(rows, 15, "cosine"))
    found = build()[0]
    recall = statistics.fmean(
        len(set(a) & set(b)) / 15 for a, b in zip(exact.tolist(), found.tolist(), strict=True)
    )
    detail = f"15 neighbours, one thread; ours {ours:.1f} s with recall 1, theirs {theirs:.1f} s "
    detail += f"with recall {recall:.3f} (compiled before)"
    yield at_most(bar, ours / theirs, 0.35, "x", detail=detail)


def _wall_s(function: Callable[[], object]) -> float:
    """Return seconds of one call that is long enough."""
    return float(times_s(function, clock="wall", settle=0)[0])
