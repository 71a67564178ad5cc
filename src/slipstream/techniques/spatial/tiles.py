"""Tiles of images on a grid of ranks, and the exchange of their borders.

A layer that computes an output from a window of its input needs rows and columns of neighbouring
tiles: the halo. Its gradients travel the other way. Rows are exchanged first, then columns of the
extended tiles, which include the corners. Source: Kumar et al., MLSys 2021, arXiv 2011.03641.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.ranks.group import ProcessGroup, process_group
from slipstream.techniques.spatial.window import Spans, Window, overlap, spans


class RankSum:
    """Sums over the ranks of a process group; part of a model's layers."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self.ranks = ranks

    def __deepcopy__(self, memo: Any) -> RankSum:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "the model cannot be pickled: its layers communicate in a process group",
            remedy="save model.state_dict(), which is that of the original model",
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; its gradient is summed too."""
        total: torch.Tensor = _Sum.apply(x, self.ranks)
        return total


class Tiles(RankSum):
    """A grid of ranks that share every image, row by row.

    Args:
        rows, columns: number of tiles along height and width.
        group: process group of the ranks; None for the default group.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: the grid is not that of all ranks of the group.
    """

    def __init__(self, rows: int, columns: int, group: Any = None) -> None:
        self.shape = as_integer("rows", rows), as_integer("columns", columns)
        super().__init__(process_group(group))
        if rows * columns != self.ranks.size:
            raise InvalidArgumentError(
                "rows", f"{rows} x {columns} tiles are not the group's {self.ranks.size} ranks",
                remedy=f"start {rows * columns} ranks, or pass another number of tiles",
            )  # fmt: skip
        self.place = divmod(self.ranks.rank, columns)
        # While it is set, layers compute whole images.
        self.whole = False
        # Sizes of the outputs of layers that end the tiles.
        self.ended: list[tuple[int, int]] = []

    def line(self, axis: int) -> list[int]:
        """Return the ranks of this tile's column (axis 0) or row (axis 1), in order."""
        row, column = self.place
        rows, columns = self.shape
        if axis == 0:
            return [r * columns + column for r in range(rows)]
        return [row * columns + c for c in range(columns)]

    def own(self, size: Sequence[int]) -> tuple[slice, slice]:
        """Return rows and columns of this rank's tile of an image of this height and width.

        Raises:
            InvalidArgumentError: some tile would be empty.
        """
        if size[0] < self.shape[0] or size[1] < self.shape[1]:
            raise InvalidArgumentError(
                "tiles", f"{size[0]} x {size[1]} pixels do not make {self.shape[0]} x "
                f"{self.shape[1]} tiles", remedy="use fewer tiles or larger images",
            )  # fmt: skip
        first, second = (
            slice(*spans(extent, tiles)[at])
            for extent, tiles, at in zip(size, self.shape, self.place, strict=True)
        )
        return first, second

    def extend(
        self, x: torch.Tensor, size: Sequence[int], windows: Sequence[Window], fill: float
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the tile `x`, [..., h, w], with its halo, and the padding per axis that it lacks.

        Along an axis that is divided, the halo includes padding of `fill`.
        """
        lacking = [0, 0]
        for axis, (extent, window) in enumerate(zip(size, windows, strict=True)):
            if self.shape[axis] == 1:
                lacking[axis] = window.padding
                continue
            needs = window.needs(extent, self.shape[axis])
            owned = spans(extent, self.shape[axis])
            if needs != owned:
                x = _Halo.apply(x, self, axis, needs, owned, fill)
        return x, lacking

    def whole_image(self, x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """Return the image, [..., height, width], of which `x` is this rank's tile."""
        rows, columns = self.own(size)
        around = (columns.start, size[1] - columns.stop, rows.start, size[0] - rows.stop)
        return self.sum(torch.nn.functional.pad(x, around))


class _Sum(torch.autograd.Function):
    """Sum over ranks, whose adjoint is the same sum of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: ProcessGroup) -> torch.Tensor:
        ctx.ranks = ranks
        total = x.detach().clone(memory_format=torch.contiguous_format)
        ranks.run("a sum over ranks", lambda: dist.all_reduce(total, group=ranks.group))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.forward(ctx, gradients[0], ctx.ranks), None


class _Halo(torch.autograd.Function):
    """Extension of a tile along one axis: padding, and rows of its neighbours."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tiles: Tiles, axis: int, needs: Spans, owned: Spans, fill: float
    ) -> torch.Tensor:
        ctx.tiles, ctx.line, ctx.at, ctx.dim = tiles, tiles.line(axis), tiles.place[axis], axis - 2
        (ctx.low, high), ctx.own = needs[ctx.at], owned[ctx.at]
        # By tile of the line: rows of this one that it needs, and rows that this one needs of it.
        ctx.sent, ctx.received = _overlaps(ctx.own, needs), _overlaps(needs[ctx.at], owned)
        # In the layout of images: convolutions would copy any other.
        out = _empty(x, ctx.dim, high - ctx.low)
        sends = _parts(x, ctx.dim, ctx.own[0], ctx.sent)
        receives = _parts(out, ctx.dim, ctx.low, ctx.received)
        _swap(ctx, sends, receives)
        size, rows = owned[-1][1], high - ctx.low
        before, after = min(max(-ctx.low, 0), rows), min(max(high - size, 0), rows)
        out.narrow(ctx.dim, 0, before).fill_(fill)
        out.narrow(ctx.dim, rows - after, after).fill_(fill)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        begin, end = ctx.own
        sends = _parts(gradients[0], ctx.dim, ctx.low, ctx.received)
        receives = {n: _empty(gradients[0], ctx.dim, b - a) for n, (a, b) in ctx.sent.items()}
        _swap(ctx, sends, receives)
        if ctx.sent.get(ctx.at) == ctx.own:
            total = receives.pop(ctx.at)
        else:
            total = _empty(gradients[0], ctx.dim, end - begin).zero_()
        for n, part in receives.items():
            first, last = ctx.sent[n]
            total.narrow(ctx.dim, first - begin, last - first).add_(part)
        return (total, *[None] * 5)


def _empty(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return an uninitialised tensor like `x` with another extent along `dim`."""
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def _parts(
    x: torch.Tensor, dim: int, start: int, spans_of: dict[int, tuple[int, int]]
) -> dict[int, torch.Tensor]:
    """Return views of `x`, whose first row is `start`, by number of a tile."""
    return {n: x.narrow(dim, a - start, b - a) for n, (a, b) in spans_of.items()}


def _overlaps(span: tuple[int, int], others: Spans) -> dict[int, tuple[int, int]]:
    """Return the rows that `span` shares with others, by number, if any."""
    shared = {n: overlap(span, other) for n, other in enumerate(others)}
    return {n: (begin, end) for n, (begin, end) in shared.items() if begin < end}


def _swap(ctx: Any, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
    """Exchange rows with the other tiles of the line, by their number in it, and copy own ones."""
    ranks: ProcessGroup = ctx.tiles.ranks
    sent = {ctx.line[n]: part.contiguous() for n, part in sends.items() if n != ctx.at}
    received = {
        ctx.line[n]: part if part.is_contiguous() else part.new_empty(part.shape)
        for n, part in receives.items()
        if n != ctx.at
    }
    ranks.run("a halo exchange", lambda: ranks.wire.swap(sent, received))
    for n, part in receives.items():
        arrived = sends[n] if n == ctx.at else received[ctx.line[n]]
        if arrived is not part:
            part.copy_(arrived)
