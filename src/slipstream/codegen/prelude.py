"""Prelude of generated C++ sources: memory access, elementwise functions, random numbers.

The functions for float are branch-free, so that compilers can vectorise them, and use polynomials
fitted for this package, accurate to 1 or 2 ulp (exp), 2e-7 (tanh) and 4e-7 (erf). Those for double
call the C library. Random numbers are identical to those of the operator ``slipstream::dropout``.
Library functions are called as compiler builtins, since parsing the headers took a quarter of the
compile time of a kernel.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import functools

import numpy as np


@functools.lru_cache(maxsize=256)
def threshold_and_scale(p: float) -> tuple[int, np.float32]:
    """Return the number of 2^32 random values that drop an element, and the scale of the others.

    At least one value retains the element. The scale is 1 / (1 - p) in float32, as in torch.
    """
    return min(round(p * 2.0**32), 2**32 - 1), np.float32(1) / np.float32(1.0 - p)


PRELUDE = r"""
#include <stdint.h>

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
// Or a loop that calls one of several users' functions is no vector loop.
#define INLINE inline __attribute__((always_inline))
#define f_where(condition, yes, no) ((condition) ? (yes) : (no))

namespace {

using i64 = int64_t;
using u32 = uint32_t;
using u64 = uint64_t;
struct bf16 { uint16_t bits; };

INLINE float get(const float* p, i64 i) { return p[i]; }
INLINE double get(const double* p, i64 i) { return p[i]; }
INLINE float get(const uint8_t* p, i64 i) { return static_cast<float>(p[i]); }
INLINE float get(const bf16* p, i64 i) {
  const u32 wide = static_cast<u32>(p[i].bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}
INLINE void put(float* p, i64 i, float v) { p[i] = v; }
INLINE void put(double* p, i64 i, double v) { p[i] = v; }
INLINE void put(float* p, i64 i, double v) { p[i] = static_cast<float>(v); }
template <typename T> INLINE void put(uint8_t* p, i64 i, T v) { p[i] = v != T(0); }
INLINE void put(bf16* p, i64 i, float v) {
  u32 bits;
  __builtin_memcpy(&bits, &v, 4);
  const u32 up = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  // What is not a number stays one: rounding could carry it into infinity.
  p[i].bits = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : up);
}

INLINE float f_exp(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  const float turns = clamped * 1.44269504f;
  // To the nearest integer: beyond 2^23 a float has no fraction left.
  const float whole = (turns + 12582912.0f) - 12582912.0f;
  float r = clamped - whole * 0.693359375f;
  r += whole * 2.12194440e-4f;
  float p = 1.9841270e-4f;
  p = p * r + 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t power = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &power, 4);
  const float value = p * scale;
  return x < -87.3f ? 0.0f : (x > 88.7f ? __builtin_inff() : value);
}
// A quotient of polynomials of the square, without exp; 1 to within a rounding where it is cut off.
INLINE float f_erf(float x) {
  const float clamped = x < -3.92f ? -3.92f : (x > 3.92f ? 3.92f : x);
  const float u = clamped * clamped;
  float p = 2.025949322605411e-6f;
  p = p * u + 2.846851773912206e-4f;
  p = p * u + 3.8080021642764995e-3f;
  p = p * u + 5.287494990678828e-2f;
  p = p * u + 1.915464472609668e-1f;
  p = p * u + 1.1283791438052082f;
  float q = 3.7832100428000754e-5f;
  q = q * u + 1.1706892348066487e-3f;
  q = q * u + 1.505476677700066e-2f;
  q = q * u + 1.1455804027041684e-1f;
  q = q * u + 5.030862953128891e-1f;
  q = q * u + 1.0f;
  const float value = clamped * p / q;
  return value < -1.0f ? -1.0f : (value > 1.0f ? 1.0f : value);
}
INLINE float f_tanh(float x) {
  const float u = x * x;
  float p = 2.102294936776161e-3f;
  p = p * u - 8.130431175231934e-3f;
  p = p * u + 2.1680133417248726e-2f;
  p = p * u - 5.3942520171403885e-2f;
  p = p * u + 1.3333164155483246e-1f;
  p = p * u - 3.33333283662796e-1f;
  p = p * u + 1.0f;
  const float far = 1.0f - 2.0f / (f_exp(2.0f * x) + 1.0f);
  return u < 0.4f ? x * p : far;
}
INLINE float f_log(float x) { return __builtin_logf(x); }
INLINE float f_sqrt(float x) { return __builtin_sqrtf(x); }
INLINE double f_exp(double x) { return __builtin_exp(x); }
INLINE double f_erf(double x) { return __builtin_erf(x); }
INLINE double f_tanh(double x) { return __builtin_tanh(x); }
INLINE double f_log(double x) { return __builtin_log(x); }
INLINE double f_sqrt(double x) { return __builtin_sqrt(x); }
template <typename T> INLINE T f_max(T a, T b) { return a > b || a != a ? a : b; }
template <typename T> INLINE T f_min(T a, T b) { return a < b || a != a ? a : b; }

