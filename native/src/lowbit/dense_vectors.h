// Weights of W bits stored without gaps, for any vector width.
//
// Few rows of activations: the weights' way from memory takes the time, so they are unpacked in
// registers on the way. Many rows: a panel is unpacked once, to signed bytes that stay in the cache,
// and multiplied by tiles of bytes or dot products.
//
// The layout makes unpacking cheap without instructions for fields that straddle bytes: W is split
// into parts of 4, 2 and 1 bits (3 = 2 + 1), and a vector of a part of s bits holds 8 / s quads (see
// byte_panels.h) of each column, the bits of the first lowest. A block is eight quads of one vector
// of columns: W vectors, part after part.
#pragma once

#include "lowbit/byte_panels.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kFewRows = 8;
constexpr int64_t kBlock = 32;  // k of a block
constexpr int64_t kLine = 64;   // bytes of a cache line

inline int64_t blocks_of(int64_t k) { return ceil_div(k, kBlock); }

template <typename V>
struct Dense {
  static constexpr int64_t kColumns = V::kBytes / 4;
  using Type = typename V::Type;

  static int32_t weight_offset(const Problem& p) {
    return p.m > kFewRows || p.wbits >= V::kSignedFrom ? half_range(p) : 0;
  }

  static int64_t weight_bytes(const Problem& p) {
    return ceil_div(p.n, kColumns) * blocks_of(p.k) * p.wbits * V::kBytes;
  }

