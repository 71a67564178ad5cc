// AVX2: two registers of eight.

#include <immintrin.h>

#include "compress/choose.h"

namespace slipstream {
namespace compress {
namespace {

inline __m256 low(const Floats& v) { return _mm256_loadu_ps(reinterpret_cast<const float*>(&v)); }
inline __m256 high(const Floats& v) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(&v) + 8);
}
inline uint32_t at_least(const Floats& a, const Floats& b) {
  const int first = _mm256_movemask_ps(_mm256_cmp_ps(low(a), low(b), _CMP_GE_OQ));
  const int second = _mm256_movemask_ps(_mm256_cmp_ps(high(a), high(b), _CMP_GE_OQ));
  return static_cast<uint32_t>(first | second << 8);
}

inline uint16_t bits_of(const Floats& value) {
  return static_cast<uint16_t>(at_least(value, Floats{}));
}
inline uint32_t above_of(const Floats& size, const Floats& least) { return at_least(size, least); }

}  // namespace
}  // namespace compress
}  // namespace slipstream

#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_avx2, "avx2")
