// AVX2 and FMA: 8 float32 or 4 float64 per vector.

#include <immintrin.h>


#include "scan/kernel.h"

namespace slipstream {
namespace scan {
namespace {

#include "scan/functions.inc"

struct Float32 {
  using T = float;
  using V = __m256;
  static constexpr int kWidth = 8, kColumns = 2;
  static V set1(T x) { return _mm256_set1_ps(x); }
  static V load(const T* p) { return _mm256_loadu_ps(p); }
  static V load(const T* p, int64_t n) { return n >= kWidth ? load(p) : _mm256_maskload_ps(p, mask(n)); }
  static void store(T* p, V x) { _mm256_storeu_ps(p, x); }
  static void store(T* p, V x, int64_t n) {
    if (n >= kWidth) store(p, x);
    else _mm256_maskstore_ps(p, mask(n), x);
  }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V minimum(V a, V b) { return _mm256_min_ps(a, b); }
  static V maximum(V a, V b) { return _mm256_max_ps(a, b); }
  static V rounded(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // What is not a number has no power, but stays so in x.
  static V times_power_of_two(V x, V n) {
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const V scaled = x * _mm256_castsi256_ps(power);
    return _mm256_blendv_ps(scaled, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static V where_small(V x, T bound, V yes, V no) {
    const V size = _mm256_andnot_ps(set1(-0.0f), x);
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(size, set1(bound), _CMP_LT_OQ));
  }
  static V where_positive(V y, V x) {
    return _mm256_and_ps(x, _mm256_cmp_ps(y, _mm256_setzero_ps(), _CMP_GT_OQ));
  }
  static V tanh(V x) { return tanh_of_exponential<Float32>(x); }
  static V logistic(V x) { return logistic_of_exponential<Float32>(x); }

 private:
  static __m256i mask(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

struct Float64 {
  using T = double;
  using V = __m256d;
  static constexpr int kWidth = 4, kColumns = 2;
  static V set1(T x) { return _mm256_set1_pd(x); }
  static V load(const T* p) { return _mm256_loadu_pd(p); }
  static V load(const T* p, int64_t n) { return n >= kWidth ? load(p) : _mm256_maskload_pd(p, mask(n)); }
  static void store(T* p, V x) { _mm256_storeu_pd(p, x); }
  static void store(T* p, V x, int64_t n) {
    if (n >= kWidth) store(p, x);
    else _mm256_maskstore_pd(p, mask(n), x);
  }
  static V fma(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
  static V maximum(V a, V b) { return _mm256_max_pd(a, b); }
  static V where_positive(V y, V x) {
    return _mm256_and_pd(x, _mm256_cmp_pd(y, _mm256_setzero_pd(), _CMP_GT_OQ));
  }

#include "scan/by_element.inc"

 private:
  static __m256i mask(int64_t n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
  }
};

#include "scan/cells.inc"

}  // namespace

extern const Kernel scan_avx2;
const Kernel scan_avx2 = {"avx2", precision<Float32>, precision<Float64>};

}  // namespace scan
}  // namespace slipstream
