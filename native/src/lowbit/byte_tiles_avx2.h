// Tiles of byte products (see byte_tiles.h) for AVX2.
#pragma once

#include "lowbit/byte_tiles.h"
#include "lowbit/vector_avx2.h"

namespace slipstream {
namespace lowbit {
namespace {

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

struct Tiles : Vector {
  static constexpr int64_t kVectors = 4, kDeferredRows = 3, kGroupedRows = 2;

  // The weights as an operand in memory. Left to itself the compiler loads them into a register,
  // which with a full tile of sums is one more than there are.
  static Type multiply_add(Type a, const uint8_t* b) {
    Type sum;
    __asm__("vpmaddubsw %2, %1, %0" : "=x"(sum) : "x"(a), "m"(*reinterpret_cast<const Type*>(b)));
    return sum;
  }

  template <int kR>
  static void deferred_sums(const uint8_t* a, const uint8_t* b, int64_t quads, Type* sums) {
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
};

#undef PRODUCT
#undef CLEAR
#undef STORE
#undef FOUR
#undef LOOP
#undef OPERANDS

using DeferredTile = DeferredTileOf<Tiles>;
template <int kGroup>
using GroupedTile = GroupedTileOf<Tiles, kGroup>;

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
