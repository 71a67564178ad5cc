// Table look-up, for any vector width: products with few weight bits as sums picked from tables.
//
// Of four activations all sixteen sums of some of them are made once (a table of 16 bytes, hence
// 4 * (2^abits - 1) <= 255). A bit of four weights is a number below 16: one byte shuffle looks up
// the sums of as many columns as a vector has bytes. Planes (bits of the weights) are taken from the
// highest to the lowest, doubling what was summed. Exact, unlike tables that are rounded to 8 bits.
//
// Source: Wei et al., "T-MAC", EuroSys 2025, without its quantised tables.
#pragma once

#include <immintrin.h>

#include "lowbit/kernel.h"

namespace slipstream {
namespace lowbit {
namespace {

// k is taken 16 at a time: four tables, and two bytes of two numbers each of every column and plane.
constexpr int64_t kStep = 16;

inline int64_t steps_of(int64_t k) { return (k + kStep - 1) / kStep; }

// Byte t of the four a table is made of, in each entry that includes it; for the four tables of a
// step, which are made from the same 16 bytes.
struct Patterns {
  alignas(64) uint8_t of[4][64];
  constexpr Patterns() : of{} {
    for (int t = 0; t < 4; ++t)
      for (int entry = 0; entry < 64; ++entry)
        of[t][entry] = static_cast<uint8_t>(entry >> t & 1 ? entry / 16 * 4 + t : 0x80);
  }
};
constexpr Patterns kPatterns;

template <typename V>
struct ByteTable {
  using Type = typename V::Type;
  static constexpr int64_t kPanel = V::kBytes, kRows = 4;

  static bool supports(int wbits, int abits) { return wbits <= 4 && abits <= 6; }
  static int32_t weight_offset(const Problem&) { return 0; }

  static int64_t weight_bytes(const Problem& p) {
    return (p.n + kPanel - 1) / kPanel * p.wbits * steps_of(p.k) * 2 * V::kBytes;
  }

  // [panel][plane][step][two vectors]: table 2h of the step in the low half, 2h + 1 in the high one.
  static void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
    const int64_t steps = steps_of(p.k);
    __builtin_memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
    for (int64_t j = 0; j < p.n; ++j)
      for (int64_t k = 0; k < p.k; ++k)
        for (int b = 0; b < p.wbits; ++b) {
          const int64_t table = k % kStep / 4;
          uint8_t* step = packed + ((j / kPanel * p.wbits + b) * steps + k / kStep) * 2 * V::kBytes;
          uint8_t& byte = step[table / 2 * V::kBytes + j % kPanel];
          byte = static_cast<uint8_t>(byte | (w[j * ldw + k] >> b & 1) << (table % 2 * 4 + k % 4));
        }
  }

  static int64_t activation_bytes(const Problem& p) { return p.m * steps_of(p.k) * 64; }

  // [tile of rows][step][row][four tables].
  static void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
    const int64_t steps = steps_of(p.k);
    for (int64_t top = 0; top < p.m; top += kRows) {
      const int64_t rows = p.m - top < kRows ? p.m - top : kRows;
      for (int64_t i = 0; i < rows; ++i) {
        const uint8_t* from = a + (top + i) * lda;
        uint8_t* to = packed + top * steps * 64 + i * 64;
        for (int64_t s = 0; s < steps; ++s, to += rows * 64) {
          alignas(16) uint8_t bytes[kStep] = {};
          const int64_t left = p.k - s * kStep;
          if (left >= kStep)
            __builtin_memcpy(bytes, from + s * kStep, kStep);
          else
            __builtin_memcpy(bytes, from + s * kStep, static_cast<size_t>(left));
          const Type x = V::broadcast16(bytes);
          for (int64_t part = 0; part < 64; part += V::kBytes) {
            Type sum = V::shuffle(x, V::load(kPatterns.of[0] + part));
#pragma GCC unroll 4
            for (int t = 1; t < 4; ++t)
              sum = V::add8(sum, V::shuffle(x, V::load(kPatterns.of[t] + part)));
            V::store(to + part, sum);
          }
        }
      }
    }
  }

  // Sums of looked-up bytes are widened to 16 bits after every kTables tables: of a step's four, or
  // of `together` steps when kTables is 8. With the sum s of bytes taken as 16-bit lanes,
  // `odd` adds s / 256 and `all` adds s: even columns are all - 256 * odd modulo 2^16.
  template <int kR, int kTables>
  static inline void plane(const uint8_t* tables, const uint8_t* weights, int64_t steps,
                           int64_t together, Type (&all)[kR], Type (&odd)[kR]) {
    const Type nibble = V::bytes(15);
    while (steps > 0) {
      const int64_t count = kTables <= 4 ? 1 : steps < together ? steps : together;
      Type sum[kR];
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i) sum[i] = V::zero();
      for (int64_t s = 0; s < count; ++s, tables += kR * 64, weights += 2 * V::kBytes) {
        const Type x = V::load(weights), y = V::load(weights + V::kBytes);
        const Type index[4] = {V::both(x, nibble), V::both(V::shift_right16(x, 4), nibble),
                               V::both(y, nibble), V::both(V::shift_right16(y, 4), nibble)};
#pragma GCC unroll 4
        for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
          for (int t = 0; t < 4; ++t) {
            sum[i] = V::add8(sum[i], V::shuffle(V::broadcast16(tables + i * 64 + t * 16), index[t]));
            if (kTables < 4 && t % kTables == kTables - 1) {
              widen(sum[i], all[i], odd[i]);
              sum[i] = V::zero();
            }
          }
      }
      steps -= count;
      if constexpr (kTables >= 4)
#pragma GCC unroll 4
        for (int i = 0; i < kR; ++i) widen(sum[i], all[i], odd[i]);
    }
  }

