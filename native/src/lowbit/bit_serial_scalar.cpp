// Bit planes in plain C++: 64 values of k at a time, an "and" and a population count for each pair
// of planes.

#include "lowbit/kernel.h"

namespace slipstream {
namespace lowbit {
namespace {

int64_t words_of(int64_t k) { return (k + 63) / 64; }

bool supports(int wbits, int abits) { return wbits * abits <= 16; }

int32_t weight_offset(const Problem&) { return 0; }

// [row][plane][word] of rows of bytes.
void planes(const uint8_t* rows, int64_t count, int64_t ld, int64_t k, int bits, uint8_t* packed) {
  const int64_t words = words_of(k);
  for (int64_t i = 0; i < count; ++i)
    for (int b = 0; b < bits; ++b)
      for (int64_t word = 0; word < words; ++word) {
        const int64_t first = word * 64, last = first + 64 < k ? first + 64 : k;
        uint64_t held = 0;
        for (int64_t j = first; j < last; ++j)
          held |= static_cast<uint64_t>(rows[i * ld + j] >> b & 1) << (j - first);
        __builtin_memcpy(packed + ((i * bits + b) * words + word) * 8, &held, 8);
      }
}

int64_t weight_bytes(const Problem& p) { return p.n * p.wbits * words_of(p.k) * 8; }

void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  planes(w, p.n, ldw, p.k, p.wbits, packed);
}

int64_t activation_bytes(const Problem& p) { return p.m * p.abits * words_of(p.k) * 8; }

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  planes(a, p.m, lda, p.k, p.abits, packed);
}

int64_t scratch_bytes(const Problem&) { return 0; }

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t*, int32_t* out, int64_t ldo) {
  const int64_t words = words_of(p.k);
  for (int64_t j = first_column; j < last_column; ++j)
    for (int64_t i = 0; i < p.m; ++i) {
      uint32_t sum = 0;
      for (int b = 0; b < p.wbits; ++b)
        for (int c = 0; c < p.abits; ++c) {
          const uint8_t* w = weights + (j * p.wbits + b) * words * 8;
          const uint8_t* a = activations + (i * p.abits + c) * words * 8;
          uint32_t ones = 0;
          for (int64_t word = 0; word < words; ++word) {
            uint64_t x, y;
            __builtin_memcpy(&x, w + word * 8, 8);
            __builtin_memcpy(&y, a + word * 8, 8);
            ones += static_cast<uint32_t>(__builtin_popcountll(x & y));
          }
          sum += ones << (b + c);
        }
      out[i * ldo + j - first_column] = static_cast<int32_t>(sum);
    }
}

}  // namespace

extern const Kernel bit_serial_scalar = {
    "bit_serial",     "scalar",      0,
    1,                supports,      weight_offset,
    weight_bytes,     pack_weights,  activation_bytes,
    pack_activations, scratch_bytes, multiply};

}  // namespace lowbit
}  // namespace slipstream
