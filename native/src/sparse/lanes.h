// Vectors of the widest registers this file is compiled for, and what the kernels do with them.
//
// Everything is in an anonymous namespace: each instruction set has its own copy, and the
// linker cannot put an AVX-512 copy where another processor would run it.

#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "registers.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the "undefined" operand of its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace {

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  typedef float V __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(kVectorBytes)));
  static constexpr int width = kVectorBytes / 4;
  static constexpr int mantissa_bits = 23;
  static constexpr int32_t exponent_bias = 127;
  static constexpr int32_t one_bits = 0x3f800000;
  static constexpr int32_t mantissa_mask = 0x007fffff;
  static constexpr int32_t sign_mask = INT32_MIN;
  // Of the series of atanh(s), |s| <= 0.172: the first term left out is below 2^-24.
  static constexpr int log_terms = 5;
};

template <>
struct Lanes<double> {
  typedef double V __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(kVectorBytes)));
  static constexpr int width = kVectorBytes / 8;
  static constexpr int mantissa_bits = 52;
  static constexpr int64_t exponent_bias = 1023;
  static constexpr int64_t one_bits = 0x3ff0000000000000;
  static constexpr int64_t mantissa_mask = 0x000fffffffffffff;
  static constexpr int64_t sign_mask = INT64_MIN;
  static constexpr int log_terms = 11;
};

template <typename T>
using Vec = typename Lanes<T>::V;
template <typename T>
using Bits = typename Lanes<T>::I;

template <typename T>
inline Vec<T> load(const T* from) {
  return *reinterpret_cast<const typename Lanes<T>::Unaligned*>(from);
}

template <typename T>
inline void store(T* to, Vec<T> value) {
  *reinterpret_cast<typename Lanes<T>::Unaligned*>(to) = value;
}

template <typename T>
inline Vec<T> splat(T value) {
  return Vec<T>{} + value;
}

