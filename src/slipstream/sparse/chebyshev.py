"""The largest difference over all columns, which needs its own search.

The contribution of the columns of only one row can be subtracted from a sum, but not from a
maximum. So entries are tried from the largest magnitude, until no other can differ more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.sparse import kernels
from slipstream.sparse.matrix import Floats, Int32s, Int64s, Rows
from slipstream.sparse.reference import ByRow


class ChebyshevSearch(ByRow):
    """Queries against rows; exact to the last digit, in float64 whatever the result's dtype."""

    def __init__(self, left: Rows, right: Rows, dtype: np.dtype[Any]) -> None:
        self.rows, self.dtype = len(right), dtype
        self.left, self.right = left.as_type(np.float64), right.as_type(np.float64)
        loaded = kernels.native()
        self._native = None
        if loaded is not None:
            orders = (_largest_first(self.left), _largest_first(self.right))
            self._native = kernels.NativeChebyshev(loaded, self.left, self.right, orders)

    def scratch_bytes(self, queries: int) -> int:
        return 8 * (queries * self.rows + self.right.width)

    def distances(self, ranges: Int64s, threads: int, out: Floats) -> None:
        if self._native is None:
            super().distances(ranges, threads, out)
            return
        exact = np.empty((int(ranges.max() - ranges.min()), self.rows))
        self._native.distances(ranges, threads, exact)
        out[:] = exact

    def nearest(self, ranges: Int64s, threads: int, k: int) -> tuple[Floats, Int64s]:
        # One range at a time, for whose distances `scratch_bytes` provides.
        base, end = int(ranges.min()), int(ranges.max())
        distance, row = np.empty((end - base, k), self.dtype), np.empty((end - base, k), np.int64)
        for first, last in ranges.tolist():
            block = np.empty((last - first, self.rows), self.dtype)
            self.distances(np.array([[first, last]]), 1, block)
            for i, distances in enumerate(block, start=first - base):
                order = np.argsort(distances, kind="stable")[:k]
                distance[i], row[i] = distances[order], order
        return distance, row

    def row(self, i: int) -> Floats:
        begin, end = (int(edge) for edge in self.left.indptr[i : i + 2])
        dense = np.zeros(self.right.width)
        dense[self.left.indices[begin:end]] = self.left.data[begin:end]
        rows = self.right.repeat(np.arange(self.rows))
        most = np.zeros(self.rows)
        np.maximum.at(most, rows, np.abs(self.right.data - dense[self.right.indices]))
        # Columns that the other row lacks: all of the query's entries but the shared ones.
        shared = np.isin(self.right.indices, self.left.indices[begin:end])
        alone = np.ones((self.rows, end - begin), bool)
        at = np.searchsorted(self.left.indices[begin:end], self.right.indices[shared])
        alone[rows[shared], at] = False
        sizes = np.where(alone, np.abs(self.left.data[begin:end]), 0.0)
        largest: Floats = np.maximum(most, sizes.max(axis=1, initial=0.0))
        return largest


def _largest_first(rows: Rows) -> Int32s:
    """Return the entries of each row, numbered from its start, by descending magnitude."""
    row: Int64s = rows.repeat(np.arange(len(rows)))
    order = np.lexsort((-np.abs(rows.data), row))
    within: Int32s = (order - rows.repeat(rows.indptr[:-1])).astype(np.int32)
    return within