// The product, or 0 where the factor is: also of what is infinite. By bits, since a compiler would
// compute the value only where it is kept, in a branch.
INLINE float keep(float x, float factor) {
  const float product = x * factor;
  u32 bits;
  __builtin_memcpy(&bits, &product, 4);
  bits &= factor != 0.0f ? 0xFFFFFFFFu : 0u;
  float kept;
  __builtin_memcpy(&kept, &bits, 4);
  return kept;
}
INLINE double keep(double x, double factor) { return factor != 0.0 ? x * factor : 0.0; }

// Asks for the memory of `count` elements that come a page later: a loop that computes much for
// each line is too slow for a processor's own prefetching. Addresses beyond an array do no harm.
template <typename T> INLINE void ahead(const T* p, i64 count) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(p) + 4096;
  for (uintptr_t at = 0; at < static_cast<uintptr_t>(count) * sizeof(T); at += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(begin + at));
}

constexpr int kRounds = 7;

// Eight blocks of Philox 4x32 from block `first` on: words of each block in lanes of 64 bits.
INLINE void philox_eight(const u64* seed, u64 first, u64 word[4][8]) {
  for (int i = 0; i < 8; ++i) {
    word[0][i] = (first + static_cast<u64>(i)) & 0xFFFFFFFFu;
    word[1][i] = (first + static_cast<u64>(i)) >> 32;
    word[2][i] = seed[1] & 0xFFFFFFFFu;
    word[3][i] = seed[1] >> 32;
  }
  u32 key0 = static_cast<u32>(seed[0]), key1 = static_cast<u32>(seed[0] >> 32);
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC ivdep
    for (int i = 0; i < 8; ++i) {
      const u64 one = word[0][i] * 0xD2511F53u, two = word[2][i] * 0xCD9E8D57u;
      const u64 a = (two >> 32) ^ word[1][i] ^ key0, c = (one >> 32) ^ word[3][i] ^ key1;
      word[1][i] = two & 0xFFFFFFFFu;
      word[3][i] = one & 0xFFFFFFFFu;
      word[0][i] = a;
      word[2][i] = c;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// Whether a number equal to the threshold's upper half keeps its element: 16 more bits decide.
inline bool keeps_equal(const u64* seed, u32 threshold, i64 element) {
  const i64 batch = element / 64, place = element % 64 % 32;
  const u64 block = (u64{1} << 63) | static_cast<u64>(batch * 8 + place / 4);
  u64 word[4][8];
  philox_eight(seed, block, word);
  const u64 chosen = word[element % 64 / 32 * 2 + place % 4 / 2][0];
  return (chosen >> (place % 2 * 16) & 0xFFFFu) >= (threshold & 0xFFFFu);
}

// Factors of `count` elements from element `first` on: `scale` where kept, else 0. `out` has room
// for 128 more; the first element's factor is at the returned place.
template <typename T>
inline const T* draw(const u64* seed, u32 threshold, T scale, i64 first, i64 count, T* out) {
  const i64 begin = first / 64, end = (first + count + 63) / 64;
  const uint16_t upper = static_cast<uint16_t>(threshold >> 16);
  for (i64 batch = begin; batch < end; ++batch) {
    u64 word[4][8];
    philox_eight(seed, static_cast<u64>(batch) * 8, word);
    u64 packed[16];
    for (int i = 0; i < 8; ++i) {
      packed[i] = word[0][i] | word[1][i] << 32;
      packed[8 + i] = word[2][i] | word[3][i] << 32;
    }
    uint16_t number[64];
    __builtin_memcpy(number, packed, sizeof packed);
    T* place = out + (batch - begin) * 64;
    int equal = 0;
    for (int i = 0; i < 64; ++i) {
      place[i] = number[i] < upper ? T(0) : scale;
      equal |= number[i] == upper;
    }
    if (equal)
      for (int i = 0; i < 64; ++i)
        if (number[i] == upper)
          place[i] = keeps_equal(seed, threshold, batch * 64 + i) ? scale : T(0);
  }
  return out + first % 64;
}

}  // namespace
"""
