"""Rows and columns that windows of convolutions and pooling need from neighbouring tiles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Window:
    """Rows or columns of the input that make one of the output.

    Raises:
        InvalidArgumentError: a number is not an integer, `padding` is negative or another one is
            not positive.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    def __post_init__(self) -> None:
        for name, least in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            as_integer(name, getattr(self, name), least)

    def output(self, size: int) -> int:
        """Return the number of output rows for `size` input rows."""
        reach = self.dilation * (self.kernel - 1) + 1
        return (size + 2 * self.padding - reach) // self.stride + 1

    def needs(self, size: int, tiles: int) -> Spans:
        """Return the input rows from which each tile computes its share of the output.

        Rows below 0 and from `size` on are padding.

        Raises:
            InvalidArgumentError: a tile has no output, or needs rows beyond neighbouring tiles.
        """
        starts, output = _starts(size, tiles), _starts(self.output(size), tiles)
        found: Spans = []
        for tile, (first, last) in enumerate(itertools.pairwise(output)):
            low = first * self.stride - self.padding
            high = (last - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1
            reached = starts[max(tile - 1, 0)], starts[min(tile + 2, tiles)]
            if last <= first or max(low, 0) < reached[0] or min(high, size) > reached[1]:
                raise InvalidArgumentError(
                    "tiles",
                    f"{tiles} tiles of {size} rows or columns are smaller than the halo of a "
                    f"kernel of {self.kernel} with stride {self.stride}",
                    remedy="use fewer tiles along this dimension, or larger images",
                )
            found.append((low, high))
        return found

    def halo(self, size: int, tiles: int, tile: int) -> int:
        """Return the number of rows that a tile sends to its neighbours.

        Raises:
            InvalidArgumentError: as for `needs`, or there is no such tile.
        """
        if not 0 <= as_integer("tile", tile, 0) < as_integer("tiles", tiles):
            raise InvalidArgumentError("tile", f"{tile} is not below the number of tiles, {tiles}")
        owned = spans(size, tiles)[tile]
        needs = self.needs(size, tiles)
        return sum(
            max(0, end - begin)
            for other in range(tiles)
            if other != tile
            for begin, end in [overlap(owned, needs[other])]
        )


def spans(size: int, tiles: int) -> Spans:
    """Return the rows of each tile, [start, end)."""
    return list(itertools.pairwise(_starts(size, tiles)))


def overlap(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Return the rows in both spans; its end is not above its start if there are none."""
    return max(first[0], second[0]), min(first[1], second[1])


def _starts(size: int, tiles: int) -> list[int]:
    return [tile * size // tiles for tile in range(tiles + 1)]
