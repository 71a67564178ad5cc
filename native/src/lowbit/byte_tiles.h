// Tiles of byte products, for any vector width: rows x columns of the output, kept in registers.
//
// vpmaddubsw multiplies unsigned by signed bytes and adds two neighbours, in 16 bits that saturate.
// The plain way widens every such sum to 32 bits (three instructions a product). The deferred way
// adds up `depth` of them in 16 bits first, as many as are sure to fit: two instructions a product.
//
// What an instruction set brings (byte_tiles_avx2.h, byte_tiles_avx512bw.h) is `Tiles`: its `Vector`
// with the numbers of rows and vectors that fit the registers, `multiply_add` and `deferred_sums`.
#pragma once

#include "lowbit/byte_panels.h"

namespace slipstream {
namespace lowbit {
namespace {

template <typename V>
inline void add_to(int32_t* out, typename V::Type sum, bool first) {
  V::store_anywhere(out, first ? sum : V::add32(sum, V::load_anywhere(out)));
}

// Calls `Tile::rows<count>`, for a count from 1 to kMost.
template <typename Tile, int kMost, typename... Arguments>
inline void with_rows(int64_t count, Arguments... arguments) {
  if (count == kMost) return Tile::template rows<kMost>(arguments...);
  if constexpr (kMost > 1) with_rows<Tile, kMost - 1>(count, arguments...);
}

// Sums of 16 bits stay in registers for `depth` quads, then go to the output.
template <typename V>
struct DeferredTileOf {
  using Type = typename V::Type;
  static constexpr int64_t kRows = V::kDeferredRows, kVectors = V::kVectors;
  static constexpr int64_t kColumns = V::kBytes / 4;

  // Not inlined: so many copies would leave GCC no room to inline what else a file needs.
  template <int kR>
  [[gnu::noinline]] static void rows(const uint8_t* a, const uint8_t* b, int64_t quads,
                                     int64_t depth, bool first, int32_t* out, int64_t ldo) {
    const Type ones = V::words(1);
    for (int64_t q = 0; q < quads; q += depth, first = false) {
      Type sums[kRows * kVectors];
      V::template deferred_sums<kR>(a + q * 4 * kR, b + q * V::kBytes * kVectors,
                                    quads - q < depth ? quads - q : depth, sums);
      for (int i = 0; i < kR; ++i)
        for (int v = 0; v < kVectors; ++v)
          add_to<V>(out + i * ldo + kColumns * v, V::multiply_add16(sums[i * kVectors + v], ones),
                    first);
    }
  }

  static void run(int64_t count, const uint8_t* a, const uint8_t* b, int64_t quads, int64_t depth,
                  bool first, int32_t* out, int64_t ldo) {
    with_rows<DeferredTileOf, kRows>(count, a, b, quads, depth, first, out, ldo);
  }
};

// Sums of 32 bits stay in registers; `kGroup` <= depth quads are added in 16 bits before each
// widening. kGroup = 1 is the plain three instructions; 0 is for products of which not even two fit
// 16 bits, whose pairs are taken apart.
template <typename V, int kGroup>
struct GroupedTileOf {
  using Type = typename V::Type;
  static constexpr int64_t kRows = V::kGroupedRows, kVectors = V::kVectors;
  static constexpr int64_t kColumns = V::kBytes / 4;

  template <int kR, int kG>
  static inline void steps(const uint8_t* a, const uint8_t* b, Type (&sum)[kR][kVectors]) {
    const Type ones = V::words(1);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      Type x[kG];
#pragma GCC unroll 16
      for (int g = 0; g < kG; ++g) x[g] = V::broadcast4(a + 4 * (g * kR + i));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        Type t = V::multiply_add(x[0], b + V::kBytes * v);
#pragma GCC unroll 16
        for (int g = 1; g < kG; ++g)
          t = V::add16(t, V::multiply_add(x[g], b + V::kBytes * (g * kVectors + v)));
        sum[i][v] = V::add32(sum[i][v], V::multiply_add16(t, ones));
      }
    }
  }

  template <int kR>
  static inline void apart(const uint8_t* a, const uint8_t* b, Type (&sum)[kR][kVectors]) {
    const Type ones = V::words(1), low = V::words(0x00ff), high = V::words(-256);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      const Type x = V::broadcast4(a + 4 * i), even = V::both(x, low), odd = V::both(x, high);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* w = b + V::kBytes * v;
        const Type t = V::add32(V::multiply_add16(V::multiply_add(even, w), ones),
                                V::multiply_add16(V::multiply_add(odd, w), ones));
        sum[i][v] = V::add32(sum[i][v], t);
      }
    }
  }

  template <int kR>
  static inline void rows(const uint8_t* a, const uint8_t* b, int64_t quads, bool first,
                          int32_t* out, int64_t ldo) {
    constexpr int64_t kStep = V::kBytes * kVectors;
    Type sum[kR][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[i][v] = V::zero();
    if constexpr (kGroup == 0) {
      for (; quads > 0; --quads, a += 4 * kR, b += kStep) apart<kR>(a, b, sum);
    } else {
      for (; quads >= kGroup; quads -= kGroup, a += kGroup * 4 * kR, b += kGroup * kStep)
        steps<kR, kGroup>(a, b, sum);
      for (; quads > 0; --quads, a += 4 * kR, b += kStep) steps<kR, 1>(a, b, sum);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) add_to<V>(out + i * ldo + kColumns * v, sum[i][v], first);
  }

  static void run(int64_t count, const uint8_t* a, const uint8_t* b, int64_t quads, int64_t,
                  bool first, int32_t* out, int64_t ldo) {
    with_rows<GroupedTileOf, kRows>(count, a, b, quads, first, out, ldo);
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
