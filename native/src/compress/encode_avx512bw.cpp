// AVX-512 F, BW, DQ and VL: one register, and masks.

#include <immintrin.h>

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

inline uint16_t bits_of(const Floats& value) {
  return _mm512_cmp_ps_mask(reinterpret_cast<const __m512&>(value), _mm512_setzero_ps(),
                            _CMP_GE_OQ);
}
inline uint32_t above_of(const Floats& size, const Floats& least) {
  return _mm512_cmp_ps_mask(reinterpret_cast<const __m512&>(size),
                            reinterpret_cast<const __m512&>(least), _CMP_GE_OQ);
}
inline void choose(Floats& chosen, uint16_t bits, const Floats& plus, const Floats& minus) {
  reinterpret_cast<__m512&>(chosen) =
      _mm512_mask_blend_ps(bits, reinterpret_cast<const __m512&>(minus),
                           reinterpret_cast<const __m512&>(plus));
}

}  // namespace
}  // namespace compress
}  // namespace slipstream

#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_avx512bw, "avx512bw")
