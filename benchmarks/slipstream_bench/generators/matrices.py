"""Sparse matrices with a structure that was put there: blocks, or a band, hidden or in the open."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators._random import positive, streams

# Entries are +- uniform in this range: none is close to zero, so that "sparse" is exact.
_SMALLEST, _LARGEST = 0.5, 1.5


@dataclass(frozen=True)
class PlantedMatrix:
    """A matrix and where its entries are.

    Attributes:
        values: float32 [rows, columns], zero outside the structure and nowhere inside.
        row_order, column_order: int64; ``values[row_order][:, column_order]`` shows the
            structure in the open. The identity unless the matrix was shuffled.
        blocks: bool [rows / block, columns / block], which blocks are full (in the open); None
            for a band.
        block: rows and columns of one block; None for a band.
        below, above: diagonals under and over the main one; None for blocks.
    """

    values: NDArray[np.float32]
    row_order: NDArray[np.int64]
    column_order: NDArray[np.int64]
    blocks: NDArray[np.bool_] | None = None
    block: tuple[int, int] | None = None
    below: int | None = None
    above: int | None = None

    @property
    def structured(self) -> NDArray[np.float32]:
        """The matrix with rows and columns put back in order, float32 [rows, columns]."""
        return self.values[self.row_order][:, self.column_order]


def block_sparse(
    rows: int,
    columns: int,
    *,
    block: tuple[int, int] = (16, 16),
    density: float = 0.1,
    shuffle: bool = False,
    seed: int = 0,
) -> PlantedMatrix:
    """Full blocks on a grid, exactly ``round(density * blocks)`` of them and at least one.

    Args:
        shuffle: hide the structure behind random orders of rows and columns.

    Raises:
        InvalidArgumentError: sizes that the block does not divide, or a density out of (0, 1].
    """
    positive(rows=rows, columns=columns, block=min(block))
    if rows % block[0] or columns % block[1]:
        raise InvalidArgumentError("block", f"{block} does not divide {rows} x {columns}")
    if not 0 < density <= 1:
        raise InvalidArgumentError("density", "must be more than 0 and at most 1")
    where, what, order = streams(seed, 3)
    grid = (rows // block[0], columns // block[1])
    count = max(1, round(density * grid[0] * grid[1]))
    full = np.zeros(grid[0] * grid[1], dtype=np.bool_)
    full[where.choice(len(full), count, replace=False)] = True
    blocks = full.reshape(grid)
    mask = np.repeat(np.repeat(blocks, block[0], axis=0), block[1], axis=1)
    row_order, column_order = _orders((rows, columns), shuffle, order)
    return PlantedMatrix(
        _hide(_fill(mask, what), row_order, column_order),
        row_order,
        column_order,
        blocks=blocks,
        block=block,
    )


def banded(
    size: int, *, below: int = 2, above: int = 2, shuffle: bool = False, seed: int = 0
) -> PlantedMatrix:
    """A square matrix whose entries (i, j) are there where ``-below <= j - i <= above``.

    Args:
        shuffle: hide the band behind one random order of both rows and columns, so that a
            symmetric band stays symmetric in structure.

    Raises:
        InvalidArgumentError: a size that is not positive, or a band outside the matrix.
    """
    positive(size=size)
    for argument, width in (("below", below), ("above", above)):
        if not 0 <= width < size:
            raise InvalidArgumentError(argument, f"must lie in 0..{size - 1}")
    what, order = streams(seed, 2)
    offset = np.arange(size)[None, :] - np.arange(size)[:, None]
    row_order, _ = _orders((size, size), shuffle, order)
    return PlantedMatrix(
        _hide(_fill((offset >= -below) & (offset <= above), what), row_order, row_order),
        row_order,
        row_order,
        below=below,
        above=above,
    )


def _fill(mask: NDArray[np.bool_], generator: np.random.Generator) -> NDArray[np.float32]:
    size = generator.uniform(_SMALLEST, _LARGEST, mask.shape)
    sign = generator.choice([-1.0, 1.0], mask.shape)
    return np.where(mask, sign * size, 0).astype(np.float32)


def _orders(
    shape: tuple[int, int], shuffle: bool, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not shuffle:
        return np.arange(shape[0]), np.arange(shape[1])
    return generator.permutation(shape[0]), generator.permutation(shape[1])


def _hide(
    structured: NDArray[np.float32],
    row_order: NDArray[np.int64],
    column_order: NDArray[np.int64],
) -> NDArray[np.float32]:
    values = np.empty_like(structured)
    values[np.ix_(row_order, column_order)] = structured
    return values
