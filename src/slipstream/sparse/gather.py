"""The entries two matrices share, gathered with NumPy: for reference and for functions of users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from slipstream.sparse.matrix import Int64s, Rows


@dataclass(frozen=True, eq=False)
class Shared:
    """Where a row and all others have values in the same column.

    Attributes:
        row: int64 [shared]; row of the searched matrix, in order of columns, then of rows.
        left: int64 [shared]; which entry of the query's matrix.
        right: int64 [shared]; which entry of the searched matrix.
    """

    row: Int64s
    left: Int64s
    right: Int64s


class ByColumn:
    """The searched matrix by columns, with the place of every entry."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        places = sp.csr_matrix(
            (np.arange(rows.nnz, dtype=np.int64), rows.indices, rows.indptr),
            shape=(len(rows), rows.width),
        ).tocsc()
        self._starts: Int64s = places.indptr.astype(np.int64)
        self._row: npt.NDArray[Any] = places.indices
        self._entry: Int64s = places.data

    def shared_with(self, left: Rows, i: int) -> Shared:
        """What row `i` of `left` shares with each row; columns ascend."""
        begin, end = int(left.indptr[i]), int(left.indptr[i + 1])
        columns = left.indices[begin:end]
        starts = self._starts[columns]
        counts = self._starts[columns + 1] - starts
        offsets = np.cumsum(counts) - counts
        at = np.arange(int(counts.sum())) + np.repeat(starts - offsets, counts)
        which = np.repeat(np.arange(begin, end), counts)
        return Shared(self._row[at].astype(np.int64), which, self._entry[at])
