// Tiles of dot products, for any vector width: vpdpbusd adds four products of unsigned by signed
// bytes to 32 bits, exactly, whatever the widths. Include it behind the `DotVector` of an
// instruction set (dots_avx512vnni.h, dots_avxvnni.h).
#pragma once

#include "lowbit/byte_tiles.h"

namespace slipstream {
namespace lowbit {
namespace {

template <typename V>
struct DotTileOf {
  using Type = typename V::Type;
  static constexpr int64_t kRows = V::kTileRows, kVectors = V::kVectors;
  static constexpr int64_t kColumns = V::kBytes / 4;

  // Not inlined: so many copies would leave GCC no room to inline what else a file needs.
  template <int kR>
  [[gnu::noinline]] static void rows(const uint8_t* a, const uint8_t* b, int64_t quads, bool first,
                                     int32_t* out, int64_t ldo) {
    Type sum[kR][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sum[i][v] = first ? V::zero() : V::load_anywhere(out + i * ldo + kColumns * v);
    for (; quads > 0; --quads, a += 4 * kR, b += V::kBytes * kVectors) {
      Type w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[v] = V::load(b + V::kBytes * v);
#pragma GCC unroll 16
      for (int i = 0; i < kR; ++i) {
        const Type x = V::broadcast4(a + 4 * i);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[i][v] = V::dot(sum[i][v], x, w[v]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        V::store_anywhere(out + i * ldo + kColumns * v, sum[i][v]);
  }

  static void run(int64_t count, const uint8_t* a, const uint8_t* b, int64_t quads, int64_t,
                  bool first, int32_t* out, int64_t ldo) {
    with_rows<DotTileOf, kRows>(count, a, b, quads, first, out, ldo);
  }
};

// The way of dense weights (see dense_tiles.h) where there are dot products.
struct Dots {
  using Vector = DotVector;
  using Panel = DotTileOf<DotVector>;

  template <typename Body>
  static void with_tile(const Problem&, Body body) {
    body(Panel());
  }

  static Vector::Type step(Vector::Type sum, Vector::Type a, Vector::Type) {
    return Vector::dot(sum, a, a);  // other weights would not fit the registers
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
