// AVX-512: 16 float32 or 8 float64 per vector.

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the intrinsics' own undefined operands for ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>


#include "scan/kernel.h"

namespace slipstream {
namespace scan {
namespace {

#include "scan/functions.inc"

struct Float32 {
  using T = float;
  using V = __m512;
  static constexpr int kWidth = 16, kColumns = 4;
  static V set1(T x) { return _mm512_set1_ps(x); }
  static V load(const T* p) { return _mm512_loadu_ps(p); }
  static V load(const T* p, int64_t n) {
    return n >= kWidth ? load(p) : _mm512_maskz_loadu_ps(mask(n), p);
  }
  static void store(T* p, V x) { _mm512_storeu_ps(p, x); }
  static void store(T* p, V x, int64_t n) {
    if (n >= kWidth) store(p, x);
    else _mm512_mask_storeu_ps(p, mask(n), x);
  }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V minimum(V a, V b) { return _mm512_min_ps(a, b); }
  static V maximum(V a, V b) { return _mm512_max_ps(a, b); }
  static V rounded(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V times_power_of_two(V x, V n) { return _mm512_scalef_ps(x, n); }
  static V where_small(V x, T bound, V yes, V no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(x), set1(bound), _CMP_LT_OQ), no, yes);
  }
  // y > 0 ? x : 0
  static V where_positive(V y, V x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_GT_OQ), x);
  }
  static V tanh(V x) { return tanh_of_exponential<Float32>(x); }
  static V logistic(V x) { return logistic_of_exponential<Float32>(x); }

 private:
  static __mmask16 mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
};

struct Float64 {
  using T = double;
  using V = __m512d;
  static constexpr int kWidth = 8, kColumns = 4;
  static V set1(T x) { return _mm512_set1_pd(x); }
  static V load(const T* p) { return _mm512_loadu_pd(p); }
  static V load(const T* p, int64_t n) {
    return n >= kWidth ? load(p) : _mm512_maskz_loadu_pd(mask(n), p);
  }
  static void store(T* p, V x) { _mm512_storeu_pd(p, x); }
  static void store(T* p, V x, int64_t n) {
    if (n >= kWidth) store(p, x);
    else _mm512_mask_storeu_pd(p, mask(n), x);
  }
  static V fma(V a, V b, V c) { return _mm512_fmadd_pd(a, b, c); }
  static V maximum(V a, V b) { return _mm512_max_pd(a, b); }
  static V where_positive(V y, V x) {
    return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(y, _mm512_setzero_pd(), _CMP_GT_OQ), x);
  }

#include "scan/by_element.inc"

 private:
  static __mmask8 mask(int64_t n) { return static_cast<__mmask8>((1u << n) - 1); }
};

#include "scan/cells.inc"

}  // namespace

extern const Kernel scan_avx512bw;
const Kernel scan_avx512bw = {"avx512bw", precision<Float32>, precision<Float64>};

}  // namespace scan
}  // namespace slipstream
