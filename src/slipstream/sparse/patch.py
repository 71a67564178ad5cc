"""Context in which scikit-learn's neighbour searches over sparse rows use the kernels here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.sparse as sp
import sklearn.metrics.pairwise as sklearn_pairwise
import sklearn.neighbors._base as sklearn_neighbours
from scipy.spatial.distance import cdist

from slipstream.sparse.matrix import as_rows
from slipstream.sparse.neighbours import lists_within, nearest_of, run_of
from slipstream.sparse.pairwise import pairwise_distances
from slipstream.sparse.search import Limits, Searcher

# scikit-learn's names of metrics; it refuses unknown names before any function here is called.
_NAMES = {
    name: name
    for name in (
        "braycurtis", "canberra", "chebyshev", "correlation", "cosine", "dice", "euclidean",
        "hamming", "jaccard", "manhattan", "minkowski", "russellrao", "sqeuclidean",
    )
} | {"cityblock": "manhattan", "l1": "manhattan", "l2": "euclidean"}  # fmt: skip
# scikit-learn treats rows as sets under these metrics, whatever the values.
_OF_SETS = frozenset({"dice", "jaccard", "russellrao"})
# Reentrant for the same thread; another thread waits.
_entered = threading.RLock()


@contextmanager
def patch_sklearn() -> Iterator[None]:
    """Run scikit-learn's searches over sparse rows with these kernels, within a context.

    ``kneighbors`` and ``radius_neighbors`` of all its neighbour estimators (and their users:
    DBSCAN, OPTICS, the graphs) and ``sklearn.metrics.pairwise_distances``, also if already
    imported, use the exact sparse kernels for sparse rows; dense input and other metrics use
    scikit-learn. Metrics that scikit-learn has but refuses for sparse rows (canberra, braycurtis,
    jaccard, ...) are accepted.

    Not for simultaneous use from several threads: it changes scikit-learn for the whole process.
    """
    mixins = (sklearn_neighbours.KNeighborsMixin, sklearn_neighbours.RadiusNeighborsMixin)
    brute = sorted({*sklearn_neighbours.VALID_METRICS_SPARSE["brute"], *_NAMES})
    functions = sklearn_pairwise.PAIRWISE_DISTANCE_FUNCTIONS
    ours = {name: _distances(name, functions.get(name)) for name in _NAMES}
    with (
        _entered,
        patch.object(mixins[0], "kneighbors", _kneighbors(mixins[0].kneighbors)),
        patch.object(mixins[1], "radius_neighbors", _within(mixins[1].radius_neighbors)),
        patch.dict(sklearn_neighbours.VALID_METRICS_SPARSE, {"brute": brute}),
        patch.dict(functions, ours),
    ):
        yield


def _distances(name: str, usual: Callable[..., Any] | None) -> Callable[..., Any]:
    def distances(X: Any, Y: Any = None, **options: Any) -> Any:
        if sp.issparse(X) and (Y is None or sp.issparse(Y)):
            matrix = pairwise_distances(X, Y, _NAMES[name], **options)
            return matrix.astype(np.float64, copy=False)
        if usual is not None:
            return usual(X, Y, **options)
        left, right = (
            np.asarray(side.todense() if sp.issparse(side) else side)
            for side in (X, X if Y is None else Y)
        )
        if name in _OF_SETS:
            left, right = left.astype(bool), right.astype(bool)
        return cdist(left, right, name, **options)

    return distances


def _searcher(estimator: Any) -> Searcher | None:
    """Return a searcher of the rows an estimator was fitted to; None for one without support."""
    fitted = getattr(estimator, "_fit_X", None)
    name = getattr(estimator, "effective_metric_", None)
    if not sp.issparse(fitted) or not isinstance(name, str) or name not in _NAMES:
        return None
    options = dict(estimator.effective_metric_params_ or {})
    # scikit-learn passes p even to metrics without it, and weights that are None.
    if _NAMES[name] != "minkowski":
        options.pop("p", None)
    options = {key: value for key, value in options.items() if value is not None}
    if options.keys() - {"p"}:
        return None
    limits = Limits.of(estimator.n_jobs, None)
    return Searcher(as_rows(fitted, "X"), _NAMES[name], options, limits, "X")


def _kneighbors(usual: Callable[..., Any]) -> Callable[..., Any]:
    def kneighbors(
        self: Any,
        X: Any = None,
        n_neighbors: int | None = None,
        return_distance: bool = True,
    ) -> Any:
        searcher = _searcher(self)
        if searcher is None:
            return usual(self, X, n_neighbors, return_distance)
        k = self.n_neighbors if n_neighbors is None else n_neighbors
        distance, row = nearest_of(searcher, X, k)
        return (distance.astype(np.float64), row) if return_distance else row

    return kneighbors


def _within(usual: Callable[..., Any]) -> Callable[..., Any]:
    def radius_neighbors(
        self: Any,
        X: Any = None,
        radius: float | None = None,
        return_distance: bool = True,
        sort_results: bool = False,
    ) -> Any:
        searcher = _searcher(self)
        if searcher is None:
            return usual(self, X, radius, return_distance, sort_results)
        run, of_itself = run_of(searcher, X)
        far = float(self.radius if radius is None else radius)
        distances, rows = lists_within(run, far, of_itself, sort_results, np.float64)
        return (distances, rows) if return_distance else rows

    return radius_neighbors