  static inline void widen(Type sum, Type& all, Type& odd) {
    all = V::add16(all, sum);
    odd = V::add16(odd, V::shift_right16(sum, 8));
  }

  // 16-bit sums of a panel's columns to the output, of which `count` are there.
  static inline void put(Type all, Type odd, bool first, int64_t count, int32_t* out) {
    const Type even = V::subtract16(all, V::shift_left16(odd, 8));
    alignas(64) uint16_t low[kPanel / 2], high[kPanel / 2];
    V::store(low, V::interleave_low16(even, odd));
    V::store(high, V::interleave_high16(even, odd));
    for (int64_t j = 0; j < kPanel; j += 8) {
      const uint16_t* from = (j & 8 ? high : low) + j / 16 * 8;
      const __m256i wide =
          _mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
      if (j + 8 <= count) {
        __m256i* to = reinterpret_cast<__m256i*>(out + j);
        _mm256_storeu_si256(to, first ? wide : _mm256_add_epi32(wide, _mm256_loadu_si256(to)));
        continue;
      }
      for (int64_t c = j; c < count; ++c) out[c] = from[c - j] + (first ? 0 : out[c]);
    }
  }

  template <int kR, int kTables>
  static void tile(const Problem& p, const uint8_t* tables, const uint8_t* weights, int64_t steps,
                   int64_t count, bool first, int32_t* out, int64_t ldo) {
    const int64_t all_steps = steps_of(p.k), together = 255 / (16 * ((1 << p.abits) - 1));
    Type all[kR], odd[kR];
#pragma GCC unroll 4
    for (int i = 0; i < kR; ++i) all[i] = odd[i] = V::zero();
    for (int b = p.wbits - 1; b >= 0; --b) {
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i) {
        all[i] = V::add16(all[i], all[i]);
        odd[i] = V::add16(odd[i], odd[i]);
      }
      plane<kR, kTables>(tables, weights + b * all_steps * 2 * V::kBytes, steps, together, all, odd);
    }
    for (int i = 0; i < kR; ++i) put(all[i], odd[i], first, count, out + i * ldo);
  }

  template <int kTables>
  static void multiply_by(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                          int64_t first_column, int64_t last_column, int32_t* out, int64_t ldo) {
    const int64_t steps = steps_of(p.k);
    // As many steps as 16 bits are sure to hold, and the first-level cache.
    int64_t block = 65535 / (16 * ((1 << p.abits) - 1) * ((1 << p.wbits) - 1));
    block = block < 64 ? block : 64;
    for (int64_t j = first_column; j < last_column; j += kPanel) {
      const int64_t count = last_column - j < kPanel ? last_column - j : kPanel;
      const uint8_t* panel = weights + j / kPanel * p.wbits * steps * 2 * V::kBytes;
      for (int64_t s = 0; s < steps; s += block) {
        const int64_t some = steps - s < block ? steps - s : block;
        const uint8_t* w = panel + s * 2 * V::kBytes;
        for (int64_t top = 0; top < p.m; top += kRows) {
          const int64_t rows = p.m - top < kRows ? p.m - top : kRows;
          const uint8_t* tables = activations + (top * steps + s * rows) * 64;
          int32_t* to = out + top * ldo + j - first_column;
          if (rows == 4) tile<4, kTables>(p, tables, w, some, count, s == 0, to, ldo);
          if (rows == 3) tile<3, kTables>(p, tables, w, some, count, s == 0, to, ldo);
          if (rows == 2) tile<2, kTables>(p, tables, w, some, count, s == 0, to, ldo);
          if (rows == 1) tile<1, kTables>(p, tables, w, some, count, s == 0, to, ldo);
        }
      }
    }
  }

  static int64_t scratch_bytes(const Problem&) { return 0; }

  static void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                       int64_t first_column, int64_t last_column, uint8_t*, int32_t* out,
                       int64_t ldo) {
    if (p.abits <= 3)
      multiply_by<8>(p, activations, weights, first_column, last_column, out, ldo);
    else if (p.abits == 4)
      multiply_by<4>(p, activations, weights, first_column, last_column, out, ldo);
    else if (p.abits == 5)
      multiply_by<2>(p, activations, weights, first_column, last_column, out, ldo);
    else
      multiply_by<1>(p, activations, weights, first_column, last_column, out, ldo);
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
