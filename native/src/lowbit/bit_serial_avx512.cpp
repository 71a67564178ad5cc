// Bit-serial products on AVX-512 with VPOPCNTDQ.
//
// sum a w = sum over bits (b, c) of 2^(b+c) * popcount(plane b of a & plane c of w). A plane holds
// bit b of 64 consecutive k in one word; vptestmb extracts it. Sixteen columns are the 64-bit lanes
// of two registers; the words of activations are broadcast.
//
// Pairs of planes come in order of falling b + c and the sums are doubled in between, so that one set
// of accumulators serves them all.

#include <immintrin.h>

#include <cstring>

#include "lowbit/kernel.h"
#include "lowbit/tiling.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kColumns = 16;
constexpr int kTileRows = 8;  // x 2 registers of columns = 16 accumulators
constexpr int64_t kWord = 64;

int64_t words_of(const Problem& p) { return divide_up(p.k, kWord); }

bool supports(int, int) { return true; }

int32_t weight_offset(const Problem&) { return 0; }

inline __m512i load_word(const uint8_t* row, int64_t k, int64_t end) {
  const int64_t left = end - k;
  const __mmask64 there = left < kWord ? (1ull << left) - 1 : ~0ull;
  return _mm512_maskz_loadu_epi8(there, row + k);
}

inline void store_plane(__m512i values, int bit, uint8_t* to) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(1u << bit));
  const uint64_t plane = _mm512_test_epi8_mask(values, mask);
  std::memcpy(to, &plane, 8);
}

// Weights are panels of [bit][word][column], activations blocks of rows, each [bit][word][row].

int64_t weight_bytes(const Problem& p) {
  return round_up(p.n, kColumns) * p.wbits * words_of(p) * 8;
}

void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  const int64_t words = words_of(p);
  std::memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
  for (int64_t j = 0; j < p.n; ++j) {
    uint8_t* column = packed + (j / kColumns * kColumns * p.wbits * words + j % kColumns) * 8;
    for (int64_t word = 0; word < words; ++word) {
      const __m512i values = load_word(w + j * ldw, word * kWord, p.k);
      for (int bit = 0; bit < p.wbits; ++bit)
        store_plane(values, bit, column + (bit * words + word) * kColumns * 8);
    }
  }
}

int64_t activation_bytes(const Problem& p) { return p.m * p.abits * words_of(p) * 8; }

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  const int64_t words = words_of(p);
  const RowBlocks blocks(p.m, kTileRows);
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t rows = blocks.rows(block), first = blocks.first(block);
    for (int64_t i = 0; i < rows; ++i) {
      uint8_t* row = packed + (first * p.abits * words + i) * 8;
      for (int64_t word = 0; word < words; ++word) {
        const __m512i values = load_word(a + (first + i) * lda, word * kWord, p.k);
        for (int bit = 0; bit < p.abits; ++bit)
          store_plane(values, bit, row + (bit * words + word) * rows * 8);
      }
    }
  }
}

template <int Rows>
void multiply_tile(const uint8_t* w, const uint8_t* a, int wbits, int abits, int64_t words,
                   int64_t columns, int32_t* out, int64_t ldo) {
  __m512i left[Rows], right[Rows];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) left[i] = right[i] = _mm512_setzero_si512();
  for (int weight = wbits + abits - 2; weight >= 0; --weight) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      left[i] = _mm512_slli_epi64(left[i], 1);
      right[i] = _mm512_slli_epi64(right[i], 1);
    }
    for (int bit = weight < abits ? 0 : weight - abits + 1; bit < wbits && bit <= weight; ++bit) {
      const uint8_t* w_plane = w + bit * words * kColumns * 8;
      const uint8_t* a_plane = a + (weight - bit) * words * Rows * 8;
      for (int64_t word = 0; word < words; ++word, w_plane += kColumns * 8) {
        const __m512i w0 = _mm512_loadu_si512(w_plane);
        const __m512i w1 = _mm512_loadu_si512(w_plane + 64);
#pragma GCC unroll 8
        for (int i = 0; i < Rows; ++i, a_plane += 8) {
          int64_t bits;
          std::memcpy(&bits, a_plane, 8);
          const __m512i x = _mm512_set1_epi64(bits);
          left[i] = _mm512_add_epi64(left[i], _mm512_popcnt_epi64(_mm512_and_si512(w0, x)));
          right[i] = _mm512_add_epi64(right[i], _mm512_popcnt_epi64(_mm512_and_si512(w1, x)));
        }
      }
    }
  }
  // The lower halves of all lanes.
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const auto there = static_cast<__mmask16>(columns >= kColumns ? 0xffff : (1 << columns) - 1);
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    const __m512i sums = _mm512_permutex2var_epi32(left[i], even, right[i]);
    if (columns >= kColumns)
      _mm512_storeu_si512(out + i * ldo, sums);
    else
      _mm512_mask_storeu_epi32(out + i * ldo, there, sums);
  }
}

int64_t scratch_bytes(const Problem&) { return 0; }

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t*, int32_t* out, int64_t ldo) {
  const int64_t words = words_of(p);
  const RowBlocks blocks(p.m, kTileRows);
  for (int64_t j = first_column; j < last_column; j += kColumns) {
    for (int64_t block = 0; block < blocks.count(); ++block) {
      const int64_t first = blocks.first(block);
      with_constant<1, kTileRows>(blocks.rows(block), [&](auto rows) {
        multiply_tile<rows()>(weights + j * p.wbits * words * 8,
                              activations + first * p.abits * words * 8, p.wbits, p.abits, words,
                              last_column - j, out + first * ldo + j - first_column, ldo);
      });
    }
  }
}

}  // namespace

extern const Kernel bit_serial_avx512 = {"bit_serial",
                                         "avx512",
                                         SLIPSTREAM_CPU_AVX512 | SLIPSTREAM_CPU_AVX512_VNNI |
                                             SLIPSTREAM_CPU_AVX512_VBMI |
                                             SLIPSTREAM_CPU_AVX512_VPOPCNTDQ,
                                         kColumns,
                                         supports,
                                         weight_offset,
                                         weight_bytes,
                                         pack_weights,
                                         activation_bytes,
                                         pack_activations,
                                         scratch_bytes,
                                         multiply};

}  // namespace lowbit
}  // namespace slipstream
