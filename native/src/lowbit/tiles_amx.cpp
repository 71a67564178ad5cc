// Many rows by tiles: AMX multiplies 16 rows of 64 unsigned bytes by as many columns of signed ones in
// one instruction. Weights of W bits are stored densely and unpacked a panel at a time, as those of
// other kernels (dense_vectors.h); few rows are these kernels' business.

#include <immintrin.h>

#include "lowbit/vector_avx2.h"
#include "lowbit/dense_vectors.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Base = Dense<Vector>;

constexpr int64_t kTile = 16;           // rows of a tile; columns, or quads, of one of weights
constexpr int64_t kDeep = 64;           // k of a tile
constexpr int64_t kWide = 2 * kTile;    // columns of a panel
constexpr int64_t kQuad = 4 * kWide;    // bytes of a quad of all columns of a panel

// What ldtilecfg reads: how many bytes a row of each tile has, and how many rows there are.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, nothing[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 and 1 are sums of the upper rows, 2 and 3 of the lower; 4 and 5 their activations, 6 and 7
// the weights.
void shape_tiles(int64_t upper, int64_t lower) {
  Shapes shapes;
  const int64_t rows[] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
    shapes.row_bytes[tile] = rows[tile] == 0 ? 0 : 64;
  }
  // The compiler believes that only the first of it is read.
  asm volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

// Nor does the compiler know what tiles are loaded from and stored to.
inline void finish_memory() { asm volatile("" : : : "memory"); }

// 32 rows at most times a panel; `kLower`: more than 16.
template <bool kLower>
void multiply_block(const uint8_t* a, int64_t row, const uint8_t* panel, int32_t* out,
                    int64_t ldo) {
  finish_memory();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kLower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < row; k += kDeep, panel += kDeep / 4 * kQuad) {
    _tile_loadd(4, a + k, row);
    _tile_loadd(6, panel, kQuad);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, panel + kQuad / 2, kQuad);
    _tile_dpbusd(1, 4, 7);
    if constexpr (kLower) {
      _tile_loadd(5, a + kTile * row + k, row);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
  }
  const int64_t bytes = 4 * ldo;
  _tile_stored(0, out, bytes);
  _tile_stored(1, out + kTile, bytes);
  if constexpr (kLower) {
    _tile_stored(2, out + kTile * ldo, bytes);
    _tile_stored(3, out + kTile * ldo + kTile, bytes);
  }
  finish_memory();
}

struct Tiles {
  static int64_t deep(const Problem& p) { return ceil_div(p.k, kDeep) * kDeep; }

  static bool supports(int, int) { return true; }
  static int32_t weight_offset(const Problem& p) { return half_range(p); }

  static int64_t weight_bytes(const Problem& p) { return Base::weight_bytes(p); }
  static void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
    Base::pack_weights(p, w, ldw, packed);
  }

  // Consecutive rows, each padded with zeros.
  static int64_t activation_bytes(const Problem& p) { return p.m * deep(p); }
  static void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
    const int64_t row = deep(p);
    for (int64_t i = 0; i < p.m; ++i, packed += row) {
      __builtin_memcpy(packed, a + i * lda, static_cast<size_t>(p.k));
      __builtin_memset(packed + p.k, 0, static_cast<size_t>(row - p.k));
    }
  }

  // A panel of weights as signed bytes, and sums of which not all columns are wanted.
  static int64_t panel_bytes(const Problem& p) { return deep(p) / 4 * kQuad; }
  static int64_t scratch_bytes(const Problem& p) { return panel_bytes(p) + 4 * kWide * kWide; }

  static void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                       int64_t first_column, int64_t last_column, uint8_t* scratch, int32_t* out,
                       int64_t ldo) {
    const int64_t column_bytes = blocks_of(p.k) * p.wbits * Vector::kBytes / Base::kColumns;
    for (int64_t j = first_column; j < last_column; j += kWide) {
      const int64_t columns = last_column - j < kWide ? last_column - j : kWide;
      with_width(p.wbits, [&](auto width) {
        Base::template expand<decltype(width)::value, kWide / Base::kColumns>(
            p, weights + j * column_bytes, ceil_div(columns, Base::kColumns), scratch);
      });
      const int64_t unpacked = blocks_of(p.k) * kBlock / 4 * kQuad;
      __builtin_memset(scratch + unpacked, 0, static_cast<size_t>(panel_bytes(p) - unpacked));
      multiply_panel(p, activations, scratch, columns, out + j - first_column, ldo);
    }
    _tile_release();
  }

  static void multiply_panel(const Problem& p, const uint8_t* a, uint8_t* panel, int64_t columns,
                             int32_t* out, int64_t ldo) {
    const int64_t row = deep(p);
    int32_t* whole = reinterpret_cast<int32_t*>(panel + panel_bytes(p));
    for (int64_t top = 0, shaped = 0; top < p.m; top += 2 * kTile) {
      const int64_t rows = p.m - top < 2 * kTile ? p.m - top : 2 * kTile;
      const int64_t upper = rows < kTile ? rows : kTile;
      if (rows != shaped) shape_tiles(upper, rows - upper);
      shaped = rows;
      int32_t* to = columns == kWide ? out + top * ldo : whole;
      const int64_t stride = columns == kWide ? ldo : kWide;
      const auto block = rows > kTile ? multiply_block<true> : multiply_block<false>;
      block(a + top * row, row, panel, to, stride);
      if (columns == kWide) continue;
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) out[(top + i) * ldo + j] = whole[i * kWide + j];
    }
  }
};

}  // namespace

extern const Kernel tiles_amx = kernel_of<Tiles>(
    "tiles", "amx", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AMX_INT8, kWide);

}  // namespace lowbit
}  // namespace slipstream
