"""An all-reduce by rows and columns of a grid of ranks, in chunks that overlap.

The ranks of a row reduce-scatter, so that each holds the row's sum of one share; shares are
all-reduced along the columns, then all-gathered within the rows. As in a ring, a rank sends
2 (n - 1) / n of the bytes, but a whole row sends only 2 (rows - 1) / rows of them to other rows,
while a ring puts them on every link. The tensor is split into chunks: while one crosses between
rows, the next is summed within them. Each element of the result is computed on a single rank, so
all ranks have the same bits.

Source: Kumar et al., MLSys 2021, arXiv 2011.03641.
"""

from __future__ import annotations

import itertools

import torch

from slipstream.ranks.lines import Gather, Line, Scatter, cut, room_for, shares
from slipstream.ranks.wire import Wire

# Chunks hide the communication within rows, but each costs messages.
_MAX_CHUNKS = 8
_MIN_CHUNK_BYTES = 256 << 10
# Lag, in chunks, of the later phases. More chunks in flight would overflow the queue of the link
# between rows; two keep it busy.
_SHARE_AFTER, _SPREAD_AFTER = 2, 4


def chunks_of(nbytes: int) -> int:
    return max(1, min(_MAX_CHUNKS, nbytes // _MIN_CHUNK_BYTES))


def all_reduce(
    flat: torch.Tensor, wire: Wire, rows: int, divisor: int = 1, chunks: int | None = None
) -> None:
    """Replace `flat` by the sum over all ranks, divided by `divisor`.

    Args:
        flat: [n], contiguous, on CPU; the same length and dtype on all ranks.
        rows: number of rows; a divisor of the number of ranks.
        chunks: number of chunks; None chooses it by size.
    """
    # Ranks are numbered row by row.
    columns = wire.size // rows
    first = wire.rank // columns * columns
    row = Line(wire, tuple(range(first, first + columns)))
    column = Line(wire, tuple(range(wire.rank % columns, wire.size, columns)))
    count = chunks_of(flat.numel() * flat.element_size()) if chunks is None else chunks
    parts = cut(flat, shares(flat.numel(), count))
    sizes = [size for part in parts for size in _buffer_sizes(row, column, part)]
    buffers = iter(cut(wire.buffer(sum(sizes), flat.dtype), [0, *itertools.accumulate(sizes)]))
    # Post all receives first: a message with a posted receive is sent without a handshake.
    in_flight = [
        _Chunk(row, column, part, next(buffers), next(buffers), 4 * number, divisor)
        for number, part in enumerate(parts)
    ]
    for chunk in in_flight:
        chunk.send()
    for number in range(count + _SPREAD_AFTER):
        for step, after in (
            (_Chunk.cross, 0), (_Chunk.share, _SHARE_AFTER), (_Chunk.spread, _SPREAD_AFTER),
        ):  # fmt: skip
            if 0 <= number - after < count:
                step(in_flight[number - after])
    for chunk in in_flight:
        chunk.end()


def _buffer_sizes(row: Line, column: Line, part: torch.Tensor) -> tuple[int, int]:
    pieces = cut(part, shares(part.numel(), len(row.members)))
    own = pieces[row.place]
    down = cut(own, shares(own.numel(), len(column.members)))
    return room_for(row, pieces), room_for(column, down)


class _Chunk:
    """A chunk in flight; each method is a phase that waits for the previous one."""

    def __init__(
        self, row: Line, column: Line, part: torch.Tensor, row_buffer: torch.Tensor,
        column_buffer: torch.Tensor, tag: int, divisor: int,
    ) -> None:  # fmt: skip
        across = cut(part, shares(part.numel(), len(row.members)))
        self._row_share = across[row.place]
        down = cut(self._row_share, shares(self._row_share.numel(), len(column.members)))
        self._own_share = down[column.place]
        self._divisor = divisor
        self._in_row = Scatter(row, across, row_buffer, tag)
        self._in_column = Scatter(column, down, column_buffer, tag + 1)
        # Results arrive only after these parts have left, so their receives can be posted already.
        self._from_column = Gather(column, down, tag + 2)
        self._from_row = Gather(row, across, tag + 3)

    def send(self) -> None:
        self._in_row.send()

    def cross(self) -> None:
        """Sum the row's parts, and send the pieces of the sum to the column."""
        self._in_row.sum(self._row_share)
        self._in_column.send()

    def share(self) -> None:
        """Sum the column's parts, and send the result to the column."""
        self._in_column.sum(self._own_share, self._divisor)
        self._from_column.send()

    def spread(self) -> None:
        self._from_column.end()
        self._from_row.send()

    def end(self) -> None:
        self._from_row.end()
        self._in_row.end()
        self._in_column.end()
