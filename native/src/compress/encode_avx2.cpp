// AVX2: two registers of eight.

#include <immintrin.h>

#include "compress/choose.h"

namespace slipstream {
namespace compress {
namespace {

SLIPSTREAM_INLINE uint16_t at_least(const Floats& a, const Floats& b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.part[0], b.part[0], _CMP_GE_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.part[1], b.part[1], _CMP_GE_OQ));
  return static_cast<uint16_t>(low | high << 8);
}

SLIPSTREAM_INLINE void put_bytes(const Ints& v, uint8_t* out) {
  // What counts is the lowest byte of each; packing would saturate the rest.
  const Ints low = v & 0xFF;
  const __m256i pairs = _mm256_packus_epi32(reinterpret_cast<__m256i>(low.part[0]),
                                            reinterpret_cast<__m256i>(low.part[1]));
  // Halves of both registers alternate: 0-3, 8-11, 4-7, 12-15.
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0b11011000);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
}

SLIPSTREAM_INLINE Ints from_bytes(const uint8_t* bytes) {
  const __m128i whole = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return {{reinterpret_cast<IntPart>(_mm256_cvtepi8_epi32(whole)),
           reinterpret_cast<IntPart>(_mm256_cvtepi8_epi32(_mm_srli_si128(whole, 8)))}};
}

}  // namespace
}  // namespace compress
}  // namespace slipstream

#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_avx2, "avx2")
