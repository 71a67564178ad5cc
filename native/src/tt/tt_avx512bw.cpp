// AVX-512.

#include <immintrin.h>

#include <cstdint>

namespace slipstream {
namespace tt {
namespace {

struct Floats {
  static constexpr int64_t kWidth = 16;
  __m512 x;

  static Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Floats all(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* to) const { _mm512_storeu_ps(to, x); }
  Floats times_plus(Floats y, Floats z) const { return {_mm512_fmadd_ps(x, y.x, z.x)}; }

  // Of each quarter-vector: four columns of four rows as four rows.
  static void turn_fours(const Floats* from, __m512* rows) {
    const __m512 a = _mm512_unpacklo_ps(from[0].x, from[1].x);
    const __m512 b = _mm512_unpackhi_ps(from[0].x, from[1].x);
    const __m512 c = _mm512_unpacklo_ps(from[2].x, from[3].x);
    const __m512 d = _mm512_unpackhi_ps(from[2].x, from[3].x);
    rows[0] = _mm512_shuffle_ps(a, c, 0x44);
    rows[1] = _mm512_shuffle_ps(a, c, 0xEE);
    rows[2] = _mm512_shuffle_ps(b, d, 0x44);
    rows[3] = _mm512_shuffle_ps(b, d, 0xEE);
  }
  // Quarters of four vectors, as rows and columns, exchanged.
  static void turn_quarters(__m512 a, __m512 b, __m512 c, __m512 d, __m512* rows) {
    const __m512 e = _mm512_shuffle_f32x4(a, b, 0x44), f = _mm512_shuffle_f32x4(c, d, 0x44);
    const __m512 g = _mm512_shuffle_f32x4(a, b, 0xEE), h = _mm512_shuffle_f32x4(c, d, 0xEE);
    rows[0] = _mm512_shuffle_f32x4(e, f, 0x88);
    rows[1] = _mm512_shuffle_f32x4(e, f, 0xDD);
    rows[2] = _mm512_shuffle_f32x4(g, h, 0x88);
    rows[3] = _mm512_shuffle_f32x4(g, h, 0xDD);
  }
  static void transpose(Floats* square) {
    __m512 fours[4][4];
    for (int i = 0; i < 4; ++i) turn_fours(square + 4 * i, fours[i]);
    for (int i = 0; i < 4; ++i) {
      __m512 rows[4];
      turn_quarters(fours[0][i], fours[1][i], fours[2][i], fours[3][i], rows);
      for (int j = 0; j < 4; ++j) square[4 * j + i].x = rows[j];
    }
  }
  // to[i * stride + c] = columns[c] at i.
  static void store_by_fours(const Floats* columns, float* to, int64_t stride) {
    __m512 rows[4];
    turn_fours(columns, rows);
    if (stride == 4) {
      __m512 whole[4];
      turn_quarters(rows[0], rows[1], rows[2], rows[3], whole);
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(to + 16 * i, whole[i]);
      return;
    }
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(to + i * stride, _mm512_castps512_ps128(rows[i]));
      _mm_storeu_ps(to + (i + 4) * stride, _mm512_extractf32x4_ps(rows[i], 1));
      _mm_storeu_ps(to + (i + 8) * stride, _mm512_extractf32x4_ps(rows[i], 2));
      _mm_storeu_ps(to + (i + 12) * stride, _mm512_extractf32x4_ps(rows[i], 3));
    }
  }
};

constexpr int kTileVectors = 4;

}  // namespace
}  // namespace tt
}  // namespace slipstream

#include "tt/products.h"

namespace slipstream {
namespace tt {

extern const Kernel tt_avx512bw;
const Kernel tt_avx512bw = {"avx512bw", forward, backward, transpose, add};

}  // namespace tt
}  // namespace slipstream
