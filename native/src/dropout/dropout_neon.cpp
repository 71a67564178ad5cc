// AArch64: four blocks, one per 32-bit lane; a batch is two such halves.

#include <arm_neon.h>

#include "dropout/philox.h"

namespace slipstream {
namespace dropout {
namespace {

struct Product {
  uint32x4_t low, high;
};

inline Product multiplied(uint32x4_t word, uint32_t by) {
  const uint64x2_t front = vmull_n_u32(vget_low_u32(word), by);
  const uint64x2_t back = vmull_high_n_u32(word, by);
  return {vuzp1q_u32(vreinterpretq_u32_u64(front), vreinterpretq_u32_u64(back)),
          vuzp2q_u32(vreinterpretq_u32_u64(front), vreinterpretq_u32_u64(back))};
}

inline uint32x4_t exclusive_or(uint32x4_t a, uint32x4_t b, uint32_t key) {
  return veorq_u32(veorq_u32(a, b), vdupq_n_u32(key));
}

// The 32 numbers of four blocks: two vectors of words 0 and 1, two of words 2 and 3.
inline void numbers(const Draw& draw, int64_t block, uint16x8_t lower[2], uint16x8_t upper[2]) {
  // Four blocks from a multiple of four on have the same upper half.
  const uint32_t iota[4] = {0, 1, 2, 3};
  const uint64_t first = static_cast<uint64_t>(block);
  uint32x4_t word0 = vaddq_u32(vdupq_n_u32(static_cast<uint32_t>(first)), vld1q_u32(iota));
  uint32x4_t word1 = vdupq_n_u32(static_cast<uint32_t>(first >> 32));
  uint32x4_t word2 = vdupq_n_u32(draw.counter[0]);
  uint32x4_t word3 = vdupq_n_u32(draw.counter[1]);
  for (uint32_t round = 0; round < kRounds; ++round) {
    const Product product0 = multiplied(word0, kMultiplier0);
    const Product product1 = multiplied(word2, kMultiplier1);
    word0 = exclusive_or(product1.high, word1, draw.key[0] + round * kWeyl0);
    word1 = product1.low;
    word2 = exclusive_or(product0.high, word3, draw.key[1] + round * kWeyl1);
    word3 = product0.low;
  }
  lower[0] = vreinterpretq_u16_u32(vzip1q_u32(word0, word1));
  lower[1] = vreinterpretq_u16_u32(vzip2q_u32(word0, word1));
  upper[0] = vreinterpretq_u16_u32(vzip1q_u32(word2, word3));
  upper[1] = vreinterpretq_u16_u32(vzip2q_u32(word2, word3));
}

// Eight elements each; all bits of a lane set where the element is kept.
struct Lanes {
  uint16x8_t part[8];
};

__attribute__((noinline)) void keep_equal(const Draw& draw, int64_t batch, const Lanes& equal,
                                          Lanes& keep) {
  uint16_t lane[kBatch];
  uint64_t bits = 0;
  for (int part = 0; part < 8; ++part) vst1q_u16(lane + 8 * part, equal.part[part]);
  for (int i = 0; i < kBatch; ++i) bits |= static_cast<uint64_t>(lane[i] & 1) << i;
  const uint64_t more = kept_of_equal(draw, batch, bits);
  for (int i = 0; i < kBatch; ++i) lane[i] = more >> i & 1 ? 0xFFFF : 0;
  for (int part = 0; part < 8; ++part)
    keep.part[part] = vorrq_u16(keep.part[part], vld1q_u16(lane + 8 * part));
}

inline Lanes kept(const Draw& draw, int64_t batch) {
  uint16x8_t number[8];
  numbers(draw, batch * kBlocks, number, number + 4);
  numbers(draw, batch * kBlocks + 4, number + 2, number + 6);
  const uint16x8_t threshold = vdupq_n_u16(static_cast<uint16_t>(draw.threshold >> 16));
  Lanes keep, equal;
  uint16x8_t any = vdupq_n_u16(0);
  for (int part = 0; part < 8; ++part) {
    keep.part[part] = vcgtq_u16(number[part], threshold);
    equal.part[part] = vceqq_u16(number[part], threshold);
    any = vorrq_u16(any, equal.part[part]);
  }
  if (__builtin_expect(vmaxvq_u16(any) != 0, 0)) keep_equal(draw, batch, equal, keep);
  return keep;
}

// Four lanes of 16 bits, widened with their sign: all bits or none.
inline uint32x4_t widened_lanes(uint16x4_t lanes) {
  return vreinterpretq_u32_s32(vmovl_s16(vreinterpret_s16_u16(lanes)));
}

inline void put(uint16x8_t keep, float scale, const float* x, float* y) {
  const uint32x4_t front = vreinterpretq_u32_f32(vmulq_n_f32(vld1q_f32(x), scale));
  const uint32x4_t back = vreinterpretq_u32_f32(vmulq_n_f32(vld1q_f32(x + 4), scale));
  const uint32x4_t front_kept = vandq_u32(front, widened_lanes(vget_low_u16(keep)));
  const uint32x4_t back_kept = vandq_u32(back, widened_lanes(vget_high_u16(keep)));
  vst1q_f32(y, vreinterpretq_f32_u32(front_kept));
  vst1q_f32(y + 4, vreinterpretq_f32_u32(back_kept));
}

inline uint16x4_t scaled(uint16x4_t x, float scale) {
  const float32x4_t wide = vreinterpretq_f32_u32(vshll_n_u16(x, 16));
  const uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(wide, scale));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
}

inline void put(uint16x8_t keep, float scale, const uint16_t* x, uint16_t* y) {
  const uint16x8_t value = vld1q_u16(x);
  const uint16x8_t product =
      vcombine_u16(scaled(vget_low_u16(value), scale), scaled(vget_high_u16(value), scale));
  vst1q_u16(y, vandq_u16(product, keep));
}

template <typename T>
void whole(const Draw& draw, int64_t first, int64_t batches, const T* x, T* y) {
  for (int64_t i = 0; i < batches; ++i, x += kBatch, y += kBatch) {
    const Lanes keep = kept(draw, first + i);
    for (int part = 0; part < 8; ++part) put(keep.part[part], draw.scale, x + 8 * part, y + 8 * part);
  }
}

}  // namespace

extern const Kernel dropout_neon;
const Kernel dropout_neon = {"neon", each_batch<float, whole<float>>,
                             each_batch<uint16_t, whole<uint16_t>>};

}  // namespace dropout
}  // namespace slipstream
