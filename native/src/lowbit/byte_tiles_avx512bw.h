// Tiles of byte products (see byte_tiles.h) for AVX-512 BW.
#pragma once

#include "lowbit/byte_tiles.h"
#include "lowbit/vector_avx512bw.h"

namespace slipstream {
namespace lowbit {
namespace {

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

struct Tiles : Vector {
  static constexpr int64_t kVectors = 2, kDeferredRows = 12, kGroupedRows = 6;

  static Type multiply_add(Type a, const uint8_t* b) { return multiply_add8(a, load(b)); }

  // `sums` has room for a whole tile, of which the first 2 * kR vectors are of use.
  template <int kR>
  static void deferred_sums(const uint8_t* a, const uint8_t* b, int64_t quads, Type* sums) {
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
};

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

using DeferredTile = DeferredTileOf<Tiles>;
template <int kGroup>
using GroupedTile = GroupedTileOf<Tiles, kGroup>;

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
