// What the two dense NEON kernels share: weights of W bits, unpacked to a block of bytes that stays
// in the first cache, and the walk over blocks. They differ in the tile that multiplies.
//
// 32 weights (8 columns x 4 k) lie without gaps in 4 W bytes. Fields are taken out of 16-bit lanes,
// because one of W bits may lie across two bytes: tbl brings both to a lane, ushl moves the field
// down, uzp1 drops the upper bytes, and clears what is left above.

#pragma once

#include <arm_neon.h>

#include "lowbit/dense_groups.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kColumns = 8;
constexpr int64_t kBytes = kColumns * kGroup;  // of a group when unpacked
constexpr int64_t kBlock = 256;                // groups unpacked at once: 8 KiB

inline int64_t groups_of(const Problem& p) { return divide_up(p.k, kGroup); }

inline bool supports(int, int) { return true; }

inline int32_t weight_offset(const Problem&) { return 0; }

inline int64_t panel_bytes(const Problem& p) { return groups_of(p) * kBytes / 8 * p.wbits; }

inline int64_t weight_bytes(const Problem& p) {
  return divide_up(p.n, kColumns) * panel_bytes(p);
}

inline void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  pack_weight_groups(p, kColumns, groups_of(p), 0, w, ldw, packed);
}

inline int64_t activation_bytes(const Problem& p) { return p.m * groups_of(p) * kGroup; }

inline int64_t scratch_bytes(const Problem&) { return kBlock * kBytes; }

inline void unpack(const uint8_t* packed, int wbits, int64_t groups, uint8_t* bytes) {
  uint8_t indices[16];
  int16_t shifts[8];
  for (int field = 0; field < 8; ++field) {
    indices[2 * field] = static_cast<uint8_t>(field * wbits / 8);
    indices[2 * field + 1] = static_cast<uint8_t>(field * wbits / 8 + 1);
    shifts[field] = static_cast<int16_t>(-(field * wbits % 8));
  }
  const uint8x16_t first = vld1q_u8(indices);
  const uint8x16_t second = vaddq_u8(first, vdupq_n_u8(static_cast<uint8_t>(wbits)));
  const int16x8_t down = vld1q_s16(shifts);
  const uint8x16_t mask = vdupq_n_u8(static_cast<uint8_t>((1 << wbits) - 1));
  const auto fields = [&](uint8x16_t packed_bytes, uint8x16_t which) {
    const uint16x8_t pairs = vreinterpretq_u16_u8(vqtbl1q_u8(packed_bytes, which));
    return vreinterpretq_u8_u16(vshlq_u16(pairs, down));
  };
  for (int64_t i = 0; i < 2 * groups; ++i, packed += 2 * wbits, bytes += 16) {
    const uint8x16_t sixteen = vld1q_u8(packed);
    vst1q_u8(bytes,
             vandq_u8(vuzp1q_u8(fields(sixteen, first), fields(sixteen, second)), mask));
  }
}

// A tile's row of sums to memory, or added to what an earlier block of k left there.
inline void store_sums(uint32x4_t left, uint32x4_t right, int64_t columns, bool more,
                       int32_t* out) {
  uint32_t sums[kColumns];
  vst1q_u32(sums, left);
  vst1q_u32(sums + 4, right);
  for (int64_t j = 0; j < kColumns && j < columns; ++j)
    out[j] = static_cast<int32_t>(sums[j] + (more ? static_cast<uint32_t>(out[j]) : 0));
}

// tile(rows, bytes, a, groups, columns, more, out): rows is a compile-time constant.
template <int TileRows, typename Tile>
inline void multiply_blocks(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                            int64_t first_column, int64_t last_column, uint8_t* scratch,
                            int32_t* out, int64_t ldo, const Tile& tile) {
  const int64_t groups = groups_of(p);
  const RowBlocks blocks(p.m, TileRows);
  for (int64_t j = first_column; j < last_column; j += kColumns) {
    const uint8_t* panel = weights + j / kColumns * panel_bytes(p);
    for (int64_t from = 0; from < groups; from += kBlock) {
      const int64_t count = groups - from < kBlock ? groups - from : kBlock;
      unpack(panel + from * kBytes / 8 * p.wbits, p.wbits, count, scratch);
      for (int64_t block = 0; block < blocks.count(); ++block) {
        const int64_t rows = blocks.rows(block), first = blocks.first(block);
        const uint8_t* a = activations + (first * groups + from * rows) * kGroup;
        with_constant<1, TileRows>(rows, [&](auto height) {
          tile(height, scratch, a, count, last_column - j, from > 0,
               out + first * ldo + j - first_column);
        });
      }
    }
  }
}

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
