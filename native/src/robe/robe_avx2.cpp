// AVX2.

#include <immintrin.h>

#include <cstdint>

namespace slipstream {
namespace robe {
namespace {

struct Floats {
  static constexpr int64_t kWidth = 8;
  __m256 x;

  static Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Floats all(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* to) const { _mm256_storeu_ps(to, x); }
  // Past the caches; to an address that is a multiple of the vector's size.
  void stream(float* to) const { _mm256_stream_ps(to, x); }
  // Before other threads may read streamed data.
  static void streamed() { _mm_sfence(); }
  Floats plus(Floats y) const { return {_mm256_add_ps(x, y.x)}; }
  Floats times(Floats y) const { return {_mm256_mul_ps(x, y.x)}; }
  // Of the two the second only where it is larger.
  Floats larger(Floats y) const { return {_mm256_max_ps(y.x, x)}; }
  Floats negated(uint64_t bits) const {
    const __m256i places = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i moved = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), places);
    const __m256i sign = _mm256_and_si256(moved, _mm256_set1_epi32(INT32_MIN));
    return {_mm256_xor_ps(x, _mm256_castsi256_ps(sign))};
  }
};

}  // namespace
}  // namespace robe
}  // namespace slipstream

#include "robe/rows.h"

namespace slipstream {
namespace robe {

extern const Kernel robe_avx2;
const Kernel robe_avx2 = {"avx2", forward, backward, weight_gradient_of};

}  // namespace robe
}  // namespace slipstream
