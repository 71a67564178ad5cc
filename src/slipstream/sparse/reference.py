"""The kernels in NumPy: a readable reference, a check of the native ones, and the fallback.

Users' distance functions also get the shared entries of two matrices from here.

Sums are float64 for every working type, so that float32 results agree with the native ones up to
rounding and float64 results up to the last digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from slipstream.sparse.matrix import Float64s, Floats, Int64s, Rows
from slipstream.sparse.metrics import Exact, Finish, MetricPlan, Op, Root, Side

Bools = npt.NDArray[np.bool_]
# Approximate entries per part: four arrays of this many float64 fit into a second-level cache.
_PART = 2**14


@dataclass(frozen=True, eq=False)
class Part:
    """Some columns of one query, with the entries of all other rows in them.

    Attributes:
        row: int64 [shared]; row of the searched matrix, in order of columns, then of rows.
        entries: entries of the query's matrix in these columns.
        counts: int64 [entries]; number of rows with each of the columns.
        places: entries of these columns, in order of columns.
    """

    row: Int64s
    entries: slice
    counts: Int64s
    places: list[slice]

    def of_query(self, values: Float64s) -> Float64s:
        """Return the query's value for each shared entry, [shared].

        Args:
            values: values of all entries of the query's matrix.
        """
        return np.repeat(values[self.entries], self.counts)

    def of_rows(self, values: Float64s) -> Float64s:
        """Return the other row's value for each shared entry, [shared].

        Args:
            values: values of all entries of the searched matrix, in order of columns.
        """
        return np.concatenate([values[place] for place in self.places])


class ByColumn:
    """The searched matrix by columns, with the position of every entry.

    Attributes:
        rows: the matrix.
        row: int32 or int64 [nnz]; the row of each entry, in order of columns, then of rows.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        places = sp.csr_matrix(
            (np.arange(rows.nnz, dtype=np.int64), rows.indices, rows.indptr),
            shape=(len(rows), rows.width),
        ).tocsc()
        self._starts: Int64s = places.indptr.astype(np.int64)
        self.row: npt.NDArray[np.integer[Any]] = places.indices
        self._entry: Int64s = places.data

    def in_order(self, values: Floats) -> Float64s:
        """Return `values` of all entries in order of columns, float64 [nnz]."""
        return values[self._entry].astype(np.float64, copy=False)

    def parts(self, left: Rows, i: int) -> Iterator[Part]:
        """Yield what row `i` of `left` shares with all rows, some columns at a time, ascending."""
        begin, end = int(left.indptr[i]), int(left.indptr[i + 1])
        columns = left.indices[begin:end]
        starts, ends = self._starts[columns], self._starts[columns + 1]
        counts = ends - starts
        number = np.cumsum(counts) // _PART
        edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), end - begin]
        for first, last in itertools.pairwise(edges):
            places = [
                slice(*edge)
                for edge in zip(starts[first:last].tolist(), ends[first:last].tolist(), strict=True)
            ]
            if places:
                row = np.concatenate([self.row[place] for place in places], dtype=np.int64)
                yield Part(row, slice(begin + first, begin + last), counts[first:last], places)


class ByRow:
    """Base class of searches row by row: blocks of distances, and the nearest rows."""

    rows: int
    dtype: np.dtype[Any]
    at_once = 64

    def row(self, i: int) -> Floats:
        """Return the distances of query `i` to all rows, [rows]."""
        raise NotImplementedError

    def scratch_bytes(self, queries: int) -> int:
        """Return the approximate working memory of a call with this many queries."""
        return self.rows * 64

    def distances(self, ranges: Int64s, threads: int, out: Floats) -> None:
        """Write ``out[i - base, j]`` for the queries of `ranges`, [calls, 2]."""
        base = int(ranges.min())
        for i in range(base, int(ranges.max())):
            out[i - base] = self.row(i)

    def nearest(self, ranges: Int64s, threads: int, k: int) -> tuple[Floats, Int64s]:
        """Return distances and rows of the `k` nearest, [queries, k]; ties by the lower row."""
        base, end = int(ranges.min()), int(ranges.max())
        distance, row = np.empty((end - base, k), self.dtype), np.empty((end - base, k), np.int64)
        for i in range(base, end):
            distances = self.row(i).astype(self.dtype)
            distances[np.isnan(distances)] = np.inf
            # Stable: among equals the lower row comes first.
            order = np.argsort(distances, kind="stable")[:k]
            distance[i - base], row[i - base] = distances[order], order
        return distance, row


