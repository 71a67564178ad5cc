"""scikit-learn's neighbour estimators over exact sparse distances.

Arguments and results are those of `sklearn.neighbors`, so that DBSCAN, HDBSCAN, TSNE, Isomap and
the neighbour classifiers can use their graph.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from slipstream.errors import InvalidArgumentError, SlipstreamWarning
from slipstream.sparse.matrix import Int64s, as_rows, of_tensor
from slipstream.sparse.neighbours import check_distance, lists_within, nearest_of, run_of
from slipstream.sparse.search import Limits, Searcher

# scikit-learn's default.
_LEAF_SIZE = 30


class _Neighbours(BaseEstimator):
    """Base class: fitting, and the methods that all estimators share."""

    n_neighbors: int
    radius: float
    metric: Any
    metric_params: dict[str, Any] | None
    n_jobs: int | None
    block_bytes: int | None
    algorithm: str
    leaf_size: int
    p: float

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Any:
        """Store the rows to search.

        Args:
            X: [n, columns]; SciPy sparse (CSR is used without conversion), torch (sparse CSR, COO
                or dense) or dense, finite.
            y: not used.

        Raises:
            InvalidArgumentError: NaN or infinity, an unknown metric, an argument out of range.

        Warns:
            SlipstreamWarning: `algorithm` or `leaf_size` is set, which have no effect here.
        """
        self._warn_ignored()
        rows = as_rows(self._checked(X, reset=True), "X")
        check_distance(self.metric)
        limits = Limits.of(self.n_jobs, self.block_bytes)
        self._searcher = Searcher(rows, self.metric, self._params(), limits, "X")
        self.n_samples_fit_ = len(rows)
        self.effective_metric_ = self._searcher.metric
        return self

    def _params(self) -> dict[str, Any]:
        params = dict(self.metric_params or {})
        if self.metric == "minkowski":
            params.setdefault("p", self.p)
        return params

    def _warn_ignored(self) -> None:
        ignored = []
        if self.algorithm not in ("auto", "brute"):
            ignored.append(f"algorithm={self.algorithm!r}")
        if self.leaf_size != _LEAF_SIZE:
            ignored.append(f"leaf_size={self.leaf_size!r}")
        if ignored:
            warnings.warn(
                f"{' and '.join(ignored)} ignored: every search is exact and uses one index",
                SlipstreamWarning, stacklevel=3,
            )  # fmt: skip

    def kneighbors(
        self,
        X: Any = None,
        n_neighbors: int | None = None,
        return_distance: bool = True,
    ) -> Any:
        """Return the nearest fitted rows, exactly, by distance; equally near ones by row.

        Args:
            X: [m, columns] queries; None for the fitted rows, each excluding itself.
            n_neighbors: by default the estimator's.
            return_distance: whether to return distances too.

        Returns:
            distances and rows (int64), both [m, n_neighbors].

        Raises:
            InvalidArgumentError: more neighbours than rows, a different number of columns, NaN.
        """
        check_is_fitted(self)
        k = self.n_neighbors if n_neighbors is None else n_neighbors
        distance, row = nearest_of(self._searcher, self._queries(X), k)
        return (distance, row) if return_distance else row

    def kneighbors_graph(
        self,
        X: Any = None,
        n_neighbors: int | None = None,
        mode: str = "connectivity",
    ) -> sp.csr_matrix:
        """Return `kneighbors` as CSR [m, n]: ones, or with ``mode="distance"`` the distances.

        Raises:
            InvalidArgumentError: `kneighbors` raises it, or `mode` is another one.
        """
        _check_mode(mode)
        distance, row = self.kneighbors(X, n_neighbors)
        lengths = np.full(len(row), row.shape[1])
        return self._graph(lengths, row.ravel(), distance.ravel(), mode)

    def radius_neighbors(
        self,
        X: Any = None,
        radius: float | None = None,
        return_distance: bool = True,
        sort_results: bool = False,
    ) -> Any:
        """Return all fitted rows up to `radius` away, for each query an array, by row.

        Args:
            X, return_distance: as in `kneighbors`.
            radius: by default the estimator's.
            sort_results: order by distance instead of by row.

        Raises:
            InvalidArgumentError: `kneighbors` raises it, or `radius` is not a number.
        """
        check_is_fitted(self)
        radius = self.radius if radius is None else radius
        if not isinstance(radius, int | float | np.number) or np.isnan(radius):
            raise InvalidArgumentError("radius", f"{radius!r} is not a number")
        run, of_itself = run_of(self._searcher, self._queries(X))
        distances, rows = lists_within(run, float(radius), of_itself, sort_results)
        return (distances, rows) if return_distance else rows

    def radius_neighbors_graph(
        self,
        X: Any = None,
        radius: float | None = None,
        mode: str = "connectivity",
        sort_results: bool = False,
    ) -> sp.csr_matrix:
        """Return `radius_neighbors` as CSR [m, n]; see `kneighbors_graph`."""
        _check_mode(mode)
        distances, rows = self.radius_neighbors(X, radius, sort_results=sort_results)
        row: Int64s = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)
        lengths = np.array([len(near) for near in rows], np.int64)
        return self._graph(lengths, row, np.concatenate([*distances, np.empty(0)]), mode)

    def _graph(self, lengths: Int64s, row: Int64s, distance: Any, mode: str) -> sp.csr_matrix:
        starts = np.concatenate([[0], np.cumsum(lengths)])
        data = distance if mode == "distance" else np.ones(len(row))
        return sp.csr_matrix((data, row, starts), shape=(len(lengths), self.n_samples_fit_))

    def _queries(self, X: Any) -> Any:
        return None if X is None else self._checked(X, reset=False)

    def _checked(self, X: Any, reset: bool) -> Any:
        return validate_data(
            self, of_tensor(X, "X"), accept_sparse="csr", reset=reset,
            dtype=[np.float64, np.float32], accept_large_sparse=True,
        )  # fmt: skip


def _check_mode(mode: str) -> None:
    if mode not in ("connectivity", "distance"):
        raise InvalidArgumentError("mode", f"'{mode}' is not connectivity or distance")


class NearestNeighbors(_Neighbours):
    """Exact neighbours under any metric of `slipstream.sparse.METRICS`.

    Args:
        n_neighbors: default of `kneighbors`.
        radius: default of `radius_neighbors`.
        metric: a name or a `slipstream.sparse.Semiring`.
        metric_params: its keyword arguments: ``{"p": 3}`` for minkowski.
        n_jobs: threads; None is one, -1 all.
        block_bytes: working memory in addition to the rows and their index; 64 MiB by default.
        algorithm, leaf_size: for compatibility with scikit-learn; ignored, with a warning if they
            request a tree.
        p: exponent of minkowski, unless `metric_params` has it.
    """

    def __init__(
        self,
        *,
        n_neighbors: int = 5,
        radius: float = 1.0,
        metric: Any = "euclidean",
        metric_params: dict[str, Any] | None = None,
        n_jobs: int | None = None,
        block_bytes: int | None = None,
        algorithm: str = "auto",
        leaf_size: int = _LEAF_SIZE,
        p: float = 2.0,
    ) -> None:
        self.algorithm = algorithm
        self.leaf_size = leaf_size
        self.p = p
        self.n_neighbors = n_neighbors
        self.radius = radius
        self.metric = metric
        self.metric_params = metric_params
        self.n_jobs = n_jobs
        self.block_bytes = block_bytes


class KNeighborsTransformer(TransformerMixin, _Neighbours):
    """The graph of nearest rows, in the format of ``sklearn.neighbors.KNeighborsTransformer``.

    `transform` returns CSR [m, n]. With ``mode="distance"`` every row has one neighbour more than
    `n_neighbors`, because the fitted rows are their own nearest neighbours, as the estimators that
    take precomputed distances expect.

    Args:
        mode: ``"distance"`` or ``"connectivity"``.
        n_neighbors, metric, metric_params, n_jobs, block_bytes, algorithm, leaf_size, p: as in
            `NearestNeighbors`.
    """

    radius = 1.0

    def __init__(
        self,
        *,
        mode: str = "distance",
        n_neighbors: int = 5,
        metric: Any = "euclidean",
        metric_params: dict[str, Any] | None = None,
        n_jobs: int | None = None,
        block_bytes: int | None = None,
        algorithm: str = "auto",
        leaf_size: int = _LEAF_SIZE,
        p: float = 2.0,
    ) -> None:
        self.algorithm = algorithm
        self.leaf_size = leaf_size
        self.p = p
        self.mode = mode
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.metric_params = metric_params
        self.n_jobs = n_jobs
        self.block_bytes = block_bytes

    def fit(self, X: Any, y: Any = None) -> Any:
        """Store the rows to search, see `NearestNeighbors.fit`."""
        _check_mode(self.mode)
        return super().fit(X, y)

    def transform(self, X: Any) -> sp.csr_matrix:
        """Return the graph from the rows of `X` to the fitted ones."""
        check_is_fitted(self)
        k = self.n_neighbors + (self.mode == "distance")
        return self.kneighbors_graph(X, k, self.mode)

    def fit_transform(self, X: Any, y: Any = None, **_: Any) -> sp.csr_matrix:
        """Fit to `X` and return its graph."""
        return self.fit(X, y).transform(X)
