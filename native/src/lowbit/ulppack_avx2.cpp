// ULPPACK's first scheme for AVX2: two values a side in a 16-bit lane, eight bits apart, the weights
// in reversed order. The low half of a product is its lowest digit and the sum of two products of
// interest; the third digit wraps away. Kept as the published baseline: x86 multiplies bytes in pairs
// by itself (see deferred_avx2.cpp), which is faster.
//
// Source: Won et al., "ULPPACK: Fast Sub-8-bit Matrix Multiply on Commodity SIMD Hardware",
// MLSys 2022. The published kernels add into 16 bits over the whole of K, which overflows from
// K = 1337 at W3A3; here those sums are emptied in time.

#include <immintrin.h>

#include "lowbit/kernel.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kColumns = 16, kRows = 4;  // a vector of columns by four rows

int64_t pairs_of(int64_t k) { return (k + 1) / 2; }

int32_t bound(int wbits, int abits) { return 2 * ((1 << wbits) - 1) * ((1 << abits) - 1); }

bool supports(int wbits, int abits) { return bound(wbits, abits) <= 255; }

int32_t weight_offset(const Problem&) { return 0; }

int64_t weight_bytes(const Problem& p) {
  return (p.n + kColumns - 1) / kColumns * pairs_of(p.k) * 32;
}

// [vector of columns][pair][column]: the second value low.
void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  __builtin_memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
  for (int64_t j = 0; j < p.n; ++j)
    for (int64_t k = 0; k < p.k; ++k) {
      const int64_t lane = (j / kColumns * pairs_of(p.k) + k / 2) * kColumns + j % kColumns;
      packed[lane * 2 + (k % 2 == 0)] = w[j * ldw + k];
    }
}

int64_t activation_bytes(const Problem& p) { return p.m * pairs_of(p.k) * 2; }

// [tile of rows][pair][row]: neighbours are a packed lane as they are.
void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  for (int64_t top = 0; top < p.m; top += kRows) {
    const int64_t rows = p.m - top < kRows ? p.m - top : kRows;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < pairs_of(p.k) * 2; ++k)
        packed[(top * pairs_of(p.k) + k / 2 * rows + i) * 2 + k % 2] =
            k < p.k ? a[(top + i) * lda + k] : 0;
  }
}

int64_t scratch_bytes(const Problem&) { return 0; }

template <int kR>
void tile(const Problem& p, const uint8_t* a, const uint8_t* w, int64_t count, int32_t* out,
          int64_t ldo) {
  const int64_t most = bound(p.wbits, p.abits), depth = 255 / most, pairs = pairs_of(p.k);
  // As many sums of `depth` products as 16 bits are sure to hold.
  const int64_t spill = 65535 / (most * depth) * depth;
  alignas(32) uint16_t sums[kR][kColumns];
  uint32_t totals[kR][kColumns] = {};
  for (int64_t begin = 0; begin < pairs; begin += spill) {
    const int64_t end = pairs - begin < spill ? pairs : begin + spill;
    __m256i outer[kR];
#pragma GCC unroll 4
    for (int i = 0; i < kR; ++i) outer[i] = _mm256_setzero_si256();
    for (int64_t q = begin; q < end;) {
      const int64_t stop = end - q < depth ? end : q + depth;
      __m256i inner[kR];
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i) inner[i] = _mm256_setzero_si256();
      for (; q < stop; ++q) {
        const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + q * 32));
#pragma GCC unroll 4
        for (int i = 0; i < kR; ++i) {
          int16_t pair;
          __builtin_memcpy(&pair, a + (q * kR + i) * 2, 2);
          inner[i] = _mm256_add_epi16(inner[i], _mm256_mullo_epi16(x, _mm256_set1_epi16(pair)));
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i)
        outer[i] = _mm256_add_epi16(outer[i], _mm256_srli_epi16(inner[i], 8));
    }
    for (int i = 0; i < kR; ++i) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums[i]), outer[i]);
      for (int64_t j = 0; j < kColumns; ++j) totals[i][j] += sums[i][j];
    }
  }
  for (int i = 0; i < kR; ++i)
    for (int64_t j = 0; j < count; ++j) out[i * ldo + j] = static_cast<int32_t>(totals[i][j]);
}

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t*, int32_t* out, int64_t ldo) {
  const int64_t pairs = pairs_of(p.k);
  for (int64_t j = first_column; j < last_column; j += kColumns) {
    const int64_t count = last_column - j < kColumns ? last_column - j : kColumns;
    const uint8_t* w = weights + j / kColumns * pairs * 32;
    for (int64_t top = 0; top < p.m; top += kRows) {
      const int64_t rows = p.m - top < kRows ? p.m - top : kRows;
      const uint8_t* a = activations + top * pairs * 2;
      int32_t* to = out + top * ldo + j - first_column;
      if (rows == 4) tile<4>(p, a, w, count, to, ldo);
      if (rows == 3) tile<3>(p, a, w, count, to, ldo);
      if (rows == 2) tile<2>(p, a, w, count, to, ldo);
      if (rows == 1) tile<1>(p, a, w, count, to, ldo);
    }
  }
}

}  // namespace

extern const Kernel ulppack_avx2 = {
    "ulppack",        "avx2",        SLIPSTREAM_CPU_AVX2,
    kColumns,         supports,      weight_offset,
    weight_bytes,     pack_weights,  activation_bytes,
    pack_activations, scratch_bytes, multiply};

}  // namespace lowbit
}  // namespace slipstream
