// Weights of W bits stored densely: few rows straight from them (dense_vectors.h), many rows by the
// tiles of a way to multiply: `BestBytes` of byte_schemes.h, `Dots` of dot_tiles.h.

#pragma once

#include <cstddef>

#include "lowbit/dense_vectors.h"

namespace slipstream {
namespace lowbit {
namespace {

template <typename Way>
struct DenseTiles : Dense<typename Way::Vector> {
  using Vector = typename Way::Vector;
  using Base = Dense<Vector>;
  using Panel = typename Way::Panel;
  using Type = typename Vector::Type;
  static constexpr int64_t kColumns = Panel::kColumns * Panel::kVectors;

  static bool supports(int, int) { return true; }

  static int64_t activation_bytes(const Problem& p) {
    return p.m <= kFewRows ? Base::few_bytes(p) : byte_tile_bytes<Panel>(p);
  }

  static void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
    if (p.m <= kFewRows) return Base::pack_few(p, a, lda, packed);
    Way::with_tile(p, [&](auto tile) { pack_byte_tiles<decltype(tile)>(p, a, lda, packed); });
  }

  static int64_t scratch_bytes(const Problem& p) { return Base::template panel_bytes<Panel>(p); }

  static void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                       int64_t first_column, int64_t last_column, uint8_t* scratch, int32_t* out,
                       int64_t ldo) {
    with_width(p.wbits, [&](auto width) {
      constexpr int kW = decltype(width)::value;
      if (p.m <= kFewRows)
        return Base::template multiply_few<kW>(p, activations, weights, first_column, last_column,
                                               out, ldo);
      Way::with_tile(p, [&](auto tile) {
        Base::template multiply_many<decltype(tile), kW>(p, activations, weights, first_column,
                                                         last_column, scratch, out, ldo);
      });
    });
  }

  static int64_t spin(int64_t rounds) {
    constexpr int kChains = 8;
    const Type one = Vector::bytes(1);
    Type sums[kChains], x = Vector::bytes(static_cast<int>(rounds));
#pragma GCC unroll 8
    for (int i = 0; i < kChains; ++i) sums[i] = Vector::bytes(i);
    for (int64_t round = 0; round < rounds; ++round, x = Vector::add8(x, one))
#pragma GCC unroll 8
      for (int i = 0; i < kChains; ++i)
        sums[i] = Way::step(sums[i], x, Vector::bytes(i + 1));
#pragma GCC unroll 8
    for (int i = 1; i < kChains; ++i) sums[0] = Vector::add16(sums[0], sums[i]);
    alignas(64) uint8_t kept[Vector::kBytes];
    Vector::store(kept, sums[0]);
    asm volatile("" : : "r"(kept) : "memory");  // prevents removal of the computation
    return rounds * kChains * Vector::kBytes;
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
