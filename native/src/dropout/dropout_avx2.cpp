// AVX2: four blocks, one per 64-bit lane; a batch is two such halves.
//
// The multiplier reads only the lower half of a lane, so that a product is the next round's word as
// it is, and what is in the upper halves never matters.

#include <immintrin.h>

#include "dropout/philox.h"

namespace slipstream {
namespace dropout {
namespace {

struct Keys {
  __m256i first[kRounds], second[kRounds];

  explicit Keys(const Draw& draw) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      first[round] = _mm256_set1_epi64x(static_cast<uint32_t>(draw.key[0] + round * kWeyl0));
      second[round] = _mm256_set1_epi64x(static_cast<uint32_t>(draw.key[1] + round * kWeyl1));
    }
  }
};

// Sixteen numbers each, of four blocks: words 0 and 1, and words 2 and 3.
struct Numbers {
  __m256i lower, upper;
};

inline __m256i high(__m256i product) { return _mm256_srli_epi64(product, 32); }

inline __m256i joined(__m256i low, __m256i high) {
  return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA);
}

inline Numbers numbers(const Draw& draw, const Keys& keys, int64_t block) {
  const __m256i multiplier0 = _mm256_set1_epi64x(kMultiplier0);
  const __m256i multiplier1 = _mm256_set1_epi64x(kMultiplier1);
  __m256i word0 = _mm256_add_epi64(_mm256_set1_epi64x(block), _mm256_setr_epi64x(0, 1, 2, 3));
  __m256i word1 = high(word0);
  __m256i word2 = _mm256_set1_epi64x(draw.counter[0]);
  __m256i word3 = _mm256_set1_epi64x(draw.counter[1]);
  for (int round = 0; round < kRounds; ++round) {
    const __m256i product0 = _mm256_mul_epu32(word0, multiplier0);
    const __m256i product1 = _mm256_mul_epu32(word2, multiplier1);
    word0 = _mm256_xor_si256(_mm256_xor_si256(high(product1), word1), keys.first[round]);
    word2 = _mm256_xor_si256(_mm256_xor_si256(high(product0), word3), keys.second[round]);
    word1 = product1;
    word3 = product0;
  }
  return {joined(word0, word1), joined(word2, word3)};
}

// All bits of a 16-bit lane set where its element is above (or equal to) the threshold.
struct Lanes {
  __m256i part[4];
};

inline uint64_t bits(const Lanes& lanes) {
  uint64_t found = 0;
  for (int i = 0; i < 2; ++i) {
    // Packing interleaves the two operands' halves.
    const __m256i packed = _mm256_permute4x64_epi64(
        _mm256_packs_epi16(lanes.part[2 * i], lanes.part[2 * i + 1]), 0xD8);
    found |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(packed))) << (32 * i);
  }
  return found;
}

__attribute__((noinline)) void keep_equal(const Draw& draw, int64_t batch, const Lanes& equal,
                                          Lanes& keep) {
  const uint64_t more = kept_of_equal(draw, batch, bits(equal));
  for (int part = 0; part < 4; ++part) {
    alignas(32) int16_t lane[16];
    for (int i = 0; i < 16; ++i) lane[i] = more >> (16 * part + i) & 1 ? -1 : 0;
    keep.part[part] = _mm256_or_si256(
        keep.part[part], _mm256_load_si256(reinterpret_cast<const __m256i*>(lane)));
  }
}

inline Lanes kept(const Draw& draw, const Keys& keys, int64_t batch) {
  const Numbers one = numbers(draw, keys, batch * kBlocks);
  const Numbers two = numbers(draw, keys, batch * kBlocks + 4);
  const __m256i number[4] = {one.lower, two.lower, one.upper, two.upper};
  // Comparisons are of signed numbers.
  const __m256i sign = _mm256_set1_epi16(INT16_MIN);
  const __m256i threshold =
      _mm256_xor_si256(_mm256_set1_epi16(static_cast<int16_t>(draw.threshold >> 16)), sign);
  Lanes keep, equal;
  for (int part = 0; part < 4; ++part) {
    const __m256i compared = _mm256_xor_si256(number[part], sign);
    keep.part[part] = _mm256_cmpgt_epi16(compared, threshold);
    equal.part[part] = _mm256_cmpeq_epi16(compared, threshold);
  }
  const __m256i any = _mm256_or_si256(_mm256_or_si256(equal.part[0], equal.part[1]),
                                      _mm256_or_si256(equal.part[2], equal.part[3]));
  if (__builtin_expect(!_mm256_testz_si256(any, any), 0)) keep_equal(draw, batch, equal, keep);
  return keep;
}

inline void put(__m128i keep, __m256 scale, const float* x, float* y) {
  const __m256 lanes = _mm256_castsi256_ps(_mm256_cvtepi16_epi32(keep));
  _mm256_storeu_ps(y, _mm256_and_ps(_mm256_mul_ps(_mm256_loadu_ps(x), scale), lanes));
}

inline void put(__m128i keep, __m256 scale, const uint16_t* x, uint16_t* y) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16);
  const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(wide), scale));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  const __m256i sum = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m128i joined =
      _mm_packus_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm_and_si128(joined, keep));
}

template <typename T>
void whole(const Draw& draw, int64_t first, int64_t batches, const T* x, T* y) {
  const Keys keys(draw);
  const __m256 scale = _mm256_set1_ps(draw.scale);
  for (int64_t i = 0; i < batches; ++i, x += kBatch, y += kBatch) {
    fetch_ahead(x, y);
    const Lanes keep = kept(draw, keys, first + i);
    for (int part = 0; part < 4; ++part) {
      put(_mm256_castsi256_si128(keep.part[part]), scale, x + 16 * part, y + 16 * part);
      put(_mm256_extracti128_si256(keep.part[part], 1), scale, x + 16 * part + 8,
          y + 16 * part + 8);
    }
  }
}

}  // namespace

extern const Kernel dropout_avx2;
const Kernel dropout_avx2 = {"avx2", each_batch<float, whole<float>>,
                             each_batch<uint16_t, whole<uint16_t>>};

}  // namespace dropout
}  // namespace slipstream
