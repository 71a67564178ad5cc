// Layouts of kernels that multiply bytes, for any vector width, and the loop over their tiles.
//
// k is taken four at a time ("quads"), because the instructions add neighbouring products: a vector
// holds one quad of each of kColumns columns. A panel is kVectors such vectors wide; of each quad its
// vectors lie one after the other. Weights are signed bytes, activations unsigned ones; of these a
// tile of kRows rows lies together, quad by quad, so that one row's quad can be broadcast.
#pragma once

#include "lowbit/kernel.h"

namespace slipstream {
namespace lowbit {
namespace {

inline int64_t quads_of(int64_t k) { return (k + 3) / 4; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The most by which signed weights of `wbits` bits, 2^(wbits-1) taken off, can be from 0, times the
// largest activation, twice: what one multiply-add of two pairs may reach.
inline int32_t pair_bound(int wbits, int abits) {
  return 2 * (1 << (wbits - 1)) * ((1 << abits) - 1);
}

inline int32_t half_range(const Problem& p) { return 1 << (p.wbits - 1); }

template <typename Tile>
int64_t byte_panel_bytes(const Problem& p) {
  const int64_t columns = Tile::kColumns * Tile::kVectors;
  return ceil_div(p.n, columns) * columns * quads_of(p.k) * 4;
}

// Weights less `offset` as panels; columns and quads that are not there hold zeros.
template <typename Tile>
void pack_byte_panels(const Problem& p, const uint8_t* w, int64_t ldw, int32_t offset,
                      uint8_t* packed) {
  const int64_t columns = Tile::kColumns * Tile::kVectors, quads = quads_of(p.k);
  for (int64_t j = 0; j < ceil_div(p.n, columns) * columns; ++j) {
    uint8_t* to = packed + j / columns * columns * quads * 4 + j % columns * 4;
    for (int64_t q = 0; q < quads; ++q)
      for (int64_t t = 0; t < 4; ++t) {
        const int64_t k = 4 * q + t;
        const bool there = j < p.n && k < p.k;
        to[q * columns * 4 + t] = there ? static_cast<uint8_t>(w[j * ldw + k] - offset) : 0;
      }
  }
}

template <typename Tile>
int64_t byte_tile_bytes(const Problem& p) {
  return p.m * quads_of(p.k) * 4;
}

template <typename Tile>
void pack_byte_tiles(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  const int64_t quads = quads_of(p.k), whole = p.k / 4;
  for (int64_t top = 0; top < p.m; top += Tile::kRows) {
    const int64_t rows = p.m - top < Tile::kRows ? p.m - top : Tile::kRows;
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t* from = a + (top + i) * lda;
      uint8_t* to = packed + top * quads * 4 + i * 4;
      for (int64_t q = 0; q < whole; ++q) __builtin_memcpy(to + q * rows * 4, from + q * 4, 4);
      if (whole == quads) continue;
      uint8_t last[4] = {0, 0, 0, 0};
      for (int64_t k = whole * 4; k < p.k; ++k) last[k - whole * 4] = from[k];
      __builtin_memcpy(to + whole * rows * 4, last, 4);
    }
  }
}

// Quads after which the loop turns to the next tile, so that a stretch of the panel stays in the
// first-level cache while all rows pass over it.
constexpr int64_t kQuadBlock = 128;

// All rows times one panel of weights; `columns` of it are there.
template <typename Tile>
void multiply_byte_panel(const Problem& p, const uint8_t* activations, const uint8_t* panel,
                         int64_t columns, int32_t* out, int64_t ldo) {
  constexpr int64_t kWidth = Tile::kColumns * Tile::kVectors;
  const int64_t quads = quads_of(p.k);
  const int64_t depth = 32767 / pair_bound(p.wbits, p.abits);
  for (int64_t quad = 0; quad < quads; quad += kQuadBlock) {
    const int64_t count = quads - quad < kQuadBlock ? quads - quad : kQuadBlock;
    const uint8_t* b = panel + quad * kWidth * 4;
    for (int64_t top = 0; top < p.m; top += Tile::kRows) {
      const int64_t rows = p.m - top < Tile::kRows ? p.m - top : Tile::kRows;
      const uint8_t* a = activations + top * quads * 4 + quad * rows * 4;
      int32_t* to = out + top * ldo;
      if (columns == kWidth) {
        Tile::run(rows, a, b, count, depth, quad == 0, to, ldo);
        continue;
      }
      alignas(64) int32_t whole[Tile::kRows * kWidth];
      Tile::run(rows, a, b, count, depth, true, whole, kWidth);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
          to[i * ldo + j] = whole[i * kWidth + j] + (quad == 0 ? 0 : to[i * ldo + j]);
    }
  }
}

template <typename Tile>
void multiply_byte_panels(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                          int64_t first_column, int64_t last_column, int32_t* out,
                          int64_t ldo) {
  constexpr int64_t kWidth = Tile::kColumns * Tile::kVectors;
  for (int64_t j = first_column; j < last_column; j += kWidth) {
    const int64_t columns = last_column - j < kWidth ? last_column - j : kWidth;
    multiply_byte_panel<Tile>(p, activations, weights + j * quads_of(p.k) * 4, columns,
                              out + j - first_column, ldo);
  }
}

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