class ReferenceSearch(ByRow):
    """Queries against rows under a plan, one row at a time."""

    def __init__(
        self,
        plan: MetricPlan,
        left: tuple[Rows, Side],
        right: tuple[ByColumn, Side],
        near_zero: float,
    ) -> None:
        self.plan, self.near_zero = plan, near_zero
        self.left, self.left_side = left
        self.columns, self.right_side = right
        self.rows, self.dtype = len(self.columns.rows), self.left_side.exact.dtype
        self._left = [values.astype(np.float64, copy=False) for values in self.left_side.channels]
        self._right = [self.columns.in_order(values) for values in self.right_side.channels]

    def row(self, i: int) -> Floats:
        sums = np.zeros((len(self.plan.ops), self.rows))
        for part in self.columns.parts(self.left, i):
            for c, op in enumerate(self.plan.ops):
                x, b = part.of_query(self._left[c]), part.of_rows(self._right[c])
                np.add.at(sums[c], part.row, _terms(self.plan, op, x, b))
        distance, cancelled = self._finish(i, sums[0], sums[-1])
        for j in np.flatnonzero(cancelled):
            distance[j] = self._exactly(i, int(j))
        return self._root(distance).astype(self.dtype)

    def _finish(self, i: int, s: Float64s, t: Float64s) -> tuple[Float64s, Bools]:
        plan, near = self.plan, self.near_zero
        u, v = float(self.left_side.term[i]), self.right_side.term
        never = np.zeros(self.rows, bool)
        if plan.finish is Finish.AFFINE:
            return plan.c0 + plan.c1 * s + plan.c2 * t, never
        if plan.finish is Finish.SUM:
            x = (u + v) + plan.c1 * s
            return np.maximum(x, 0.0), self._again(x < near * (u + v))
        if plan.finish is Finish.COSINE:
            larger = np.maximum(u, v)
            return np.maximum(larger - s, 0.0), self._again(larger - s < near * larger)
        if plan.finish is Finish.RATIO:
            x, below = (u + v) + plan.c1 * s, (u + v) + plan.c2 * t
            ratio = np.divide(np.maximum(x, 0.0), below, out=np.zeros_like(x), where=below != 0)
            return ratio, self._again((x < near * (u + v)) | (below < near * (u + v)))
        if plan.finish is Finish.CORRELATION:
            x = 1.0 + u * v - s
            undefined = np.isnan(x)
            return (
                np.where(x < 0.0, 0.0, x),
                self._again(~undefined & (x < near * (1.0 + np.abs(u * v)))),
            )
        assert self.left_side.term1 is not None
        assert self.left_side.term2 is not None
        x = u + v - s
        outside = t < self.left_side.term2[i]
        again = ~outside & (np.abs(x) < near * self.left_side.term1[i])
        return np.where(outside, np.inf, x), self._again(again)

    def _again(self, cancelled: Bools) -> Bools:
        return cancelled & (self.plan.exact is not Exact.NEVER)

    def _root(self, x: Float64s) -> Float64s:
        if self.plan.finish is Finish.SUM:
            x = x * self.plan.c0
        if self.plan.root is Root.SQRT:
            return np.sqrt(x)
        if self.plan.root is Root.POWER_ROOT:
            return np.power(x, 1.0 / self.plan.power)
        return x

    def _exactly(self, i: int, j: int) -> float:
        """Return the replacement of a cancelled sum, from both rows column by column."""
        plan, (a, b) = self.plan, self._union(i, j)
        match plan.exact:
            case Exact.ABSOLUTE:
                return float(np.abs(a - b).sum())
            case Exact.SQUARED:
                return plan.c3 * float(np.square(a - b).sum())
            case Exact.POWERS:
                return float(np.power(np.abs(a - b), plan.power).sum())
            case Exact.SHARES:
                return float((np.abs(a - b) / (np.abs(a) + np.abs(b))).sum())
            case Exact.ENTROPIES:
                return float((_relative(a, (a + b) / 2) + _relative(b, (a + b) / 2)).sum())
            case Exact.RELATIVE:
                return float(_relative(a + plan.c3, b + plan.c3).sum())
            case Exact.CENTRED:
                assert self.left_side.term1 is not None
                shift = float(self.left_side.term1[i] - self.right_side.term[j])
                absent = (plan.columns - len(a)) * shift**2
                return 0.5 * float(np.square(a - b - shift).sum() + absent)
            case Exact.OVER_MAXIMA:
                return _over(float(np.abs(a - b).sum()), float(np.maximum(a, b).sum()))
            case _:
                return _over(float(np.abs(a - b).sum()), float(np.abs(a + b).sum()))

    def _union(self, i: int, j: int) -> tuple[Float64s, Float64s]:
        right = self.columns.rows
        query, found = (
            slice(int(rows.indptr[n]), int(rows.indptr[n + 1]))
            for rows, n in ((self.left, i), (right, j))
        )
        columns = np.union1d(self.left.indices[query], right.indices[found])
        a, b = np.zeros(len(columns)), np.zeros(len(columns))
        a[np.searchsorted(columns, self.left.indices[query])] = self.left_side.exact[query]
        b[np.searchsorted(columns, right.indices[found])] = self.right_side.exact[found]
        return a, b


def _relative(a: Float64s, b: Float64s) -> Float64s:
    with np.errstate(divide="ignore", invalid="ignore"):
        terms: Float64s = np.where(a > 0, a * np.log(a / b), 0.0)
    return terms


def _over(above: float, below: float) -> float:
    if below > 0:
        return above / below
    return np.inf if above > 0 else 0.0


def _terms(plan: MetricPlan, op: Op, x: Float64s, b: Float64s) -> Float64s:
    """Return the contribution of each shared column; see ``slipstream_sparse_op``."""
    match op:
        case Op.DOT:
            return x * b
        case Op.MIN:
            return np.minimum(x, b)
        case Op.COMMON:
            return _common(x, b)
        case Op.SHARE | Op.SHARE_MIN:
            share: Float64s = -1.0 - 2.0 * _common(x, b) / (np.abs(x) + np.abs(b))
            return share
        case Op.EQUAL:
            same: Float64s = -1.0 - (x == b).astype(np.float64)
            return same
        case Op.POWER:
            alone = np.abs(x) ** plan.power + np.abs(b) ** plan.power
            apart: Float64s = np.abs(x - b) ** plan.power - alone
            return apart
        case Op.ENTROPY:
            both = x + b
            less: Float64s = x * np.log(x) + b * np.log(b) - both * np.log(both)
            return less


def _common(x: Float64s, b: Float64s) -> Float64s:
    return np.where(np.sign(x) == np.sign(b), np.minimum(np.abs(x), np.abs(b)), 0.0)
