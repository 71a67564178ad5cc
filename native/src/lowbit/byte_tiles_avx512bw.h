// Tiles of byte products for AVX-512 BW: rows x columns of the output, kept in registers.
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

inline __m512i broadcast_quad(const uint8_t* quad) {
  int32_t value;
  __builtin_memcpy(&value, quad, 4);
  return _mm512_set1_epi32(value);
}

inline void add_to(int32_t* out, __m512i sum, bool first) {
  _mm512_storeu_si512(out, first ? sum : _mm512_add_epi32(sum, _mm512_loadu_si512(out)));
}

// The inner loop of the deferred way: 16-bit sums of kR rows by two vectors over `quads` > 0 quads.
// Written out, because GCC 12 spills sums although there are registers left.
#define ROW(i, sum0, sum1, x, t)                              \
  "vpbroadcastd " #i "*4(%[a]), %%zmm" #x "\n\t"           \
  "vpmaddubsw %%zmm24, %%zmm" #x ", %%zmm" #t "\n\t"       \
  "vpaddw %%zmm" #t ", %%zmm" #sum0 ", %%zmm" #sum0 "\n\t" \
  "vpmaddubsw %%zmm25, %%zmm" #x ", %%zmm" #t "\n\t"       \
  "vpaddw %%zmm" #t ", %%zmm" #sum1 ", %%zmm" #sum1 "\n\t"
#define ROWS1 ROW(0, 0, 1, 26, 28)
#define ROWS2 ROWS1 ROW(1, 2, 3, 27, 29)
#define ROWS3 ROWS2 ROW(2, 4, 5, 26, 30)
#define ROWS4 ROWS3 ROW(3, 6, 7, 27, 31)
#define ROWS5 ROWS4 ROW(4, 8, 9, 26, 28)
#define ROWS6 ROWS5 ROW(5, 10, 11, 27, 29)
#define ROWS7 ROWS6 ROW(6, 12, 13, 26, 30)
#define ROWS8 ROWS7 ROW(7, 14, 15, 27, 31)
#define ROWS9 ROWS8 ROW(8, 16, 17, 26, 28)
#define ROWS10 ROWS9 ROW(9, 18, 19, 27, 29)
#define ROWS11 ROWS10 ROW(10, 20, 21, 26, 30)
#define ROWS12 ROWS11 ROW(11, 22, 23, 27, 31)
#define CLEAR(sum) "vpxord %%zmm" #sum ", %%zmm" #sum ", %%zmm" #sum "\n\t"
#define STORE(sum) "vmovdqa64 %%zmm" #sum ", " #sum "*64(%[sums])\n\t"
#define SIX(what, a, b, c, d, e, f) what(a) what(b) what(c) what(d) what(e) what(f)
#define ALL(what)                                                          \
  SIX(what, 0, 1, 2, 3, 4, 5) SIX(what, 6, 7, 8, 9, 10, 11)                \
  SIX(what, 12, 13, 14, 15, 16, 17) SIX(what, 18, 19, 20, 21, 22, 23)
