// ULPPACK's scheme P1 on NEON (Won et al., "ULPPACK: Fast Sub-8-bit Matrix Multiply on Commodity SIMD
// Hardware", MLSys 2022): two products in one 16-bit multiplication.
//
// With a = a0 + a1 2^8 and w = w1 + w0 2^8, the middle of a w = a0 w1 + (a0 w0 + a1 w1) 2^8 + ... is
// two useful products, and a 16-bit lane drops what is above. `depth` such words are added by mla
// before usra moves the upper halves to an outer sum of 16 bits. Unlike the published kernels, which
// keep that sum over the whole of k, it is moved on to 32 bits before it can overflow.

#include <arm_neon.h>

#include <cstring>

#include "lowbit/kernel.h"
#include "lowbit/tiling.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kColumns = 8;  // 16-bit lanes of a register
constexpr int kTileRows = 4;

constexpr int most_of_pair(int wbits, int abits) {
  return 2 * ((1 << wbits) - 1) * ((1 << abits) - 1);
}

// Words that a lane may add: the largest of 8, 4, 2, 1 that fits 8 bits, or 0.
constexpr int depth_of(int wbits, int abits) {
  int depth = 8;
  while (depth > 0 && most_of_pair(wbits, abits) * depth > 255) depth /= 2;
  return depth;
}
static_assert(depth_of(1, 1) == 8 && depth_of(2, 2) == 8 && depth_of(3, 2) == 4, "as published");
static_assert(depth_of(3, 3) == 2 && depth_of(4, 3) == 1 && depth_of(4, 4) == 0, "as published");

int64_t words_of(const Problem& p) {
  return round_up(divide_up(p.k, 2), depth_of(p.wbits, p.abits));
}

bool supports(int wbits, int abits) { return depth_of(wbits, abits) > 0; }

int32_t weight_offset(const Problem&) { return 0; }

// Panels of [word][column].
int64_t weight_bytes(const Problem& p) { return round_up(p.n, kColumns) * words_of(p) * 2; }

void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  std::memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
  for (int64_t j = 0; j < p.n; ++j) {
    uint8_t* column = packed + (j / kColumns * kColumns * words_of(p) + j % kColumns) * 2;
    for (int64_t k = 0; k < p.k; ++k) column[k / 2 * kColumns * 2 + (k % 2 == 0)] = w[j * ldw + k];
  }
}

// Blocks of rows, each [word][row].
int64_t activation_bytes(const Problem& p) { return p.m * words_of(p) * 2; }

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  const int64_t words = words_of(p);
  const RowBlocks blocks(p.m, kTileRows);
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t rows = blocks.rows(block), first = blocks.first(block);
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t* row = a + (first + i) * lda;
      uint8_t* to = packed + (first * words + i) * 2;
      for (int64_t word = 0; word < words; ++word, to += rows * 2) {
        to[0] = 2 * word < p.k ? row[2 * word] : 0;
        to[1] = 2 * word + 1 < p.k ? row[2 * word + 1] : 0;
      }
    }
  }
}

template <int Row, int Rows>
inline void add_rows(uint16x8_t (&words)[Rows], uint16x8_t w, uint16x4_t a) {
  words[Row] = vmlaq_lane_u16(words[Row], w, a, Row);
  if constexpr (Row + 1 < Rows) add_rows<Row + 1>(words, w, a);
}

inline uint16x4_t load_rows(const uint8_t* a) {
  uint16x4_t rows = vreinterpret_u16_u8(vld1_u8(a));
  asm("" : "+w"(rows));  // or GCC loads every lane for itself
  return rows;
}

template <int Rows, int Depth>
void multiply_tile(const uint8_t* w, const uint8_t* a, int64_t words, int64_t outer_depth,
                   int64_t columns, int32_t* out, int64_t ldo) {
  uint32x4_t sums[Rows][2];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) sums[i][0] = sums[i][1] = vdupq_n_u32(0);
  for (int64_t from = 0; from < words; from += outer_depth) {
    const int64_t count = words - from < outer_depth ? words - from : outer_depth;
    uint16x8_t outer[Rows];
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) outer[i] = vdupq_n_u16(0);
    for (int64_t word = 0; word < count; word += Depth) {
      uint16x8_t inner[Rows];
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) inner[i] = vdupq_n_u16(0);
#pragma GCC unroll 8
      for (int d = 0; d < Depth; ++d, w += kColumns * 2, a += Rows * 2)
        add_rows<0>(inner, vreinterpretq_u16_u8(vld1q_u8(w)), load_rows(a));
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) outer[i] = vsraq_n_u16(outer[i], inner[i], 8);
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      sums[i][0] = vaddw_u16(sums[i][0], vget_low_u16(outer[i]));
      sums[i][1] = vaddw_high_u16(sums[i][1], outer[i]);
    }
  }
  for (int i = 0; i < Rows; ++i) {
    uint32_t row[kColumns];
    vst1q_u32(row, sums[i][0]);
    vst1q_u32(row + 4, sums[i][1]);
    for (int64_t j = 0; j < kColumns && j < columns; ++j)
      out[i * ldo + j] = static_cast<int32_t>(row[j]);
  }
}

int64_t scratch_bytes(const Problem&) { return 0; }

template <int Depth>
void multiply_at_depth(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                       int64_t first_column, int64_t last_column, int32_t* out, int64_t ldo) {
  const int64_t words = words_of(p);
  const int64_t outer_depth = 65535 / most_of_pair(p.wbits, p.abits) / Depth * Depth;
  const RowBlocks blocks(p.m, kTileRows);
  for (int64_t j = first_column; j < last_column; j += kColumns) {
    for (int64_t block = 0; block < blocks.count(); ++block) {
      const int64_t first = blocks.first(block);
      with_constant<1, kTileRows>(blocks.rows(block), [&](auto rows) {
        multiply_tile<rows(), Depth>(weights + j * words * 2, activations + first * words * 2,
                                     words, outer_depth, last_column - j,
                                     out + first * ldo + j - first_column, ldo);
      });
    }
  }
}

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t*, int32_t* out, int64_t ldo) {
  const int depth = depth_of(p.wbits, p.abits);
  const auto at_depth = depth == 8   ? multiply_at_depth<8>
                        : depth == 4 ? multiply_at_depth<4>
                        : depth == 2 ? multiply_at_depth<2>
                                     : multiply_at_depth<1>;
  at_depth(p, activations, weights, first_column, last_column, out, ldo);
}

}  // namespace

extern const Kernel ulppack_neon = {
    "ulppack",    "neon",       SLIPSTREAM_CPU_NEON, kColumns,      supports, weight_offset,
    weight_bytes, pack_weights, activation_bytes,    pack_activations,
    scratch_bytes, multiply};

}  // namespace lowbit
}  // namespace slipstream
