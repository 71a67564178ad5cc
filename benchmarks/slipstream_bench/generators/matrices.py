"""Sparse matrices with planted structure, blocks or a band, optionally shuffled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators._random import positive, streams

# Magnitudes of entries. None is close to zero, so that "sparse" is exact.
_SMALLEST, _LARGEST = 0.5, 1.5


@dataclass(frozen=True)
class PlantedMatrix:
    """A matrix and the positions of its entries.

    Attributes:
        values: float32 [rows, columns], nonzero exactly inside the structure.
        row_order, column_order: int64; ``values[row_order][:, column_order]`` is the unshuffled
            matrix. The identity unless the matrix was shuffled.
        blocks: bool [rows / block, columns / block], the full blocks of the unshuffled matrix; None
            for a band.
        block: rows and columns of a block; None for a band.
        below, above: numbers of diagonals below and above the main one; None for blocks.
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
        """The unshuffled matrix, float32 [rows, columns]."""
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
    """Generate full blocks on a grid: exactly ``round(density * blocks)``, at least one.

    Args:
        shuffle: permute rows and columns randomly.

    Raises:
        InvalidArgumentError: the block does not divide the sizes, or the density is not in (0, 1].
    """
    positive(rows=rows, columns=columns, block=min(block))
    if rows % block[0] or columns % block[1]:
        raise InvalidArgumentError("block", f"{block} does not divide {rows} x {columns}")
    if not 0 < density <= 1:
        raise InvalidArgumentError("density", "must be more than 0 and at most 1")
    positions, values, order = streams(seed, 3)
    grid = (rows // block[0], columns // block[1])
    count = max(1, round(density * grid[0] * grid[1]))
    full = np.zeros(grid[0] * grid[1], dtype=np.bool_)
    full[positions.choice(len(full), count, replace=False)] = True
    blocks = full.reshape(grid)
    mask = np.repeat(np.repeat(blocks, block[0], axis=0), block[1], axis=1)
    row_order, column_order = _orders((rows, columns), shuffle, order)
    return PlantedMatrix(
        _hide(_fill(mask, values), row_order, column_order),
        row_order,
        column_order,
        blocks=blocks,
        block=block,
    )


def banded(
    size: int, *, below: int = 2, above: int = 2, shuffle: bool = False, seed: int = 0
) -> PlantedMatrix:
    """Generate a square matrix with entries (i, j) where ``-below <= j - i <= above``.

    Args:
        shuffle: apply one random permutation to both rows and columns, so that a symmetric band
            keeps a symmetric structure.

    Raises:
        InvalidArgumentError: the size is not positive, or the band exceeds the matrix.
    """
    positive(size=size)
    for argument, width in (("below", below), ("above", above)):
        if not 0 <= width < size:
            raise InvalidArgumentError(argument, f"must be in 0..{size - 1}")
    values, order = streams(seed, 2)
    offset = np.arange(size)[None, :] - np.arange(size)[:, None]
    row_order, _ = _orders((size, size), shuffle, order)
    return PlantedMatrix(
        _hide(_fill((offset >= -below) & (offset <= above), values), row_order, row_order),
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
