"""The entries two matrices share, gathered with NumPy: for reference and for functions of users."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from slipstream.sparse.matrix import Float64s, Floats, Int64s, Rows

# Entries of a part, about: four arrays of so many float64 stay in a second-level cache.
_PART = 2**14


@dataclass(frozen=True, eq=False)
class Part:
    """Some columns of one row, with what all other rows have in them.

    Attributes:
        row: int64 [shared]; row of the searched matrix, in order of columns, then of rows.
        entries: of the query's matrix: those in these columns.
        counts: int64 [entries]; how many rows have each of the columns.
        places: entries of these columns, in order of columns.
    """

    row: Int64s
    entries: slice
    counts: Int64s
    places: list[slice]

    def of_query(self, values: Float64s) -> Float64s:
        """The query's value for everything shared, [shared].

        Args:
            values: of all entries of the query's matrix.
        """
        return np.repeat(values[self.entries], self.counts)

    def of_rows(self, values: Float64s) -> Float64s:
        """The other row's value for everything shared, [shared].

        Args:
            values: of all entries of the searched matrix, in order of columns.
        """
        return np.concatenate([values[place] for place in self.places])


class ByColumn:
    """The searched matrix by columns, with the place of every entry.

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
        """`values` of all entries in order of columns, float64 [nnz]."""
        return values[self._entry].astype(np.float64, copy=False)

    def parts(self, left: Rows, i: int) -> Iterator[Part]:
        """What row `i` of `left` shares with each row, few columns at a time; columns ascend."""
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
