// AVX-512.

#include <immintrin.h>

#include <cstdint>

namespace slipstream {
namespace robe {
namespace {

struct Floats {
  static constexpr int64_t kWidth = 16;
  __m512 x;

  static Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Floats all(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* to) const { _mm512_storeu_ps(to, x); }
  // Past the caches; to an address that is a multiple of the vector's size.
  void stream(float* to) const { _mm512_stream_ps(to, x); }
  // Before other threads may read streamed data.
  static void streamed() { _mm_sfence(); }
  Floats plus(Floats y) const { return {_mm512_add_ps(x, y.x)}; }
  Floats times(Floats y) const { return {_mm512_mul_ps(x, y.x)}; }
  // Of the two the second only where it is larger.
  Floats larger(Floats y) const { return {_mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(y.x, x, _CMP_GT_OQ), y.x)}; }
  Floats negated(uint64_t bits) const {
    const __m512i plain = _mm512_castps_si512(x), sign = _mm512_set1_epi32(INT32_MIN);
    const __mmask16 chosen = static_cast<__mmask16>(bits);
    return {_mm512_castsi512_ps(_mm512_mask_xor_epi32(plain, chosen, plain, sign))};
  }
};

}  // namespace
}  // namespace robe
}  // namespace slipstream

#include "robe/rows.h"

namespace slipstream {
namespace robe {

extern const Kernel robe_avx512bw;
const Kernel robe_avx512bw = {"avx512bw", forward, backward, weight_gradient_of};

}  // namespace robe
}  // namespace slipstream
