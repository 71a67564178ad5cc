"""An all-reduce by rows and columns of a grid of ranks, in chunks that overlap.

Within its row every rank reduce-scatters, so that each holds the row's sum of a share; shares are
all-reduced down the columns, and all-gathered within the rows. A rank sends 2 (n - 1) / n of the
bytes as in a ring, but between rows only 2 (rows - 1) / rows of them cross for a whole row, where
a ring has them on every cable. The tensor is cut in chunks: while one crosses, the next is summed
within the rows. Every number of the result is computed on one rank, so that all have the same bits.

Source: Kumar et al., MLSys 2021, arXiv 2011.03641.
"""

from __future__ import annotations

import itertools

import torch

from slipstream.ranks.lines import Gather, Line, Scatter, cut, room_for, shares
from slipstream.ranks.wire import Wire

# Chunks hide what happens within the rows, and cost messages: no more, and none smaller.
_MOST_CHUNKS = 8
_LEAST_CHUNK_BYTES = 256 << 10
# How many chunks later a chunk is waited for. All that crosses at once fills the queue of the cable
# between rows until it drops packets; two chunks keep it busy.
_SHARE_AFTER, _SPREAD_AFTER = 2, 4


def chunks_of(nbytes: int) -> int:
    return max(1, min(_MOST_CHUNKS, nbytes // _LEAST_CHUNK_BYTES))


def all_reduce(
    flat: torch.Tensor, wire: Wire, rows: int, divisor: int = 1, chunks: int | None = None
) -> None:
    """Put the sum of all ranks' `flat`, divided, in its place.

    Args:
        flat: [n], contiguous on a processor; the same length and dtype on all ranks.
        rows: of the grid; it divides the ranks.
        chunks: how many; None: by `chunks_of`.
    """
    # Ranks are numbered row by row.
    columns = wire.size // rows
    first = wire.rank // columns * columns
    row = Line(wire, tuple(range(first, first + columns)))
    column = Line(wire, tuple(range(wire.rank % columns, wire.size, columns)))
    count = chunks_of(flat.numel() * flat.element_size()) if chunks is None else chunks
    parts = cut(flat, shares(flat.numel(), count))
    sizes = [size for part in parts for size in _rooms(row, column, part)]
    rooms = iter(cut(wire.buffer(sum(sizes), flat.dtype), [0, *itertools.accumulate(sizes)]))
    # All receives are posted first: a message that is expected needs no answer before it is sent.
    under_way = [
        _Chunk(row, column, part, next(rooms), next(rooms), 4 * number, divisor)
        for number, part in enumerate(parts)
    ]
    for chunk in under_way:
        chunk.send()
    for number in range(count + _SPREAD_AFTER):
        for step, after in (
            (_Chunk.cross, 0), (_Chunk.share, _SHARE_AFTER), (_Chunk.spread, _SPREAD_AFTER),
        ):  # fmt: skip
            if 0 <= number - after < count:
                step(under_way[number - after])
    for chunk in under_way:
        chunk.end()


def _rooms(row: Line, column: Line, part: torch.Tensor) -> tuple[int, int]:
    pieces = cut(part, shares(part.numel(), len(row.members)))
    held = pieces[row.place]
    down = cut(held, shares(held.numel(), len(column.members)))
    return room_for(row, pieces), room_for(column, down)


class _Chunk:
    """One chunk on its way through the phases; each method waits for the phase before it."""

    def __init__(
        self, row: Line, column: Line, part: torch.Tensor, row_room: torch.Tensor,
        column_room: torch.Tensor, tag: int, divisor: int,
    ) -> None:  # fmt: skip
        across = cut(part, shares(part.numel(), len(row.members)))
        self._held = across[row.place]
        down = cut(self._held, shares(self._held.numel(), len(column.members)))
        self._mine = down[column.place]
        self._divisor = divisor
        self._in_row = Scatter(row, across, row_room, tag)
        self._in_column = Scatter(column, down, column_room, tag + 1)
        # A number comes back only after its part has left: these may be expected already.
        self._from_column = Gather(column, down, tag + 2)
        self._from_row = Gather(row, across, tag + 3)

    def send(self) -> None:
        self._in_row.send()

    def cross(self) -> None:
        """Sum the row's parts; send the column its pieces of that."""
        self._in_row.sum(self._held)
        self._in_column.send()

    def share(self) -> None:
        """Sum the column's parts, and send the column the result."""
        self._in_column.sum(self._mine, self._divisor)
        self._from_column.send()

    def spread(self) -> None:
        self._from_column.end()
        self._from_row.send()

    def end(self) -> None:
        self._from_row.end()
        self._in_row.end()
        self._in_column.end()
