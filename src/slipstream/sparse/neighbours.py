"""The nearest rows, exactly, without the matrix of all distances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidArgumentError
from slipstream.sparse.device import as_tensor, device_of
from slipstream.sparse.matrix import Floats, Int64s, as_rows
from slipstream.sparse.metrics import metric_name
from slipstream.sparse.search import Limits, Searcher, SearchRun
from slipstream.sparse.semiring import Semiring


def knn_graph(
    X: Any,
    n_neighbors: int = 15,
    metric: str | Semiring = "euclidean",
    *,
    include_self: bool = True,
    n_jobs: int | None = None,
    block_bytes: int | None = None,
    **options: Any,
) -> tuple[Int64s, Floats]:
    """Return the nearest rows of `X` for each of its rows, exactly.

    Args:
        X: [n, columns]; see `slipstream.sparse.pairwise_distances`.
        n_neighbors: neighbours per row, including the row itself if `include_self`.
        include_self: whether the row itself comes first, as in UMAP's ``precomputed_knn`` and
            pynndescent's ``neighbor_graph``.
        metric, n_jobs, block_bytes, options: as in `slipstream.sparse.pairwise_distances`.

    Returns:
        indices int64 and distances, both [n, n_neighbors], by distance, equal ones by row; tensors
        on the CUDA device of `X` if it is on one, otherwise NumPy arrays.

    Raises:
        InvalidArgumentError: `pairwise_distances` raises it, or there are too few rows.
    """
    check_distance(metric)
    device = device_of(X=X)
    rows = as_rows(X, "X")
    searcher = Searcher(rows, metric, options, Limits.of(n_jobs, block_bytes), "X", device)
    check_count(n_neighbors, len(rows), own=not include_self)
    distance, index = without_self(searcher.against(rows, "X"), n_neighbors - bool(include_self))
    if include_self:
        itself = np.arange(len(rows))[:, None]
        index = np.hstack([itself, index])
        distance = np.hstack([np.zeros((len(rows), 1), distance.dtype), distance])
    return as_tensor(index, device), as_tensor(distance, device)


def check_distance(metric: object) -> None:
    """Raise InvalidArgumentError for a similarity, whose smallest values are the farthest."""
    if isinstance(metric, str) and metric_name(metric) == "inner_product":
        raise InvalidArgumentError(
            "metric",
            "inner_product is a similarity, not a distance",
            remedy="use cosine, or Semiring(lambda a, b: -a * b) for the largest products first",
        )


def check_count(n_neighbors: Any, rows: int, own: bool) -> None:
    """Check the number of neighbours.

    Args:
        rows: number of rows to search.
        own: whether the queries are those rows, each excluding itself.

    Raises:
        InvalidArgumentError: it is not an integer from 1 to the number of neighbours.
    """
    if not isinstance(n_neighbors, int | np.integer) or isinstance(n_neighbors, bool):
        raise InvalidArgumentError("n_neighbors", f"{n_neighbors!r} is not an integer")
    # The wording is scikit-learn's, which its estimator tests require.
    if n_neighbors <= 0:
        raise InvalidArgumentError("n_neighbors", f"Expected n_neighbors > 0. Got {n_neighbors}")
    if n_neighbors > rows - own:
        raise InvalidArgumentError(
            "n_neighbors",
            f"Expected n_neighbors {'<' if own else '<='} n_samples_fit, but n_neighbors = "
            f"{n_neighbors}, n_samples_fit = {rows}",
            remedy="request fewer neighbours, or pass more rows",
        )


def run_of(searcher: Searcher, queries: Any) -> tuple[SearchRun, bool]:
    """Return the search of `queries`, and whether they are the searched rows (None)."""
    if queries is None:
        return searcher.against(searcher.right, "X"), True
    return searcher.against(as_rows(queries, "X"), "X"), False


def nearest_of(searcher: Searcher, queries: Any, n_neighbors: Any) -> tuple[Floats, Int64s]:
    """Return distances and rows of the nearest, [queries, n_neighbors]; None: of its own rows.

    Raises:
        InvalidArgumentError: the number of neighbours is out of range.
    """
    run, of_itself = run_of(searcher, queries)
    check_count(n_neighbors, len(searcher.right), of_itself)
    return without_self(run, n_neighbors) if of_itself else run.nearest(n_neighbors)


def without_self(run: SearchRun, k: int) -> tuple[Floats, Int64s]:
    """Return `SearchRun.nearest` of rows that are their own queries, each excluding itself."""
    if k == 0:
        empty = np.empty((len(run.left), 0))
        return empty.astype(run.dtype), empty.astype(np.int64)
    distance, row = run.nearest(min(k + 1, len(run.right)))
    itself = row == np.arange(len(row))[:, None]
    # If duplicates with lower numbers displace the row itself, the last one is dropped.
    itself[~itself.any(axis=1), -1] = True
    keep = ~itself
    return distance[keep].reshape(len(row), k), row[keep].reshape(len(row), k)


def lists_within(
    run: SearchRun, radius: float, own: bool, by_distance: bool, dtype: npt.DTypeLike | None = None
) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.object_]]:
    """Return distances up to `radius` and their rows: for each query an array of each.

    Args:
        own: whether the queries are the rows themselves, each excluding itself.
        by_distance: whether to order by distance, equal ones by row, instead of by row.
        dtype: dtype of the distances; by default that of `run`.
    """
    all_distances, all_rows = (np.empty(len(run.left), object) for _ in range(2))
    for first, block in run.blocks():
        for query, distances in enumerate(block, start=first):
            rows = np.flatnonzero(distances <= radius)
            if own:
                rows = rows[rows != query]
            if by_distance:
                rows = rows[np.argsort(distances[rows], kind="stable")]
            all_distances[query] = distances[rows].astype(dtype or block.dtype)
            all_rows[query] = rows
    return all_distances, all_rows


def pairs_within(
    run: SearchRun, radius: float, above_diagonal: bool
) -> Iterator[tuple[Int64s, Int64s, Floats]]:
    """Yield pairs up to `radius` apart, in blocks, by query, then by row.

    Args:
        above_diagonal: whether to yield only rows with a higher number than the query.
    """
    for first, block in run.blocks():
        near = block <= radius
        if above_diagonal:
            columns = np.arange(block.shape[1])
            near &= columns > (np.arange(len(block)) + first)[:, None]
        query, row = np.nonzero(near)
        if len(query):
            yield query + first, row, block[query, row]
