// Dense W-bit weights on NEON without the dot product: umlal of bytes to 16-bit lanes.
//
// A lane adds one product for each group of four k, so that floor(65535 / most product) groups fit
// before uadalp moves pairs of lanes into 32 bits: 1337 groups for W3A3, one for W8A8.

#include "lowbit/dense_neon.h"

#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int kTileRows = 3;  // x 4 registers of 16-bit and 4 of 32-bit sums = 24 of 32

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  pack_activation_groups(p, kTileRows, groups_of(p), a, lda, packed);
}

template <int Rows>
void multiply_tile(const uint8_t* w, const uint8_t* a, int64_t groups, int64_t depth,
                   int64_t columns, bool more, int32_t* out, int64_t ldo) {
  uint32x4_t sums[Rows][4];
#pragma GCC unroll 3
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) sums[i][q] = vdupq_n_u32(0);
  for (int64_t from = 0; from < groups; from += depth) {
    const int64_t end = groups - from < depth ? groups : from + depth;
    uint16x8_t narrow[Rows][4];
#pragma GCC unroll 3
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) narrow[i][q] = vdupq_n_u16(0);
    for (int64_t group = from; group < end; ++group, w += kBytes) {
      const uint8x16_t left = vld1q_u8(w), right = vld1q_u8(w + 16);
#pragma GCC unroll 3
      for (int i = 0; i < Rows; ++i, a += kGroup) {
        uint32_t four;
        std::memcpy(&four, a, 4);
        const uint8x16_t x = vreinterpretq_u8_u32(vdupq_n_u32(four));
        narrow[i][0] = vmlal_u8(narrow[i][0], vget_low_u8(left), vget_low_u8(x));
        narrow[i][1] = vmlal_high_u8(narrow[i][1], left, x);
        narrow[i][2] = vmlal_u8(narrow[i][2], vget_low_u8(right), vget_low_u8(x));
        narrow[i][3] = vmlal_high_u8(narrow[i][3], right, x);
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) sums[i][q] = vpadalq_u16(sums[i][q], narrow[i][q]);
  }
#pragma GCC unroll 3
  for (int i = 0; i < Rows; ++i)
    store_sums(vpaddq_u32(sums[i][0], sums[i][1]), vpaddq_u32(sums[i][2], sums[i][3]), columns,
               more, out + i * ldo);
}

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t* scratch, int32_t* out,
              int64_t ldo) {
  const int64_t depth = 65535 / (((1 << p.wbits) - 1) * ((1 << p.abits) - 1));
  multiply_blocks<kTileRows>(
      p, activations, weights, first_column, last_column, scratch, out, ldo,
      [&](auto rows, const uint8_t* w, const uint8_t* a, int64_t groups, int64_t columns, bool more,
          int32_t* to) { multiply_tile<rows()>(w, a, groups, depth, columns, more, to, ldo); });
}

}  // namespace

extern const Kernel dense_neon = {
    "dense",      "neon",       SLIPSTREAM_CPU_NEON, kColumns,      supports, weight_offset,
    weight_bytes, pack_weights, activation_bytes,    pack_activations,
    scratch_bytes, multiply};

}  // namespace lowbit
}  // namespace slipstream
