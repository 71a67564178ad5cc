// AVX-512 F, BW, DQ and VL: eight blocks, one per 64-bit lane.
//
// The multiplier reads only the lower half of a lane, so that a product is the next round's word as
// it is, and what is in the upper halves never matters.

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the intrinsics' own undefined operands for ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "dropout/philox.h"

namespace slipstream {
namespace dropout {
namespace {

struct Keys {
  __m512i first[kRounds], second[kRounds];

  explicit Keys(const Draw& draw) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      first[round] = _mm512_set1_epi64(static_cast<uint32_t>(draw.key[0] + round * kWeyl0));
      second[round] = _mm512_set1_epi64(static_cast<uint32_t>(draw.key[1] + round * kWeyl1));
    }
  }
};

struct Kept {
  __mmask32 lower, upper;  // elements 0 to 31 of the batch, and 32 to 63
};

// Of two ways to move a lane's upper half down, one for each port.
inline __m512i high_by_shift(__m512i product) { return _mm512_srli_epi64(product, 32); }
inline __m512i high_by_shuffle(__m512i product) {
  return _mm512_castps_si512(_mm512_movehdup_ps(_mm512_castsi512_ps(product)));
}

inline __m512i exclusive_or(__m512i a, __m512i b, __m512i c) {
  return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

// Two words in each lane: `low` in its lower half, the lower half of `high` in its upper.
inline __m512i joined(__m512i low, __m512i high) {
  return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(high, 32));
}

inline Kept kept(const Draw& draw, const Keys& keys, int64_t batch) {
  const __m512i multiplier0 = _mm512_set1_epi64(kMultiplier0);
  const __m512i multiplier1 = _mm512_set1_epi64(kMultiplier1);
  __m512i word0 = _mm512_add_epi64(_mm512_set1_epi64(batch * kBlocks),
                                   _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  __m512i word1 = _mm512_srli_epi64(word0, 32);
  __m512i word2 = _mm512_set1_epi64(draw.counter[0]);
  __m512i word3 = _mm512_set1_epi64(draw.counter[1]);
  for (int round = 0; round < kRounds; ++round) {
    const __m512i product0 = _mm512_mul_epu32(word0, multiplier0);
    const __m512i product1 = _mm512_mul_epu32(word2, multiplier1);
    word0 = exclusive_or(high_by_shuffle(product1), word1, keys.first[round]);
    word2 = exclusive_or(high_by_shift(product0), word3, keys.second[round]);
    word1 = product1;
    word3 = product0;
  }
  const __m512i lower = joined(word0, word1), upper = joined(word2, word3);
  const __m512i threshold = _mm512_set1_epi16(static_cast<int16_t>(draw.threshold >> 16));
  Kept keep = {_mm512_cmpgt_epu16_mask(lower, threshold), _mm512_cmpgt_epu16_mask(upper, threshold)};
  const __mmask32 equal_lower = _mm512_cmpeq_epi16_mask(lower, threshold);
  const __mmask32 equal_upper = _mm512_cmpeq_epi16_mask(upper, threshold);
  if (__builtin_expect(!_kortestz_mask32_u8(equal_lower, equal_upper), 0)) {
    const uint64_t more =
        kept_of_equal(draw, batch, equal_lower | static_cast<uint64_t>(equal_upper) << 32);
    keep.lower |= static_cast<__mmask32>(more);
    keep.upper |= static_cast<__mmask32>(more >> 32);
  }
  return keep;
}

inline void put(__mmask16 keep, __m512 scale, const float* x, float* y) {
  _mm512_storeu_ps(y, _mm512_maskz_mul_ps(keep, _mm512_loadu_ps(x), scale));
}

inline void put(__mmask16 keep, __m512 scale, const uint16_t* x, uint16_t* y) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
  const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(wide), scale));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  const __m512i sum = _mm512_maskz_add_epi32(keep, bits, half);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
}

template <typename T>
void whole(const Draw& draw, int64_t first, int64_t batches, const T* x, T* y) {
  const Keys keys(draw);
  const __m512 scale = _mm512_set1_ps(draw.scale);
  for (int64_t i = 0; i < batches; ++i, x += kBatch, y += kBatch) {
    fetch_ahead(x, y);
    const Kept keep = kept(draw, keys, first + i);
    put(static_cast<__mmask16>(keep.lower), scale, x, y);
    put(static_cast<__mmask16>(_kshiftri_mask32(keep.lower, 16)), scale, x + 16, y + 16);
    put(static_cast<__mmask16>(keep.upper), scale, x + 32, y + 32);
    put(static_cast<__mmask16>(_kshiftri_mask32(keep.upper, 16)), scale, x + 48, y + 48);
  }
}

}  // namespace

extern const Kernel dropout_avx512bw;
const Kernel dropout_avx512bw = {"avx512bw", each_batch<float, whole<float>>,
                                 each_batch<uint16_t, whole<uint16_t>>};

}  // namespace dropout
}  // namespace slipstream
