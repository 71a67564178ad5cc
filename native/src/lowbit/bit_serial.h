// Bit planes, for any vector width without a population count: a product of W by A bits is W * A
// products of one bit, an "and" each, summed with the weight of both bits.
//
// A vector holds 32 values of k (one bit each) of every column, so that one row's 32 bits are
// broadcast from memory. Ands are not counted one by one but added up by full adders on every bit
// (Harley and Seal): sixteen words become one of weight 16, whose ones are then counted, and one
// each of weights 1, 2, 4 and 8 that are carried on. These remainders are shared by all pairs of
// planes: the twos of one pair are the ones of a pair of twice the weight.
//
// Source: Mula, Kurz and Lemire, "Faster Population Counts Using AVX2 Instructions", The Computer
// Journal 61(1), 2018, for the counting.
#pragma once

#include <immintrin.h>

#include "lowbit/kernel.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kWordBits = 32, kChunk = 16;  // words that are added up before ones are counted

inline int64_t words_of(int64_t k) { return (k + kWordBits - 1) / kWordBits; }

template <typename V>
struct BitSerial {
  using Type = typename V::Type;
  static constexpr int64_t kColumns = V::kBytes / 4;

  static bool supports(int wbits, int abits) { return wbits <= 4 && abits <= 4; }
  static int32_t weight_offset(const Problem&) { return 0; }

  static int64_t weight_bytes(const Problem& p) {
    return (p.n + kColumns - 1) / kColumns * words_of(p.k) * p.wbits * V::kBytes;
  }

