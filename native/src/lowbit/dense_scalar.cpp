// Weights of W bits stored densely, row by row; unpacked to bytes and multiplied in plain C++.

#include "lowbit/bit_rows.h"
#include "lowbit/kernel.h"

namespace slipstream {
namespace lowbit {
namespace {

bool supports(int, int) { return true; }

int32_t weight_offset(const Problem&) { return 0; }

int64_t weight_bytes(const Problem& p) { return p.n * bit_row_bytes(p.k, p.wbits); }

void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  const int64_t row = bit_row_bytes(p.k, p.wbits);
  for (int64_t j = 0; j < p.n; ++j) write_bit_row(w + j * ldw, p.k, p.wbits, packed + j * row);
}

int64_t activation_bytes(const Problem& p) { return p.m * p.k; }

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  for (int64_t i = 0; i < p.m; ++i)
    for (int64_t k = 0; k < p.k; ++k) packed[i * p.k + k] = a[i * lda + k];
}

int64_t scratch_bytes(const Problem& p) { return p.k; }

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t* scratch, int32_t* out,
              int64_t ldo) {
  const int64_t bytes = bit_row_bytes(p.k, p.wbits);
  for (int64_t j = first_column; j < last_column; ++j) {
    read_bit_row(weights + j * bytes, p.k, p.wbits, scratch);
    for (int64_t i = 0; i < p.m; ++i) {
      const uint8_t* a = activations + i * p.k;
      uint32_t sum = 0;
      for (int64_t k = 0; k < p.k; ++k) sum += static_cast<uint32_t>(a[k] * scratch[k]);
      out[i * ldo + j - first_column] = static_cast<int32_t>(sum);
    }
  }
}

}  // namespace

extern const Kernel dense_scalar = {
    "dense",          "scalar",     0,
    1,                supports,     weight_offset,
    weight_bytes,     pack_weights, activation_bytes,
    pack_activations, scratch_bytes, multiply};

}  // namespace lowbit
}  // namespace slipstream
