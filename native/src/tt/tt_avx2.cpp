// AVX2 and FMA.

#include <immintrin.h>

#include <cstdint>

namespace slipstream {
namespace tt {
namespace {

struct Floats {
  static constexpr int64_t kWidth = 8;
  __m256 x;

  static Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Floats all(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* to) const { _mm256_storeu_ps(to, x); }
  Floats times_plus(Floats y, Floats z) const { return {_mm256_fmadd_ps(x, y.x, z.x)}; }

  // Of each half-vector: four columns of four rows as four rows.
  static void turn_fours(const Floats* from, __m256* rows) {
    const __m256 a = _mm256_unpacklo_ps(from[0].x, from[1].x);
    const __m256 b = _mm256_unpackhi_ps(from[0].x, from[1].x);
    const __m256 c = _mm256_unpacklo_ps(from[2].x, from[3].x);
    const __m256 d = _mm256_unpackhi_ps(from[2].x, from[3].x);
    rows[0] = _mm256_shuffle_ps(a, c, 0x44);
    rows[1] = _mm256_shuffle_ps(a, c, 0xEE);
    rows[2] = _mm256_shuffle_ps(b, d, 0x44);
    rows[3] = _mm256_shuffle_ps(b, d, 0xEE);
  }
  static void transpose(Floats* square) {
    __m256 upper[4], lower[4];
    turn_fours(square, upper);
    turn_fours(square + 4, lower);
    for (int i = 0; i < 4; ++i) {
      square[i].x = _mm256_permute2f128_ps(upper[i], lower[i], 0x20);
      square[i + 4].x = _mm256_permute2f128_ps(upper[i], lower[i], 0x31);
    }
  }
  // to[i * stride + c] = columns[c] at i.
  static void store_by_fours(const Floats* columns, float* to, int64_t stride) {
    __m256 rows[4];
    turn_fours(columns, rows);
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(to + i * stride, _mm256_castps256_ps128(rows[i]));
      _mm_storeu_ps(to + (i + 4) * stride, _mm256_extractf128_ps(rows[i], 1));
    }
  }
};

constexpr int kTileVectors = 2;

}  // namespace
}  // namespace tt
}  // namespace slipstream

#include "tt/products.h"

namespace slipstream {
namespace tt {

extern const Kernel tt_avx2;
const Kernel tt_avx2 = {"avx2", forward, backward, transpose, add};

}  // namespace tt
}  // namespace slipstream
