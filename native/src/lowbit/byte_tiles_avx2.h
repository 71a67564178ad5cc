// Tiles of byte products for AVX2: rows x columns of the output, kept in registers.
//
// vpmaddubsw multiplies unsigned by signed bytes and adds two neighbours, in 16 bits that saturate.
// The plain way widens every such sum to 32 bits (three instructions a product). The deferred way
// adds up `depth` of them in 16 bits first, as many as are sure to fit: two instructions a product.
#pragma once

#include <immintrin.h>

#include "lowbit/byte_panels.h"

namespace slipstream {
namespace lowbit {
namespace {

inline __m256i broadcast_quad(const uint8_t* quad) {
  int32_t value;
  __builtin_memcpy(&value, quad, 4);
  return _mm256_set1_epi32(value);
}

// The weights as an operand in memory. Left to itself the compiler loads them into a register,
// which with a full tile of sums is one more than there are.
inline __m256i multiply_add(__m256i a, const uint8_t* b) {
  __m256i sum;
  __asm__("vpmaddubsw %2, %1, %0"
          : "=x"(sum)
          : "x"(a), "m"(*reinterpret_cast<const __m256i*>(b)));
  return sum;
}

inline void add_to(int32_t* out, __m256i sum, bool first) {
  __m256i* to = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(to, first ? sum : _mm256_add_epi32(sum, _mm256_loadu_si256(to)));
}

// The inner loop of the deferred way: 16-bit sums of kR rows by four vectors over `quads` > 0 quads.
// Written out, because a full tile takes all sixteen registers and GCC 12 spills every other sum.
#define PRODUCT(v, x, sum)                                  \
  "vpmaddubsw " #v "*32(%[b]), %%ymm" #x ", %%ymm15\n\t" \
  "vpaddw %%ymm15, %%ymm" #sum ", %%ymm" #sum "\n\t"
#define CLEAR(sum) "vpxor %%xmm" #sum ", %%xmm" #sum ", %%xmm" #sum "\n\t"
#define STORE(sum) "vmovdqa %%ymm" #sum ", " #sum "*32(%[sums])\n\t"
#define FOUR(what, a, b, c, d) what(a) what(b) what(c) what(d)
#define LOOP(bytes, body)                                                               \
  "1:\n\t" body "add $" #bytes ", %[a]\n\tadd $128, %[b]\n\tdec %[quads]\n\tjnz 1b\n\t"
#define OPERANDS                                                                             \
  : [a] "+r"(a), [b] "+r"(b), [quads] "+r"(quads)                                            \
  : [sums] "r"(sums)                                                                         \
  : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
    "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

template <int kR>
inline void deferred_sums(const uint8_t* a, const uint8_t* b, int64_t quads, __m256i* sums) {
  static_assert(kR >= 1 && kR <= 3, "more rows do not fit the registers");
  if constexpr (kR == 3) {
    __asm__ volatile(
        FOUR(CLEAR, 0, 1, 2, 3) FOUR(CLEAR, 4, 5, 6, 7) FOUR(CLEAR, 8, 9, 10, 11)
        LOOP(12,
             "vpbroadcastd (%[a]), %%ymm12\n\t"
             "vpbroadcastd 4(%[a]), %%ymm13\n\t"
             "vpbroadcastd 8(%[a]), %%ymm14\n\t"
             PRODUCT(0, 12, 0) PRODUCT(0, 13, 4) PRODUCT(0, 14, 8)
             PRODUCT(1, 12, 1) PRODUCT(1, 13, 5) PRODUCT(1, 14, 9)
             PRODUCT(2, 12, 2) PRODUCT(2, 13, 6) PRODUCT(2, 14, 10)
             PRODUCT(3, 12, 3) PRODUCT(3, 13, 7) PRODUCT(3, 14, 11))
        FOUR(STORE, 0, 1, 2, 3) FOUR(STORE, 4, 5, 6, 7) FOUR(STORE, 8, 9, 10, 11) OPERANDS);
  } else if constexpr (kR == 2) {
    __asm__ volatile(
        FOUR(CLEAR, 0, 1, 2, 3) FOUR(CLEAR, 4, 5, 6, 7)
        LOOP(8,
             "vpbroadcastd (%[a]), %%ymm12\n\t"
             "vpbroadcastd 4(%[a]), %%ymm13\n\t"
             PRODUCT(0, 12, 0) PRODUCT(0, 13, 4) PRODUCT(1, 12, 1) PRODUCT(1, 13, 5)
             PRODUCT(2, 12, 2) PRODUCT(2, 13, 6) PRODUCT(3, 12, 3) PRODUCT(3, 13, 7))
        FOUR(STORE, 0, 1, 2, 3) FOUR(STORE, 4, 5, 6, 7) OPERANDS);
  } else {
    __asm__ volatile(
        FOUR(CLEAR, 0, 1, 2, 3)
        LOOP(4, "vpbroadcastd (%[a]), %%ymm12\n\t"
             PRODUCT(0, 12, 0) PRODUCT(1, 12, 1) PRODUCT(2, 12, 2) PRODUCT(3, 12, 3))
        FOUR(STORE, 0, 1, 2, 3) OPERANDS);
  }
}

#undef PRODUCT
#undef CLEAR
#undef STORE
#undef FOUR
#undef LOOP
#undef OPERANDS

// Sums of 16 bits stay in registers for `depth` quads, then go to the output.
struct DeferredTile {
  static constexpr int64_t kRows = 3, kVectors = 4, kColumns = 8;

