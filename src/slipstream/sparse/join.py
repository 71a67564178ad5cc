"""All pairs of near rows, as a stream; near sets are found by their prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from slipstream.errors import InvalidArgumentError
from slipstream.sparse.matrix import Floats, Int64s, Rows, as_rows, same_columns
from slipstream.sparse.metrics import metric_name
from slipstream.sparse.neighbours import check_distance, pairs_within
from slipstream.sparse.search import Limits, Searcher, cut, running
from slipstream.sparse.semiring import Semiring

# Approximate bytes per candidate pair.
_CANDIDATE_BYTES = 64


@dataclass(frozen=True, eq=False)
class Pairs:
    """A block of pairs, by their left row, then by their right row.

    Attributes:
        left, right: int64 [pairs]; rows of X and of Y.
        distance: [pairs].
    """

    left: Int64s
    right: Int64s
    distance: Floats

    def __len__(self) -> int:
        return len(self.left)


def radius_join(
    X: Any,
    Y: Any = None,
    metric: str | Semiring = "jaccard",
    radius: float = 0.2,
    *,
    n_jobs: int | None = None,
    block_bytes: int | None = None,
    **options: Any,
) -> Iterator[Pairs]:
    """Yield every pair of rows up to `radius` apart, exactly, in blocks.

    Jaccard distances below 1 are found by prefixes (Chaudhuri et al., A Primitive Operator for
    Similarity Joins, ICDE 2006): sets of this similarity share one of their rarest columns, so that
    only rows which do are compared. Other metrics compare all pairs of rows.

    Args:
        X: [m, columns]; see `slipstream.sparse.pairwise_distances`.
        Y: [n, columns]; None for pairs within X, each once and with the lower row on the left.
        metric, n_jobs, block_bytes, options: as in `pairwise_distances`.
        radius: not negative.

    Yields:
        non-empty blocks of `Pairs`, in ascending order.

    Raises:
        InvalidArgumentError: `pairwise_distances` raises it, `radius` is negative, or the metric is
            a similarity.
    """
    if not isinstance(radius, int | float | np.number) or not radius >= 0:
        raise InvalidArgumentError("radius", f"{radius!r} is not zero or a positive number")
    check_distance(metric)
    limits = Limits.of(n_jobs, block_bytes)
    left = as_rows(X, "X")
    right = left if Y is None else as_rows(Y, "Y")
    within = Y is None
    if isinstance(metric, str) and metric_name(metric) == "jaccard" and radius < 1 and not options:
        return _jaccard_pairs(left, right, float(radius), within, limits)
    run = Searcher(right, metric, options, limits, "X" if within else "Y").against(left, "X")
    return (Pairs(*pairs) for pairs in pairs_within(run, float(radius), within))


def _jaccard_pairs(
    left: Rows, right: Rows, radius: float, within: bool, limits: Limits
) -> Iterator[Pairs]:
    for i, j, shared, either in overlaps(left, right, 1.0 - radius, within, limits.block_bytes):
        distance = np.divide(
            either - shared, either, out=np.zeros(len(i)), where=either > 0, dtype=np.float64
        )
        near = distance <= radius
        if near.any():
            yield Pairs(i[near], j[near], distance[near])


def overlaps(
    left: Rows, right: Rows, similarity: float, within: bool, block_bytes: int
) -> Iterator[tuple[Int64s, Int64s, Int64s, Int64s]]:
    """Yield pairs of sets whose Jaccard similarity may reach `similarity` > 0, with their counts.

    Args:
        within: whether left and right are the same rows; only pairs with the lower row first.

    Yields:
        left row, right row, columns in both, columns in either; int64, ascending. They include
            every pair that reaches `similarity`, and some that do not.
    """
    left, right = same_columns(left, right, ("X", "Y"))
    # Rare columns first: few rows share them.
    rank = np.empty(left.width, np.int64)
    frequency = left.frequency if within else left.frequency + right.frequency
    rank[np.argsort(frequency, kind="stable")] = np.arange(left.width)
    prefixes = _prefixes(right, rank, similarity)
    queries = prefixes if within else _prefixes(left, rank, similarity)
    transposed = prefixes.T.tocsr()
    left_sets, right_sets = _sets(left), _sets(right)
    lengths_a, lengths_b = left.lengths, right.lengths
    empty = np.flatnonzero(lengths_b == 0)
    work = np.asarray(
        queries @ np.diff(transposed.indptr).astype(np.float64), np.float64
    ).ravel() + np.where(lengths_a == 0, len(empty), 1)
    for first, last in cut(running(work), block_bytes / _CANDIDATE_BYTES):
        candidates = (queries[first:last] @ transposed).tocoo()
        i, j = candidates.row.astype(np.int64) + first, candidates.col.astype(np.int64)
        both_empty = np.flatnonzero(lengths_a[first:last] == 0) + first
        i = np.concatenate([i, np.repeat(both_empty, len(empty))])
        j = np.concatenate([j, np.tile(empty, len(both_empty))])
        short, long = (f(lengths_a[i], lengths_b[j]) for f in (np.minimum, np.maximum))
        # The length of the shorter set bounds the similarity.
        keep = short >= similarity * long * (1 - 1e-12)
        if within:
            keep &= j > i
        i, j = i[keep], j[keep]
        order = np.lexsort((j, i))
        i, j = i[order], j[order]
        if len(i):
            shared = _shared(left_sets, right_sets, i, j, block_bytes)
            yield i, j, shared, lengths_a[i] + lengths_b[j] - shared


def _prefixes(rows: Rows, rank: Int64s, similarity: float) -> sp.csr_matrix:
    """Return the rarest columns of each row that similar rows must share one of.

    Sets of similarity ``t`` share at least ``t n`` of the ``n`` columns of either, so the
    ``n - ceil(t n) + 1`` rarest of both have a column in common.
    """
    lengths = rows.lengths
    # Slightly less than t n, since rounding must not shorten a prefix.
    needed = np.ceil(similarity * lengths * (1 - 1e-12) - 1e-9).astype(np.int64)
    counts = np.clip(lengths - needed + 1, 0, lengths)
    row = rows.repeat(np.arange(len(rows)))
    order = np.lexsort((rank[rows.indices], row))
    place = np.arange(rows.nnz) - rows.repeat(rows.indptr[:-1])
    chosen = order[place < rows.repeat(counts)]
    starts = np.concatenate([[0], np.cumsum(counts)])
    ones = np.ones(len(chosen), np.int32)
    return sp.csr_matrix((ones, rows.indices[chosen], starts), shape=(len(rows), rows.width))


def _sets(rows: Rows) -> sp.csr_matrix:
    return rows.with_data(np.ones(rows.nnz, np.float32)).to_scipy()


def _shared(
    left: sp.csr_matrix, right: sp.csr_matrix, i: Int64s, j: Int64s, block_bytes: int
) -> Int64s:
    """Return the number of columns that rows ``i[n]`` and ``j[n]`` share."""
    shared = np.empty(len(i), np.int64)
    cost = (np.diff(left.indptr)[i] + np.diff(right.indptr)[j]).astype(np.float64)
    for first, last in cut(running(cost), block_bytes / _CANDIDATE_BYTES):
        both = left[i[first:last]].multiply(right[j[first:last]])
        shared[first:last] = np.asarray(both.sum(axis=1)).ravel()
    return shared