#if defined(__AVX512F__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
inline Vec<float> smaller(Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm512_min_ps((__m512)a, (__m512)b);
}
inline Vec<double> smaller(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm512_min_pd((__m512d)a, (__m512d)b);
}
inline Vec<float> larger(Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
}
inline Vec<double> larger(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b);
}
inline Vec<float> root(Vec<float> a) { return (Vec<float>)_mm512_sqrt_ps((__m512)a); }
inline Vec<double> root(Vec<double> a) { return (Vec<double>)_mm512_sqrt_pd((__m512d)a); }
// A division: an estimate to 14 bits and one step of Newton's on the quotient.
inline Vec<float> quotient(Vec<float> a, Vec<float> b) {
  const __m512 r = _mm512_rcp14_ps((__m512)b);
  const __m512 q = _mm512_mul_ps((__m512)a, r);
  return (Vec<float>)_mm512_fmadd_ps(_mm512_fnmadd_ps((__m512)b, q, (__m512)a), r, q);
}
inline bool any(Bits<float> m) { return _mm512_test_epi32_mask((__m512i)m, (__m512i)m) != 0; }
inline bool any(Bits<double> m) { return _mm512_test_epi64_mask((__m512i)m, (__m512i)m) != 0; }
// A bit for each lane of a comparison that holds, the first lane's lowest.
inline uint32_t lanes(Bits<float> m) { return _mm512_movepi32_mask((__m512i)m); }
inline uint32_t lanes(Bits<double> m) { return _mm512_movepi64_mask((__m512i)m); }
#elif defined(__AVX2__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
inline Vec<float> smaller(Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm256_min_ps((__m256)a, (__m256)b);
}
inline Vec<double> smaller(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm256_min_pd((__m256d)a, (__m256d)b);
}
inline Vec<float> larger(Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
}
inline Vec<double> larger(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b);
}
inline Vec<float> root(Vec<float> a) { return (Vec<float>)_mm256_sqrt_ps((__m256)a); }
inline Vec<double> root(Vec<double> a) { return (Vec<double>)_mm256_sqrt_pd((__m256d)a); }
inline Vec<float> quotient(Vec<float> a, Vec<float> b) { return a / b; }
inline bool any(Bits<float> m) { return !_mm256_testz_si256((__m256i)m, (__m256i)m); }
inline bool any(Bits<double> m) { return !_mm256_testz_si256((__m256i)m, (__m256i)m); }
inline uint32_t lanes(Bits<float> m) { return (uint32_t)_mm256_movemask_ps((__m256)m); }
inline uint32_t lanes(Bits<double> m) { return (uint32_t)_mm256_movemask_pd((__m256d)m); }
#else
template <typename V>
inline V fma(V a, V b, V c) {
  return a * b + c;
}
template <typename V>
inline V smaller(V a, V b) {
  return a < b ? a : b;
}
template <typename V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}
inline Vec<float> root(Vec<float> a) {
  for (int i = 0; i < Lanes<float>::width; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
inline Vec<double> root(Vec<double> a) {
  for (int i = 0; i < Lanes<double>::width; ++i) a[i] = __builtin_sqrt(a[i]);
  return a;
}
inline Vec<float> quotient(Vec<float> a, Vec<float> b) { return a / b; }
inline bool any(Bits<float> m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
inline bool any(Bits<double> m) { return (m[0] | m[1]) != 0; }
template <typename M>
inline uint32_t lanes(M m) {
  uint32_t bits = 0;
  for (size_t n = 0; n < sizeof m / sizeof m[0]; ++n) bits |= (uint32_t)(m[n] != 0) << n;
  return bits;
}
#endif
inline Vec<double> quotient(Vec<double> a, Vec<double> b) { return a / b; }

template <typename T>
inline Vec<T> magnitude(Vec<T> a) {
  return (Vec<T>)((Bits<T>)a & ~Lanes<T>::sign_mask);
}

// `value` where b is not zero, else zero.
#if defined(__AVX512F__)
template <typename T>
inline Vec<T> where_present(Vec<T> b, Vec<T> value);
template <>
inline Vec<float> where_present<float>(Vec<float> b, Vec<float> value) {
  const __mmask16 there = _mm512_cmp_ps_mask((__m512)b, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return (Vec<float>)_mm512_maskz_mov_ps(there, (__m512)value);
}
template <>
inline Vec<double> where_present<double>(Vec<double> b, Vec<double> value) {
  const __mmask8 there = _mm512_cmp_pd_mask((__m512d)b, _mm512_setzero_pd(), _CMP_NEQ_UQ);
  return (Vec<double>)_mm512_maskz_mov_pd(there, (__m512d)value);
}
#else
template <typename T>
inline Vec<T> where_present(Vec<T> b, Vec<T> value) {
  return (Vec<T>)((Bits<T>)value & (Bits<T>)(b != 0));
}
#endif

// The cube root of numbers that are not negative: a third of the exponent, then Newton's steps,
// each of which doubles the digits that are right; 0 stays 0.
template <typename T>
inline Vec<T> cube_root(Vec<T> x) {
  using L = Lanes<T>;
  const Bits<T> bits = (Bits<T>)x;
  const auto one = (T)1;
  // Bits are about the logarithm; a third of them, and two thirds of those of 1.
  const Vec<T> as_numbers = __builtin_convertvector(bits, Vec<T>);
  const Vec<T> third = as_numbers * (one / 3) + (T)(L::one_bits * 2.0 / 3);
  Vec<T> y = (Vec<T>)__builtin_convertvector(third, Bits<T>);
  for (int n = 0; n < (L::mantissa_bits > 23 ? 4 : 3); ++n)
    y = (y + y + x / (y * y)) * (one / 3);
  return where_present<T>(x, y);
}

// The natural logarithm of positive normal numbers, to an ulp or two.
template <typename T>
inline Vec<T> logarithm(Vec<T> x) {
  using L = Lanes<T>;
  Bits<T> bits = (Bits<T>)x;
  Bits<T> exponent = (bits >> L::mantissa_bits) - L::exponent_bias;
  Vec<T> m = (Vec<T>)((bits & L::mantissa_mask) | L::one_bits);  // 1 <= m < 2
  const Bits<T> upper = (Bits<T>)(m > (T)1.4142135623730951);
  m = (Vec<T>)((Bits<T>)m + (upper << L::mantissa_bits));  // halved where `upper`, which is -1
  exponent -= upper;
  const Vec<T> s = quotient(m - (T)1, m + (T)1);
  const Vec<T> z = s * s;
  Vec<T> series = splat<T>((T)(1.0 / (2 * L::log_terms - 1)));
  for (int k = L::log_terms - 1; k >= 1; --k)
    series = fma(series, z, splat<T>((T)(1.0 / (2 * k - 1))));
  const Vec<T> e = __builtin_convertvector(exponent, Vec<T>);
  return fma(e, splat<T>((T)0.6931471805599453), (s + s) * series);
}

}  // namespace