  template <int kR>
  static void rows(const uint8_t* a, const uint8_t* b, int64_t quads, int64_t depth, bool first,
                   int32_t* out, int64_t ldo) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t q = 0; q < quads; q += depth, first = false) {
      __m256i sums[kR * kVectors];
      deferred_sums<kR>(a + q * 4 * kR, b + q * 32 * kVectors,
                        quads - q < depth ? quads - q : depth, sums);
      for (int i = 0; i < kR; ++i)
        for (int v = 0; v < kVectors; ++v)
          add_to(out + i * ldo + 8 * v, _mm256_madd_epi16(sums[i * kVectors + v], ones), first);
    }
  }

  static void run(int64_t count, const uint8_t* a, const uint8_t* b, int64_t quads, int64_t depth,
                  bool first, int32_t* out, int64_t ldo) {
    if (count == 3) rows<3>(a, b, quads, depth, first, out, ldo);
    if (count == 2) rows<2>(a, b, quads, depth, first, out, ldo);
    if (count == 1) rows<1>(a, b, quads, depth, first, out, ldo);
  }
};

// Sums of 32 bits stay in registers; `kGroup` <= depth quads are added in 16 bits before each
// widening. kGroup = 1 is the plain three instructions; 0 is for products of which not even two fit
// 16 bits, whose pairs are taken apart.
template <int kGroup>
struct GroupedTile {
  static constexpr int64_t kRows = 2, kVectors = 4, kColumns = 8;

  template <int kR, int kG>
  static inline void steps(const uint8_t* a, const uint8_t* b, __m256i (&sum)[kR][kVectors]) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      __m256i x[kG];
#pragma GCC unroll 16
      for (int g = 0; g < kG; ++g) x[g] = broadcast_quad(a + 4 * (g * kR + i));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        __m256i t = multiply_add(x[0], b + 32 * v);
#pragma GCC unroll 16
        for (int g = 1; g < kG; ++g)
          t = _mm256_add_epi16(t, multiply_add(x[g], b + 32 * (g * kVectors + v)));
        sum[i][v] = _mm256_add_epi32(sum[i][v], _mm256_madd_epi16(t, ones));
      }
    }
  }

  template <int kR>
  static inline void apart(const uint8_t* a, const uint8_t* b, __m256i (&sum)[kR][kVectors]) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi16(0x00ff),
                  high = _mm256_set1_epi16(-256);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      const __m256i x = broadcast_quad(a + 4 * i), even = _mm256_and_si256(x, low),
                    odd = _mm256_and_si256(x, high);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const __m256i t = _mm256_add_epi32(_mm256_madd_epi16(multiply_add(even, b + 32 * v), ones),
                                           _mm256_madd_epi16(multiply_add(odd, b + 32 * v), ones));
        sum[i][v] = _mm256_add_epi32(sum[i][v], t);
      }
    }
  }

  template <int kR>
  static inline void rows(const uint8_t* a, const uint8_t* b, int64_t quads, bool first,
                          int32_t* out, int64_t ldo) {
    __m256i sum[kR][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[i][v] = _mm256_setzero_si256();
    if constexpr (kGroup == 0) {
      for (; quads > 0; --quads, a += 4 * kR, b += 32 * kVectors) apart<kR>(a, b, sum);
    } else {
      for (; quads >= kGroup; quads -= kGroup, a += kGroup * 4 * kR, b += kGroup * 32 * kVectors)
        steps<kR, kGroup>(a, b, sum);
      for (; quads > 0; --quads, a += 4 * kR, b += 32 * kVectors) steps<kR, 1>(a, b, sum);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) add_to(out + i * ldo + 8 * v, sum[i][v], first);
  }

  static void run(int64_t count, const uint8_t* a, const uint8_t* b, int64_t quads, int64_t,
                  bool first, int32_t* out, int64_t ldo) {
    if (count == 2) rows<2>(a, b, quads, first, out, ldo);
    if (count == 1) rows<1>(a, b, quads, first, out, ldo);
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
