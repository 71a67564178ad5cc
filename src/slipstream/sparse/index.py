"""The searched rows by columns: dense if a column is in many rows, lists otherwise.

Real columns are as skewed as words: in 20 Newsgroups a few hundred of 75,875 columns cause most of
the work. A column with ``df`` entries costs either ``df`` scattered additions per query or a sweep
over a dense column, whose additions are contiguous; `SWEEP_COST` determines from which ``df`` the
sweep is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.sparse.matrix import Floats, Int32s, Int64s, Rows
from slipstream.sparse.metrics import MetricPlan, Op, Side

# As in sparse.h.
BLOCK_BYTES = 512
PADDING_BYTES = 512
MAX_TILE_ROWS = 65_536
# With dense columns the sums of many queries are stored at a time, otherwise those of one. For sums
# in 4 MiB more queries are better than more rows: dense columns are read once for all of them.
TILE_ROWS, TILE_ROWS_OF_LISTS = 4_096, 32_768

# Cost of one row of a dense column, in scattered additions of the same operation: measured on the
# machine of docs/sparse.md with AVX-512; it affects only speed.
SWEEP_COST: dict[Op, float] = {
    Op.DOT: 0.05, Op.MIN: 0.05, Op.COMMON: 0.06, Op.EQUAL: 0.08, Op.SHARE: 0.15,
    Op.SHARE_MIN: 0.12, Op.POWER: 0.1, Op.ENTROPY: 0.3,
}  # fmt: skip
# Dense columns may take this many bytes, or this many times the bytes of the matrix.
_HEAD_BYTES = 32 * 2**20
_HEAD_SHARE = 3.0


@dataclass(frozen=True, eq=False)
class Index:
    """The searched rows as one plan needs them.

    Attributes:
        rows: the matrix.
        side: its values under the plan, in the working type.
        head_of, tail_of: int32 [width]; the index of each column in head and tail, -1 if it is
            not in it.
        head, head_aux: for each channel float [blocks, head columns, block rows].
        tile_rows: rows of a tile; the last tile may have fewer.
        tile_start: int64 [tiles + 1]; start of each tile's lists.
        list_start: uint32 [tiles, tail columns + 1].
        list_row: uint16; the row within its tile.
        list_value, list_aux: for each channel float, padded.
        term: float [rows, padded to whole tiles]; `Side.term` in the working type.
    """

    rows: Rows
    side: Side
    head_of: Int32s
    tail_of: Int32s
    head: tuple[Floats, ...]
    head_aux: tuple[Floats | None, ...]
    tile_rows: int
    tile_start: Int64s
    list_start: npt.NDArray[np.uint32]
    list_row: npt.NDArray[np.uint16]
    list_value: tuple[Floats, ...]
    list_aux: tuple[Floats | None, ...]
    term: Floats

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.term.dtype

    @property
    def head_columns(self) -> int:
        return int(self.head[0].shape[1])

    @property
    def tail_columns(self) -> int:
        return int(self.list_start.shape[1]) - 1

    @property
    def nbytes(self) -> int:
        """Size in bytes, without the matrix itself."""
        arrays = [
            self.head_of, self.tail_of, self.tile_start, self.list_start, self.list_row, self.term,
            *self.head, *self.head_aux, *self.list_value, *self.list_aux,
        ]  # fmt: skip
        return sum(array.nbytes for array in arrays if array is not None)


def build_index(rows: Rows, plan: MetricPlan, side: Side, tile_rows: int | None = None) -> Index:
    """Build the index of `rows`.

    Args:
        side: result of ``plan.right`` for `rows`, in the working type.
        tile_rows: a multiple of 128, at most 65,536; None to choose.
    """
    dtype = side.exact.dtype
    block = BLOCK_BYTES // dtype.itemsize
    blocks = -(-max(len(rows), 1) // block)
    frequency = rows.frequency
    head_ids = _head(frequency, blocks * block, plan, dtype.itemsize, rows.nnz)
    head_of = np.full(rows.width, -1, np.int32)
    head_of[head_ids] = np.arange(len(head_ids), dtype=np.int32)
    tail_ids = np.flatnonzero((frequency > 0) & (head_of < 0))
    tail_of = np.full(rows.width, -1, np.int32)
    tail_of[tail_ids] = np.arange(len(tail_ids), dtype=np.int32)
    tile = tile_rows or _tile_rows(len(rows), len(head_ids), len(tail_ids), rows.nnz)
    tile = min(tile, -(-max(len(rows), 1) // 128) * 128)

    channels = range(len(side.channels))
    shape = (blocks, len(head_ids), block)
    head = tuple(_aligned(shape, dtype) for _ in channels)
    head_aux = tuple(None if side.aux[c] is None else _aligned(shape, dtype) for c in channels)
    tiles = -(-max(len(rows), 1) // tile)
    tile_start = np.zeros(tiles + 1, np.int64)
    list_start = np.zeros((tiles, len(tail_ids) + 1), np.uint32)
    listed = int(frequency[tail_ids].sum())
    padded = listed + PADDING_BYTES // dtype.itemsize
    list_row = np.zeros(listed, np.uint16)
    list_value = tuple(np.zeros(padded, dtype) for _ in channels)
    list_aux = tuple(None if side.aux[c] is None else np.zeros(padded, dtype) for c in channels)
    for t in range(tiles):
        first, last = t * tile, min((t + 1) * tile, len(rows))
        part = slice(int(rows.indptr[first]), int(rows.indptr[last]))
        column = rows.indices[part]
        row = np.repeat(np.arange(last - first, dtype=np.int32), rows.lengths[first:last])
        at = np.flatnonzero(head_of[column] >= 0)
        where = (
            (row[at] + first) // block, head_of[column[at]], (row[at] + first) % block,
        )  # fmt: skip
        for c in channels:
            head[c][where] = side.channels[c][part][at]
            _fill(head_aux[c], where, side.aux[c], part, at)
        at = np.flatnonzero(tail_of[column] >= 0)
        tails = tail_of[column[at]]
        # Stable: within a column, rows stay in order.
        order = np.argsort(tails, kind="stable")
        begin = int(tile_start[t])
        end = begin + len(at)
        tile_start[t + 1] = end
        counts = np.bincount(tails, minlength=len(tail_ids))
        list_start[t, 1:] = np.cumsum(counts)
        at = at[order]
        list_row[begin:end] = row[at]
        for c in channels:
            list_value[c][begin:end] = side.channels[c][part][at]
            _fill(list_aux[c], slice(begin, end), side.aux[c], part, at)
    # Rows past the last are read in whole vectors, but never returned.
    term = np.zeros(tiles * tile, dtype)
    term[: len(rows)] = side.term
    return Index(
        rows, side, head_of, tail_of, head, head_aux, tile, tile_start, list_start, list_row,
        list_value, list_aux, term,
    )  # fmt: skip


def _aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return zeros that start at a cache line, so that no vector of a column crosses two."""
    count = int(np.prod(shape))
    line = 64 // np.dtype(dtype).itemsize
    whole = np.zeros(count + line, dtype)
    first = -(whole.ctypes.data // whole.itemsize) % line
    return whole[first : first + count].reshape(shape)


def _fill(
    target: npt.NDArray[Any] | None, where: Any, values: Floats | None, part: slice, at: Int64s
) -> None:
    if target is not None and values is not None:
        target[where] = values[part][at]


def _head(
    frequency: Int64s, padded_rows: int, plan: MetricPlan, itemsize: int, nnz: int
) -> npt.NDArray[np.intp]:
    """Return the columns to store dense, ascending: the most frequent that are worth it and fit."""
    # Half as many float64 as float32 fit into a register.
    cost = max(SWEEP_COST[op] for op in plan.ops) * itemsize / 4
    worth_it = np.flatnonzero(frequency > cost * padded_rows)
    column_bytes = padded_rows * itemsize * 2 * len(plan.ops)
    fit = int(max(_HEAD_BYTES, _HEAD_SHARE * nnz * (itemsize + 4)) // column_bytes)
    if len(worth_it) > fit:
        # Among equally frequent columns those with the lower number, on every machine.
        worth_it = np.sort(worth_it[np.argsort(-frequency[worth_it], kind="stable")[:fit]])
    return worth_it


def _tile_rows(rows: int, dense: int, columns: int, nnz: int) -> int:
    """Return a tile small enough for sums in the cache, and large enough for few list starts."""
    tile = TILE_ROWS if dense else TILE_ROWS_OF_LISTS
    while tile < MAX_TILE_ROWS and (rows // tile + 1) * columns > nnz:
        tile *= 2
    return tile
