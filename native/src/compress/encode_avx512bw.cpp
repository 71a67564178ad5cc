// AVX-512 F, BW, DQ and VL: one register, and masks.

#include <immintrin.h>

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

SLIPSTREAM_INLINE uint16_t at_least(const Floats& a, const Floats& b) {
  return _mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_GE_OQ);
}

SLIPSTREAM_INLINE Floats choose(uint16_t bits, const Floats& plus, const Floats& minus) {
  return {{_mm512_mask_blend_ps(bits, minus.part[0], plus.part[0])}};
}

SLIPSTREAM_INLINE void put_bytes(const Ints& v, uint8_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v.part[0])));
}

SLIPSTREAM_INLINE Ints from_bytes(const uint8_t* bytes) {
  const __m128i whole = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return {{reinterpret_cast<IntPart>(_mm512_cvtepi8_epi32(whole))}};
}

}  // namespace
}  // namespace compress
}  // namespace slipstream

#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_avx512bw, "avx512bw")
