// Dense W-bit weights on NEON with the dot product: udot, unsigned by unsigned, any W and A.

#include "lowbit/dense_neon.h"

#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int kTileRows = 8;  // x 2 registers of columns = 16 accumulators

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  pack_activation_groups(p, kTileRows, groups_of(p), a, lda, packed);
}

// udot takes its four activations from a lane, whose number must be a constant.
template <int Row, int Rows>
inline void add_rows(uint32x4_t (&sums)[Rows][2], uint8x16_t left, uint8x16_t right,
                     const uint8x16_t (&a)[(Rows + 3) / 4]) {
  sums[Row][0] = vdotq_laneq_u32(sums[Row][0], left, a[Row / 4], Row % 4);
  sums[Row][1] = vdotq_laneq_u32(sums[Row][1], right, a[Row / 4], Row % 4);
  if constexpr (Row + 1 < Rows) add_rows<Row + 1>(sums, left, right, a);
}

template <int Rows>
void multiply_tile(const uint8_t* w, const uint8_t* a, int64_t groups, int64_t columns, bool more,
                   int32_t* out, int64_t ldo) {
  constexpr int kQuads = (Rows + 3) / 4;
  uint32x4_t sums[Rows][2];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) sums[i][0] = sums[i][1] = vdupq_n_u32(0);
  for (int64_t group = 0; group < groups; ++group, w += kBytes, a += Rows * kGroup) {
    uint8x16_t quads[kQuads];  // the last may hold rows of the next group; they are not used
#pragma GCC unroll 2
    for (int q = 0; q < kQuads; ++q) quads[q] = vld1q_u8(a + 16 * q);
    add_rows<0>(sums, vld1q_u8(w), vld1q_u8(w + 16), quads);
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) store_sums(sums[i][0], sums[i][1], columns, more, out + i * ldo);
}

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t* scratch, int32_t* out,
              int64_t ldo) {
  multiply_blocks<kTileRows>(
      p, activations, weights, first_column, last_column, scratch, out, ldo,
      [&](auto rows, const uint8_t* w, const uint8_t* a, int64_t groups, int64_t columns, bool more,
          int32_t* to) { multiply_tile<rows()>(w, a, groups, columns, more, to, ldo); });
}

}  // namespace

extern const Kernel dense_neon_dotprod = {"dense",
                                          "neon_dotprod",
                                          SLIPSTREAM_CPU_NEON | SLIPSTREAM_CPU_DOTPROD,
                                          kColumns,
                                          supports,
                                          weight_offset,
                                          weight_bytes,
                                          pack_weights,
                                          activation_bytes,
                                          pack_activations,
                                          scratch_bytes,
                                          multiply};

}  // namespace lowbit
}  // namespace slipstream
