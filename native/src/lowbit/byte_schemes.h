// Schemes made of tiles of byte products; include it behind the tiles of an instruction set
// (byte_tiles_avx2.h, byte_tiles_avx512bw.h), whose DeferredTile and GroupedTile they are made of.

#pragma once

namespace slipstream {
namespace lowbit {
namespace {

// Adds products up in 16 bits as long as they fit.
struct Deferred {
  using Panel = DeferredTile;

  static bool supports(int wbits, int abits) { return 2 * pair_bound(wbits, abits) <= 32767; }

  // Calls `body` with the tile that multiplies these widths fastest.
  template <typename Body>
  static void with_tile(const Problem& p, Body body) {
    const int64_t depth = 32767 / pair_bound(p.wbits, p.abits);
    if (depth >= 16)
      body(DeferredTile());
    else if (depth >= 4)
      body(GroupedTile<4>());
    else
      body(GroupedTile<2>());
  }
};

// Widens each product to 32 bits immediately, as 8-bit libraries do.
struct Int8 {
  using Panel = GroupedTile<1>;

  static bool supports(int, int) { return true; }

  template <typename Body>
  static void with_tile(const Problem& p, Body body) {
    if (pair_bound(p.wbits, p.abits) <= 32767)
      body(GroupedTile<1>());
    else
      body(GroupedTile<0>());
  }
};

// The better of the two for these widths: what dense weights (see dense_tiles.h) are multiplied by.
struct BestBytes {
  using Vector = lowbit::Vector;
  using Panel = DeferredTile;

  template <typename Body>
  static void with_tile(const Problem& p, Body body) {
    if (Deferred::supports(p.wbits, p.abits))
      Deferred::with_tile(p, body);
    else
      Int8::with_tile(p, body);
  }

  static Vector::Type step(Vector::Type sum, Vector::Type a, Vector::Type w) {
    return Vector::add16(sum, Vector::multiply_add8(a, w));
  }
};

// A kernel whose weights are kept as bytes, in panels, and multiplied by the tiles of `Way`.
template <typename Way>
struct Bytes {
  using Panel = typename Way::Panel;
  static constexpr int64_t kColumns = Panel::kColumns * Panel::kVectors;

  static bool supports(int wbits, int abits) { return Way::supports(wbits, abits); }

  static int32_t weight_offset(const Problem& p) { return half_range(p); }

  static int64_t weight_bytes(const Problem& p) { return byte_panel_bytes<Panel>(p); }

  static void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
    pack_byte_panels<Panel>(p, w, ldw, half_range(p), packed);
  }

  static int64_t activation_bytes(const Problem& p) { return byte_tile_bytes<Panel>(p); }

  static void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
    Way::with_tile(p, [&](auto tile) { pack_byte_tiles<decltype(tile)>(p, a, lda, packed); });
  }

  static int64_t scratch_bytes(const Problem&) { return 0; }

  static void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                       int64_t first_column, int64_t last_column, uint8_t*, int32_t* out,
                       int64_t ldo) {
    Way::with_tile(p, [&](auto tile) {
      multiply_byte_panels<decltype(tile)>(p, activations, weights, first_column, last_column, out,
                                           ldo);
    });
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