  // [vector of columns][chunk][plane][word]; the last chunk may be short.
  static void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
    const int64_t words = words_of(p.k);
    __builtin_memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
    for (int64_t j = 0; j < p.n; ++j)
      for (int64_t k = 0; k < p.k; ++k)
        for (int b = 0; b < p.wbits; ++b) {
          const int64_t at = place(k / kWordBits, words, p.wbits, b);
          uint8_t* vector = packed + (j / kColumns * words * p.wbits + at) * V::kBytes;
          uint8_t& byte = vector[j % kColumns * 4 + k % kWordBits / 8];
          byte = static_cast<uint8_t>(byte | (w[j * ldw + k] >> b & 1) << k % 8);
        }
  }

  static int64_t place(int64_t word, int64_t words, int planes, int plane) {
    const int64_t chunk = word / kChunk, left = words - chunk * kChunk;
    return chunk * kChunk * planes + plane * (left < kChunk ? left : kChunk) + word % kChunk;
  }

  static int64_t activation_bytes(const Problem& p) { return p.m * words_of(p.k) * p.abits * 4; }

  // [row][chunk][plane][word].
  static void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
    const int64_t words = words_of(p.k);
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t word = 0; word < words; ++word) {
        alignas(32) uint8_t bytes[kWordBits] = {};
        const int64_t left = p.k - word * kWordBits;
        if (left >= kWordBits)
          __builtin_memcpy(bytes, a + i * lda + word * kWordBits, kWordBits);
        else
          __builtin_memcpy(bytes, a + i * lda + word * kWordBits, static_cast<size_t>(left));
        __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
        x = _mm256_slli_epi16(x, 8 - p.abits);  // the highest bit in use to the top of the byte
        for (int b = p.abits - 1; b >= 0; --b, x = _mm256_add_epi8(x, x)) {
          const int32_t bits = _mm256_movemask_epi8(x);
          const int64_t at = i * words * p.abits + place(word, words, p.abits, b);
          __builtin_memcpy(packed + at * 4, &bits, 4);
        }
      }
  }

  // How many bits of each byte are set.
  static inline Type ones_of(Type x) {
    alignas(16) static constexpr uint8_t kCounts[16] = {0, 1, 1, 2, 1, 2, 2, 3,
                                                        1, 2, 2, 3, 2, 3, 3, 4};
    const Type counts = V::broadcast16(kCounts), nibble = V::bytes(15);
    return V::add8(V::shuffle(counts, V::both(x, nibble)),
                   V::shuffle(counts, V::both(V::shift_right16(x, 4), nibble)));
  }

  static inline Type sum_of_bytes(Type x) {
    return V::multiply_add16(V::multiply_add8(x, V::bytes(1)), V::words(1));
  }

  static inline Type word(const uint8_t* w, const uint8_t* a, int at) {
    return V::both(V::load(w + at * V::kBytes), V::broadcast4(a + at * 4));
  }

  // Two, four, eight words into the remainders of their weights; gives what is carried out.
  static inline Type twos(Type* rest, const uint8_t* w, const uint8_t* a, int at) {
    return V::carry(rest[0], word(w, a, at), word(w, a, at + 1));
  }
  static inline Type fours(Type* rest, const uint8_t* w, const uint8_t* a, int at) {
    const Type x = twos(rest, w, a, at), y = twos(rest, w, a, at + 2);
    return V::carry(rest[1], x, y);
  }
  static inline Type eights(Type* rest, const uint8_t* w, const uint8_t* a, int at) {
    const Type x = fours(rest, w, a, at), y = fours(rest, w, a, at + 4);
    return V::carry(rest[2], x, y);
  }
  static inline Type sixteens(Type* rest, const uint8_t* w, const uint8_t* a) {
    const Type x = eights(rest, w, a, 0), y = eights(rest, w, a, 8);
    return V::carry(rest[3], x, y);
  }

  // One row times one vector of columns.
  template <int kW, int kA>
  static inline Type dot(const uint8_t* w, const uint8_t* a, int64_t words) {
    constexpr int kWeights = kW + kA - 1;
    // Bytes are counted up to 8 at a time and hold 255: emptied every 31 / min(kW, kA) chunks.
    constexpr int64_t kFull = 31 / (kW < kA ? kW : kA);
    Type rest[kWeights + 3], counts[kWeights], sum = V::zero();
#pragma GCC unroll 16
    for (int s = 0; s < kWeights + 3; ++s) rest[s] = V::zero();
#pragma GCC unroll 16
    for (int s = 0; s < kWeights; ++s) counts[s] = V::zero();
    int64_t since = 0;
    for (; words >= kChunk; words -= kChunk) {
#pragma GCC unroll 4
      for (int b = 0; b < kW; ++b)
#pragma GCC unroll 4
        for (int c = 0; c < kA; ++c)
          counts[b + c] = V::add8(counts[b + c],
                                  ones_of(sixteens(rest + b + c, w + b * kChunk * V::kBytes,
                                                   a + c * kChunk * 4)));
      w += kW * kChunk * V::kBytes;
      a += kA * kChunk * 4;
      if (++since < kFull && words >= 2 * kChunk) continue;
      since = 0;
#pragma GCC unroll 16
      for (int s = 0; s < kWeights; ++s) {
        sum = V::add32(sum, V::shift_left32(sum_of_bytes(counts[s]), s + 4));
        counts[s] = V::zero();
      }
    }
    // Words that are left are counted one by one.
    for (int64_t at = 0; at < words; ++at) {
#pragma GCC unroll 4
      for (int b = 0; b < kW; ++b)
#pragma GCC unroll 4
        for (int c = 0; c < kA; ++c)
          counts[b + c] = V::add8(
              counts[b + c], ones_of(V::both(V::load(w + (b * words + at) * V::kBytes),
                                             V::broadcast4(a + (c * words + at) * 4))));
      if (at % kFull != kFull - 1 && at + 1 < words) continue;
#pragma GCC unroll 16
      for (int s = 0; s < kWeights; ++s) {
        sum = V::add32(sum, V::shift_left32(sum_of_bytes(counts[s]), s));
        counts[s] = V::zero();
      }
    }
    // Remainders, four weights in a byte: 8 * (1 + 2 + 4 + 8) < 255.
#pragma GCC unroll 16
    for (int s = 0; s < kWeights + 3; s += 4) {
      Type bytes = V::zero();
#pragma GCC unroll 4
      for (int t = 3; t >= 0; --t)
        if (s + t < kWeights + 3) bytes = V::add8(V::add8(bytes, bytes), ones_of(rest[s + t]));
      sum = V::add32(sum, V::shift_left32(sum_of_bytes(bytes), s));
    }
    return sum;
  }

  template <int kW, int kA>
  static void multiply_by(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                          int64_t first_column, int64_t last_column, int32_t* out, int64_t ldo) {
    const int64_t words = words_of(p.k);
    for (int64_t j = first_column; j < last_column; j += kColumns) {
      const int64_t count = last_column - j < kColumns ? last_column - j : kColumns;
      const uint8_t* w = weights + j / kColumns * words * kW * V::kBytes;
      for (int64_t i = 0; i < p.m; ++i) {
        const Type sum = dot<kW, kA>(w, activations + i * words * kA * 4, words);
        int32_t* to = out + i * ldo + j - first_column;
        if (count == kColumns) {
          V::store_anywhere(to, sum);
          continue;
        }
        alignas(64) int32_t whole[kColumns];
        V::store(whole, sum);
        for (int64_t c = 0; c < count; ++c) to[c] = whole[c];
      }
    }
  }

  template <int kW>
  static void multiply_width(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                             int64_t first, int64_t last, int32_t* out, int64_t ldo) {
    if (p.abits == 1) multiply_by<kW, 1>(p, activations, weights, first, last, out, ldo);
    if (p.abits == 2) multiply_by<kW, 2>(p, activations, weights, first, last, out, ldo);
    if (p.abits == 3) multiply_by<kW, 3>(p, activations, weights, first, last, out, ldo);
    if (p.abits == 4) multiply_by<kW, 4>(p, activations, weights, first, last, out, ldo);
  }

  static int64_t scratch_bytes(const Problem&) { return 0; }

  static void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
                       int64_t first, int64_t last, uint8_t*, int32_t* out, int64_t ldo) {
    if (p.wbits == 1) multiply_width<1>(p, activations, weights, first, last, out, ldo);
    if (p.wbits == 2) multiply_width<2>(p, activations, weights, first, last, out, ldo);
    if (p.wbits == 3) multiply_width<3>(p, activations, weights, first, last, out, ldo);
    if (p.wbits == 4) multiply_width<4>(p, activations, weights, first, last, out, ldo);
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
