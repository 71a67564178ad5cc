// Several small products from one 64-bit multiplication, in plain C++.
//
// With n values of each side as digits of a number, `stride` bits each, the weights in reversed
// order, the middle digit of the product is the sum of n products: (a0 + a1 x)(w1 + w0 x) =
// ... + (a0 w0 + a1 w1) x + ... . Products are added up before the digit is taken out, as many as
// surely stay below 2^stride. What is above the middle digit runs over the top of the word, which
// does not matter.
//
// Source: Won et al., "ULPPACK: Fast Sub-8-bit Matrix Multiply on Commodity SIMD Hardware",
// MLSys 2022; their lanes of 16 and 32 bits are a 64-bit word here, so that n is up to 4.

#include "lowbit/kernel.h"

namespace slipstream {
namespace lowbit {
namespace {

struct Packing {
  int values, stride;
  int64_t depth;  // words that may be added up
};

// The digits below the middle one must not run into it, nor it into itself: each is a sum of at most
// `values` products a word. It begins at (values - 1) * stride and ends with the word's 64 bits.
Packing packing(const Problem& p) {
  const int64_t product = ((1 << p.wbits) - 1) * ((1 << p.abits) - 1);
  for (int values = 4; values > 1; --values) {
    const int stride = 64 / values;
    const int64_t depth = ((int64_t{1} << stride) - 1) / (values * product);
    if (depth >= 4 || values == 2) return {values, stride, depth};
  }
  return {1, 64, int64_t{1} << 31};
}

int64_t words_of(const Problem& p) {
  const int values = packing(p).values;
  return (p.k + values - 1) / values;
}

bool supports(int, int) { return true; }

int32_t weight_offset(const Problem&) { return 0; }

void digits(const Problem& p, const uint8_t* rows, int64_t count, int64_t ld, bool reversed,
            uint8_t* packed) {
  const Packing how = packing(p);
  const int64_t words = words_of(p);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t word = 0; word < words; ++word) {
      uint64_t held = 0;
      for (int t = 0; t < how.values; ++t) {
        const int64_t k = word * how.values + t;
        const int digit = reversed ? how.values - 1 - t : t;
        if (k < p.k) held |= static_cast<uint64_t>(rows[i * ld + k]) << (digit * how.stride);
      }
      __builtin_memcpy(packed + (i * words + word) * 8, &held, 8);
    }
}

int64_t weight_bytes(const Problem& p) { return p.n * words_of(p) * 8; }

void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  digits(p, w, p.n, ldw, true, packed);
}

int64_t activation_bytes(const Problem& p) { return p.m * words_of(p) * 8; }

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  digits(p, a, p.m, lda, false, packed);
}

int64_t scratch_bytes(const Problem&) { return 0; }

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t*, int32_t* out, int64_t ldo) {
  const Packing how = packing(p);
  const int64_t words = words_of(p);
  const int middle = (how.values - 1) * how.stride;
  const uint64_t mask = how.stride == 64 ? ~uint64_t{0} : (uint64_t{1} << how.stride) - 1;
  for (int64_t j = first_column; j < last_column; ++j)
    for (int64_t i = 0; i < p.m; ++i) {
      const uint8_t* w = weights + j * words * 8;
      const uint8_t* a = activations + i * words * 8;
      uint32_t sum = 0;
      for (int64_t word = 0; word < words;) {
        const int64_t end = words - word < how.depth ? words : word + how.depth;
        uint64_t local = 0;
        for (; word < end; ++word) {
          uint64_t x, y;
          __builtin_memcpy(&x, w + word * 8, 8);
          __builtin_memcpy(&y, a + word * 8, 8);
          local += x * y;
        }
        sum += static_cast<uint32_t>(local >> middle & mask);
      }
      out[i * ldo + j - first_column] = static_cast<int32_t>(sum);
    }
}

}  // namespace

extern const Kernel ulppack_scalar = {
    "ulppack",        "scalar",      0,
    1,                supports,      weight_offset,
    weight_bytes,     pack_weights,  activation_bytes,
    pack_activations, scratch_bytes, multiply};

}  // namespace lowbit
}  // namespace slipstream