  static void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
    const int64_t block_bytes = p.wbits * V::kBytes, blocks = blocks_of(p.k);
    __builtin_memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
    // Columns and k that are not there are zeros of the signed form, too.
    for (int64_t j = 0; j < ceil_div(p.n, kColumns) * kColumns; ++j)
      for (int64_t k = 0; k < blocks * kBlock; ++k) {
        const bool there = j < p.n && k < p.k;
        const int value = there ? w[j * ldw + k] : 0;
        uint8_t* block = packed + (j / kColumns * blocks + k / kBlock) * block_bytes;
        put(block, p.wbits, static_cast<int>(k % kBlock / 4), j % kColumns * 4 + k % 4, value);
      }
  }

  // Value of quad q, byte `at` of the vectors of a block.
  static void put(uint8_t* block, int wbits, int q, int64_t at, int value) {
    if (wbits == 8) {
      block[q * V::kBytes + at] = static_cast<uint8_t>(value ^ 128);
      return;
    }
    int position = 0;
    for (int bits = 4; bits > 0; bits /= 2) {
      if (!(wbits & bits)) continue;
      const int steps = 8 / bits, part = value >> position & ((1 << bits) - 1);
      uint8_t* vector = block + (position + q / steps) * V::kBytes;
      vector[at] = static_cast<uint8_t>(vector[at] | part << q % steps * bits);
      position += bits;
    }
  }

  static int64_t few_bytes(const Problem& p) { return p.m * blocks_of(p.k) * kBlock; }

  // Consecutive rows, each padded with zeros.
  static void pack_few(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
    const int64_t row = blocks_of(p.k) * kBlock;
    for (int64_t i = 0; i < p.m; ++i) {
      __builtin_memcpy(packed + i * row, a + i * lda, static_cast<size_t>(p.k));
      __builtin_memset(packed + i * row + p.k, 0, static_cast<size_t>(row - p.k));
    }
  }

  template <int kBits, int kAt, int kQ>
  static inline Type field(const uint8_t* block, Type so_far, bool first) {
    constexpr int kSteps = 8 / kBits, kShift = kQ % kSteps * kBits - kAt;
    Type x = V::load(block + (kAt + kQ / kSteps) * V::kBytes);
    if constexpr (kShift > 0) x = V::shift_right16(x, kShift);
    if constexpr (kShift < 0) x = V::shift_left16(x, -kShift);
    const Type mask = V::bytes(((1 << kBits) - 1) << kAt);
    return first ? V::both(x, mask) : V::or_both(so_far, x, mask);
  }

  // Quad kQ of all columns of a block as bytes.
  template <int kW, bool kSigned, int kQ>
  static inline Type unpack(const uint8_t* block) {
    if constexpr (kW == 8) {
      return V::load(block + kQ * V::kBytes);
    } else {
      Type x = V::zero();
      if constexpr (kW & 4) x = field<4, 0, kQ>(block, x, true);
      if constexpr (kW & 2) x = field<2, kW & 4, kQ>(block, x, !(kW & 4));
      if constexpr (kW & 1) x = field<1, kW & 6, kQ>(block, x, !(kW & 6));
      if constexpr (kSigned) x = V::subtract8(x, V::bytes(1 << (kW - 1)));
      return x;
    }
  }

  // How many products of quads may be added in 16 bits; 0: not even the two of one. Dot products
  // do not ask.
  static int group(const Problem& p) {
    const int32_t most = p.wbits >= V::kSignedFrom
                             ? pair_bound(p.wbits, p.abits)
                             : 2 * ((1 << p.wbits) - 1) * ((1 << p.abits) - 1);
    const int32_t fit = 32767 / most;
    return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : fit;
  }

  static inline Type product(const Type* x, const uint8_t* a, int q) {
    return V::multiply_add8(V::broadcast4(a + 4 * q), x[q]);
  }

  static inline Type apart(const Type* x, const uint8_t* a, int q) {
    const Type quad = V::broadcast4(a + 4 * q), ones = V::words(1);
    const Type even = V::multiply_add8(V::both(quad, V::words(0x00ff)), x[q]),
               odd = V::multiply_add8(V::both(quad, V::words(-256)), x[q]);
    return V::add32(V::multiply_add16(even, ones), V::multiply_add16(odd, ones));
  }

  // The sum, in 32 bits, of a row's 32 values times a block.
  static inline Type block_sum(const Type* x, const uint8_t* a, int group) {
    const Type ones = V::words(1);
    if (group == 8) {
      const Type low = V::add16(V::add16(product(x, a, 0), product(x, a, 1)),
                                V::add16(product(x, a, 2), product(x, a, 3)));
      const Type high = V::add16(V::add16(product(x, a, 4), product(x, a, 5)),
                                 V::add16(product(x, a, 6), product(x, a, 7)));
      return V::multiply_add16(V::add16(low, high), ones);
    }
    Type sum = V::zero();
    if (group == 4) {
#pragma GCC unroll 2
      for (int q = 0; q < 8; q += 4)
        sum = V::add32(sum, V::multiply_add16(V::add16(V::add16(product(x, a, q), product(x, a, q + 1)),
                                                       V::add16(product(x, a, q + 2), product(x, a, q + 3))),
                                              ones));
    } else if (group == 2) {
#pragma GCC unroll 4
      for (int q = 0; q < 8; q += 2)
        sum = V::add32(sum, V::multiply_add16(V::add16(product(x, a, q), product(x, a, q + 1)), ones));
    } else if (group == 1) {
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) sum = V::add32(sum, V::multiply_add16(product(x, a, q), ones));
    } else {
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) sum = V::add32(sum, apart(x, a, q));
    }
    return sum;
  }

  static inline void prefetch(const uint8_t* block, int64_t bytes) {
#pragma GCC unroll 8
    for (int64_t line = 0; line < bytes; line += kLine)
      __builtin_prefetch(block + kPrefetch + line);
  }

  // Quad kQ and those behind it of kR rows times one block, by dot products.
  template <int kW, int kQ, int kR, int kChains>
  static inline void dots(const uint8_t* a, int64_t row, const uint8_t* block,
                          Type (&sum)[kChains][kR]) {
    const Type x = unpack<kW, (kW >= V::kSignedFrom), kQ>(block);
#pragma GCC unroll 4
    for (int i = 0; i < kR; ++i)
      sum[kQ % kChains][i] =
          V::dot(sum[kQ % kChains][i], V::broadcast4(a + i * row + 4 * kQ), x);
    if constexpr (kQ < 7) dots<kW, kQ + 1>(a, row, block, sum);
  }

  // kR rows times one vector of columns, by dot products; these take several cycles each, so that
  // every row has chains of them beside each other.
  template <int kW, int kR>
  static inline void few_dots(const uint8_t* a, const uint8_t* block, int64_t blocks,
                              Type (&out)[kR]) {
    constexpr int kChains = kR == 1 ? 4 : 2;
    Type sum[kChains][kR];
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i) sum[c][i] = V::zero();
    const int64_t row = blocks * kBlock;
    for (; blocks > 0; --blocks, block += kW * V::kBytes, a += kBlock) {
      prefetch(block, kW * V::kBytes);
      dots<kW, 0>(a, row, block, sum);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kR; ++i) {
      out[i] = sum[0][i];
#pragma GCC unroll 4
      for (int c = 1; c < kChains; ++c) out[i] = V::add32(out[i], sum[c][i]);
    }
  }

  // kR rows times one vector of columns.
  template <int kW, int kR>
  static inline void few(const uint8_t* a, const uint8_t* block, int64_t blocks, int group,
                         Type (&sum)[kR]) {
    constexpr bool kSigned = kW >= V::kSignedFrom;
    for (int i = 0; i < kR; ++i) sum[i] = V::zero();
    for (int64_t b = 0; b < blocks; ++b, block += kW * V::kBytes) {
      prefetch(block, kW * V::kBytes);
      const Type x[8] = {
          unpack<kW, kSigned, 0>(block), unpack<kW, kSigned, 1>(block),
          unpack<kW, kSigned, 2>(block), unpack<kW, kSigned, 3>(block),
          unpack<kW, kSigned, 4>(block), unpack<kW, kSigned, 5>(block),
          unpack<kW, kSigned, 6>(block), unpack<kW, kSigned, 7>(block)};
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i)
        sum[i] = V::add32(sum[i], block_sum(x, a + (i * blocks + b) * kBlock, group));
    }
  }

  // Not inlined, so that how fast one is does not depend on what else a file holds.
  template <int kW, int kR>
  [[gnu::noinline]] static void few_rows(const Problem& p, const uint8_t* a,
                                         const uint8_t* weights, int group, int64_t count,
                                         int32_t* out, int64_t ldo) {
    Type sum[kR];
    if constexpr (V::kDots)
      few_dots<kW>(a, weights, blocks_of(p.k), sum);
    else
      few<kW>(a, weights, blocks_of(p.k), group, sum);
    for (int i = 0; i < kR; ++i) {
      if (count == kColumns) {
        V::store_anywhere(out + i * ldo, sum[i]);
        continue;
      }
      alignas(64) int32_t whole[kColumns];
      V::store(whole, sum[i]);
      for (int64_t j = 0; j < count; ++j) out[i * ldo + j] = whole[j];
    }
  }

  template <int kW>
  static void multiply_few(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                           int64_t first_column, int64_t last_column, int32_t* out, int64_t ldo) {
    const int64_t blocks = blocks_of(p.k), row = blocks * kBlock;
    const int sums = group(p);
    for (int64_t j = first_column; j < last_column; j += kColumns) {
      const int64_t count = last_column - j < kColumns ? last_column - j : kColumns;
      const uint8_t* column = weights + j / kColumns * blocks * kW * V::kBytes;
      int64_t i = 0;
      for (; i + 4 <= p.m; i += 4)
        few_rows<kW, 4>(p, activations + i * row, column, sums, count,
                        out + i * ldo + j - first_column, ldo);
      const uint8_t* a = activations + i * row;
      int32_t* to = out + i * ldo + j - first_column;
      if (p.m - i == 3) few_rows<kW, 3>(p, a, column, sums, count, to, ldo);
      if (p.m - i == 2) few_rows<kW, 2>(p, a, column, sums, count, to, ldo);
      if (p.m - i == 1) few_rows<kW, 1>(p, a, column, sums, count, to, ldo);
    }
  }

  // A panel as signed bytes: [quad][vector of columns].
  template <int kW, int kVectors>
  static void expand(const Problem& p, const uint8_t* weights, int64_t vectors, uint8_t* panel) {
    const int64_t blocks = blocks_of(p.k);
    for (int64_t v = 0; v < vectors; ++v) {
      uint8_t* to = panel + v * V::kBytes;
      for (int64_t b = 0; b < blocks; ++b, weights += kW * V::kBytes) {
        V::store(to + 0 * kVectors * V::kBytes, unpack<kW, true, 0>(weights));
        V::store(to + 1 * kVectors * V::kBytes, unpack<kW, true, 1>(weights));
        V::store(to + 2 * kVectors * V::kBytes, unpack<kW, true, 2>(weights));
        V::store(to + 3 * kVectors * V::kBytes, unpack<kW, true, 3>(weights));
        V::store(to + 4 * kVectors * V::kBytes, unpack<kW, true, 4>(weights));
        V::store(to + 5 * kVectors * V::kBytes, unpack<kW, true, 5>(weights));
        V::store(to + 6 * kVectors * V::kBytes, unpack<kW, true, 6>(weights));
        V::store(to + 7 * kVectors * V::kBytes, unpack<kW, true, 7>(weights));
        to += 8 * kVectors * V::kBytes;
      }
    }
  }

  template <typename Tile>
  static int64_t panel_bytes(const Problem& p) {
    return p.m <= kFewRows ? 0 : blocks_of(p.k) * 8 * Tile::kVectors * V::kBytes;
  }

  template <typename Tile, int kW>
  static void multiply_many(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                            int64_t first_column, int64_t last_column, uint8_t* panel, int32_t* out,
                            int64_t ldo) {
    constexpr int64_t kWidth = Tile::kVectors * kColumns;
    for (int64_t j = first_column; j < last_column; j += kWidth) {
      const int64_t columns = last_column - j < kWidth ? last_column - j : kWidth;
      expand<kW, Tile::kVectors>(p, weights + j / kColumns * blocks_of(p.k) * kW * V::kBytes,
                                 ceil_div(columns, kColumns), panel);
      multiply_byte_panel<Tile>(p, activations, panel, columns, out + j - first_column, ldo);
    }
  }
};

// Calls body(a Width) with the width as a constant.
template <int kValue>
struct Width {
  static constexpr int value = kValue;
};

template <typename Body>
void with_width(int wbits, Body body) {
  switch (wbits) {
    case 1: return body(Width<1>());
    case 2: return body(Width<2>());
    case 3: return body(Width<3>());
    case 4: return body(Width<4>());
    case 5: return body(Width<5>());
    case 6: return body(Width<6>());
    case 7: return body(Width<7>());
    default: return body(Width<8>());
  }
}

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
