"""Packed product tile: rows x gates x lanes of accumulators in registers, for generated C++.

A product ``y[r, c] = sum over k of x[r, k] w[k, c]`` with few rows is limited by reading `w`, so a
tile keeps the sums of several rows in registers and reads each weight once. Weights are packed in
panels [blocks, K, gates, width]: the columns that a block of positions needs of every gate are
neighbours. Rows are read through pointers, so that they need not be neighbours in memory.

`TILE` is C++ that follows `PRELUDE` and a definition of ``real``; it compiles to AVX-512, AVX2 or
other vectors, as the compiler's target has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.native import cpu_features

_MAX_ROWS = 8
_MAX_VECTORS_PER_ROW = 6

TILE = r"""
constexpr int kLanes = @LANES@;
typedef real vec __attribute__((vector_size(kLanes * sizeof(real))));
typedef u32 bits_vec __attribute__((vector_size(kLanes * 4)));

// Or the compiler reads a weight from memory again for every row.
#if defined(__x86_64__)
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

// Weights of two consecutive k in bfloat16, the first in the lower half of each word.
struct pair16 { u32 bits; };

// sum[r][g] += sum over k < depth of x[r][k] panel[k][g]; a panel is aligned to its vectors.
template <int R, int G>
INLINE void multiply(vec (&sum)[R][G], const real* const* x, const real* panel, i64 depth) {
  const real* row[R];
  for (int r = 0; r < R; ++r) row[r] = x[r];
  const vec* w = reinterpret_cast<const vec*>(panel);
  for (i64 k = 0; k < depth; ++k, w += G) {
    vec weight[G];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) {
      weight[g] = w[g];
      IN_REGISTER(weight[g]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vec value = row[r][k] - vec{};
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) sum[r][g] += value * weight[g];
    }
  }
}

template <int R, int G>
INLINE void multiply(vec (&sum)[R][G], const real* const* x, const pair16* panel, i64 depth) {
  const real* row[R];
  for (int r = 0; r < R; ++r) row[r] = x[r];
  const bits_vec* w = reinterpret_cast<const bits_vec*>(panel);
  for (i64 k = 0; k < depth; k += 2, w += G) {
    vec first[G], second[G];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) {
      const bits_vec both = w[g], low = both << 16, high = both & 0xFFFF0000u;
      __builtin_memcpy(&first[g], &low, sizeof(vec));
      __builtin_memcpy(&second[g], &high, sizeof(vec));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vec value = row[r][k] - vec{};
      const vec next = (k + 1 < depth ? row[r][k + 1] : real(0)) - vec{};
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) sum[r][g] += value * first[g];
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) sum[r][g] += next * second[g];
    }
  }
}
"""
"""C++ of the tile; see `tile_source`."""


@dataclass(frozen=True)
class TileShape:
    """Tiles of a matmul.

    Attributes:
        lanes: elements of a vector.
        blocks: vectors per gate and row; a tile has ``lanes * blocks`` columns of each gate.
        rows: maximum number of rows of a tile.
    """

    lanes: int
    blocks: int
    rows: int

    @property
    def width(self) -> int:
        """Columns of each gate."""
        return self.lanes * self.blocks


def tile_shape(gates: Sequence[tuple[int, int]], columns: int, item_bytes: int = 4) -> TileShape:
    """Return the tiles that use this processor's registers best.

    Args:
        gates: of each product that shares a tile, the number of gates and of rows per row of the
            tile; only one product's sums are in registers at a time.
        columns: of each gate.
    """
    features = cpu_features().features
    vector_bytes, registers = (64, 32) if "avx512" in features else (32, 16)
    lanes = vector_bytes // item_bytes
    most = max((count for count, _ in gates), default=1)
    blocks = 1
    while most * blocks * 2 <= _MAX_VECTORS_PER_ROW and blocks * lanes < columns:
        blocks *= 2
    rows = _MAX_ROWS
    for count, per_row in gates:
        vectors = count * blocks
        rows = min(rows, max((registers - 1 - vectors) // (vectors * per_row), 1))
    return TileShape(lanes, blocks, rows)


def tile_source(lanes: int) -> str:
    """Return `TILE` for vectors of `lanes` elements."""
    return TILE.replace("@LANES@", str(lanes))


def pack(
    weight: npt.NDArray[Any],
    offsets: Sequence[int],
    columns: int,
    width: int,
    *,
    half: bool = False,
) -> npt.NDArray[Any]:
    """Pack a weight into panels [blocks, K, gates, width]; columns beyond `columns` are 0.

    Args:
        weight: [K, C], float32 or float64.
        offsets: first column of each gate.
        columns: of each gate.
        half: whether to round to bfloat16 and store pairs of rows, uint32 [blocks, K / 2, gates,
            width].
    """  # fmt: skip
    depth, blocks = weight.shape[0], -(-columns // width)
    padded = np.zeros((depth + depth % 2 * half, len(offsets), blocks * width), weight.dtype)
    for gate, offset in enumerate(offsets):
        padded[:depth, gate, :columns] = weight[:, offset : offset + columns]
    panels = padded.reshape(-1, len(offsets), blocks, width).transpose(2, 0, 1, 3)
    if not half:
        return aligned(np.ascontiguousarray(panels))
    bits = np.ascontiguousarray(panels, np.float32).view(np.uint32)
    # Round to nearest, ties to even, as torch does.
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)
    return aligned(np.ascontiguousarray(bits[:, 0::2] | bits[:, 1::2] << 16))


def aligned(array: npt.NDArray[Any], bytes_: int = 64) -> npt.NDArray[Any]:
    """Return a copy whose data is aligned to cache lines."""
    memory = np.empty(array.nbytes + bytes_, np.uint8)
    first = -memory.ctypes.data % bytes_
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