#define LOOP(rows)                                                                           \
  __asm__ volatile(                                                                          \
      ALL(CLEAR)                                                                             \
      "1:\n\t"                                                                             \
      "vmovdqa64 (%[b]), %%zmm24\n\t"                                                      \
      "vmovdqa64 64(%[b]), %%zmm25\n\t" ROWS##rows "add $4*" #rows                         \
      ", %[a]\n\tadd $128, %[b]\n\tdec %[quads]\n\tjnz 1b\n\t" ALL(STORE)            \
      : [a] "+r"(a), [b] "+r"(b), [quads] "+r"(quads)                                        \
      : [sums] "r"(sums)                                                                     \
      : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",      \
        "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16",       \
        "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",     \
        "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31")

// `sums` has room for a whole tile, of which the first 2 * kR vectors are of use.
template <int kR>
inline void deferred_sums(const uint8_t* a, const uint8_t* b, int64_t quads, __m512i* sums) {
  static_assert(kR >= 1 && kR <= 12, "more rows do not fit the registers");
  if constexpr (kR == 1) LOOP(1);
  if constexpr (kR == 2) LOOP(2);
  if constexpr (kR == 3) LOOP(3);
  if constexpr (kR == 4) LOOP(4);
  if constexpr (kR == 5) LOOP(5);
  if constexpr (kR == 6) LOOP(6);
  if constexpr (kR == 7) LOOP(7);
  if constexpr (kR == 8) LOOP(8);
  if constexpr (kR == 9) LOOP(9);
  if constexpr (kR == 10) LOOP(10);
  if constexpr (kR == 11) LOOP(11);
  if constexpr (kR == 12) LOOP(12);
}

#undef ROWS1
#undef ROWS2
#undef ROWS3
#undef ROWS4
#undef ROWS5
#undef ROWS6
#undef ROWS7
#undef ROWS8
#undef ROWS9
#undef ROWS10
#undef ROWS11
#undef ROWS12
#undef ROW
#undef CLEAR
#undef STORE
#undef SIX
#undef ALL
#undef LOOP

// Sums of 16 bits stay in registers for `depth` quads, then go to the output.
struct DeferredTile {
  static constexpr int64_t kRows = 12, kVectors = 2, kColumns = 16;

  template <int kR>
  static void rows(const uint8_t* a, const uint8_t* b, int64_t quads, int64_t depth, bool first,
                   int32_t* out, int64_t ldo) {
    const __m512i ones = _mm512_set1_epi16(1);
    for (int64_t q = 0; q < quads; q += depth, first = false) {
      __m512i sums[kRows * kVectors];
      deferred_sums<kR>(a + q * 4 * kR, b + q * 64 * kVectors,
                        quads - q < depth ? quads - q : depth, sums);
      for (int i = 0; i < kR; ++i)
        for (int v = 0; v < kVectors; ++v)
          add_to(out + i * ldo + 16 * v, _mm512_madd_epi16(sums[i * kVectors + v], ones), first);
    }
  }

  static void run(int64_t count, const uint8_t* a, const uint8_t* b, int64_t quads, int64_t depth,
                  bool first, int32_t* out, int64_t ldo) {
    switch (count) {
      case 1:
        return rows<1>(a, b, quads, depth, first, out, ldo);
      case 2:
        return rows<2>(a, b, quads, depth, first, out, ldo);
      case 3:
        return rows<3>(a, b, quads, depth, first, out, ldo);
      case 4:
        return rows<4>(a, b, quads, depth, first, out, ldo);
      case 5:
        return rows<5>(a, b, quads, depth, first, out, ldo);
      case 6:
        return rows<6>(a, b, quads, depth, first, out, ldo);
      case 7:
        return rows<7>(a, b, quads, depth, first, out, ldo);
      case 8:
        return rows<8>(a, b, quads, depth, first, out, ldo);
      case 9:
        return rows<9>(a, b, quads, depth, first, out, ldo);
      case 10:
        return rows<10>(a, b, quads, depth, first, out, ldo);
      case 11:
        return rows<11>(a, b, quads, depth, first, out, ldo);
      case 12:
        return rows<12>(a, b, quads, depth, first, out, ldo);
    }
  }
};

// Sums of 32 bits stay in registers; `kGroup` <= depth quads are added in 16 bits before each
// widening. kGroup = 1 is the plain three instructions; 0 is for products of which not even two fit
// 16 bits, whose pairs are taken apart.
template <int kGroup>
struct GroupedTile {
  static constexpr int64_t kRows = 6, kVectors = 2, kColumns = 16;

  template <int kR, int kG>
  static inline void steps(const uint8_t* a, const uint8_t* b, __m512i (&sum)[kR][kVectors]) {
    const __m512i ones = _mm512_set1_epi16(1);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      __m512i x[kG];
#pragma GCC unroll 16
      for (int g = 0; g < kG; ++g) x[g] = broadcast_quad(a + 4 * (g * kR + i));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        __m512i t = _mm512_maddubs_epi16(x[0], _mm512_load_si512(b + 64 * v));
#pragma GCC unroll 16
        for (int g = 1; g < kG; ++g)
          t = _mm512_add_epi16(t, _mm512_maddubs_epi16(x[g], _mm512_load_si512(b + 64 * (g * kVectors + v))));
        sum[i][v] = _mm512_add_epi32(sum[i][v], _mm512_madd_epi16(t, ones));
      }
    }
  }

  template <int kR>
  static inline void apart(const uint8_t* a, const uint8_t* b, __m512i (&sum)[kR][kVectors]) {
    const __m512i ones = _mm512_set1_epi16(1), low = _mm512_set1_epi16(0x00ff),
                  high = _mm512_set1_epi16(-256);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      const __m512i x = broadcast_quad(a + 4 * i), even = _mm512_and_si512(x, low),
                    odd = _mm512_and_si512(x, high);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const __m512i t = _mm512_add_epi32(_mm512_madd_epi16(_mm512_maddubs_epi16(even, _mm512_load_si512(b + 64 * v)), ones),
                                           _mm512_madd_epi16(_mm512_maddubs_epi16(odd, _mm512_load_si512(b + 64 * v)), ones));
        sum[i][v] = _mm512_add_epi32(sum[i][v], t);
      }
    }
  }

  template <int kR>
  static inline void rows(const uint8_t* a, const uint8_t* b, int64_t quads, bool first,
                          int32_t* out, int64_t ldo) {
    __m512i sum[kR][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[i][v] = _mm512_setzero_si512();
    if constexpr (kGroup == 0) {
      for (; quads > 0; --quads, a += 4 * kR, b += 64 * kVectors) apart<kR>(a, b, sum);
    } else {
      for (; quads >= kGroup; quads -= kGroup, a += kGroup * 4 * kR, b += kGroup * 64 * kVectors)
        steps<kR, kGroup>(a, b, sum);
      for (; quads > 0; --quads, a += 4 * kR, b += 64 * kVectors) steps<kR, 1>(a, b, sum);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) add_to(out + i * ldo + 16 * v, sum[i][v], first);
  }

  static void run(int64_t count, const uint8_t* a, const uint8_t* b, int64_t quads, int64_t,
                  bool first, int32_t* out, int64_t ldo) {
    switch (count) {
      case 1:
        return rows<1>(a, b, quads, first, out, ldo);
      case 2:
        return rows<2>(a, b, quads, first, out, ldo);
      case 3:
        return rows<3>(a, b, quads, first, out, ldo);
      case 4:
        return rows<4>(a, b, quads, first, out, ldo);
      case 5:
        return rows<5>(a, b, quads, first, out, ldo);
      case 6:
        return rows<6>(a, b, quads, first, out, ldo);
    }
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
