// Table look-up with word permutes, for AVX-512 BW: as byte_table.h, with tables of 32 sums of five
// activations in 16 bits. One vector holds a table and one permute looks up 32 columns. Any width of
// activations fits (5 * 255 < 2^16), so that weights of 1 bit meet 8-bit activations exactly.

#include <immintrin.h>

#include "lowbit/kernel.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kColumns = 32, kVectors = 2, kPanel = kColumns * kVectors, kRows = 4, kGroup = 5;

int64_t groups_of(int64_t k) { return (k + kGroup - 1) / kGroup; }

bool supports(int wbits, int) { return wbits <= 2; }

int32_t weight_offset(const Problem&) { return 0; }

int64_t weight_bytes(const Problem& p) {
  return (p.n + kPanel - 1) / kPanel * kPanel * p.wbits * groups_of(p.k);
}

// [panel][plane][group][column]: a number below 32 in each byte.
void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  const int64_t groups = groups_of(p.k);
  __builtin_memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
  for (int64_t j = 0; j < p.n; ++j)
    for (int64_t k = 0; k < p.k; ++k)
      for (int b = 0; b < p.wbits; ++b) {
        const int64_t group = (j / kPanel * p.wbits + b) * groups + k / kGroup;
        uint8_t& byte = packed[group * kPanel + j % kPanel];
        byte = static_cast<uint8_t>(byte | (w[j * ldw + k] >> b & 1) << k % kGroup);
      }
}

int64_t activation_bytes(const Problem& p) { return p.m * groups_of(p.k) * 64; }

// [tile of rows][group][row]: a table each.
void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  const int64_t groups = groups_of(p.k);
  const __mmask32 with[kGroup] = {0xaaaaaaaa, 0xcccccccc, 0xf0f0f0f0, 0xff00ff00, 0xffff0000};
  for (int64_t top = 0; top < p.m; top += kRows) {
    const int64_t rows = p.m - top < kRows ? p.m - top : kRows;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* from = a + (top + i) * lda + g * kGroup;
        const int64_t left = p.k - g * kGroup < kGroup ? p.k - g * kGroup : kGroup;
        __m512i sums = _mm512_setzero_si512();
        for (int64_t t = 0; t < left; ++t)
          sums = _mm512_mask_add_epi16(sums, with[t], sums, _mm512_set1_epi16(from[t]));
        _mm512_store_si512(packed + (top * groups + g * rows + i) * 64, sums);
      }
  }
}

int64_t scratch_bytes(const Problem&) { return 0; }

// kR rows times a panel over `groups` groups, whose sums fit 16 bits; `all_groups` to the next plane.
template <int kR>
void tile(const Problem& p, const uint8_t* tables, const uint8_t* weights, int64_t groups,
          int64_t all_groups, int64_t count, bool first, int32_t* out, int64_t ldo) {
  __m512i sum[kR][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kR; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_si512();
  for (int b = p.wbits - 1; b >= 0; --b) {
#pragma GCC unroll 8
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = _mm512_add_epi16(sum[i][v], sum[i][v]);
    const uint8_t* w = weights + b * all_groups * kPanel;
    for (int64_t g = 0; g < groups; ++g) {
      __m512i index[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        index[v] = _mm512_cvtepu8_epi16(_mm256_load_si256(
            reinterpret_cast<const __m256i*>(w + g * kPanel + v * kColumns)));
#pragma GCC unroll 8
      for (int i = 0; i < kR; ++i) {
        const __m512i table = _mm512_load_si512(tables + (g * kR + i) * 64);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          sum[i][v] = _mm512_add_epi16(sum[i][v], _mm512_permutexvar_epi16(index[v], table));
      }
    }
  }
  for (int i = 0; i < kR; ++i) {
    alignas(64) uint16_t row[kPanel];
    for (int v = 0; v < kVectors; ++v) _mm512_store_si512(row + v * kColumns, sum[i][v]);
    int32_t* to = out + i * ldo;
    int64_t j = 0;
    for (; j + 16 <= count; j += 16) {
      const __m512i wide = _mm512_cvtepu16_epi32(
          _mm256_load_si256(reinterpret_cast<const __m256i*>(row + j)));
      _mm512_storeu_si512(to + j, first ? wide : _mm512_add_epi32(wide, _mm512_loadu_si512(to + j)));
    }
    for (; j < count; ++j) to[j] = row[j] + (first ? 0 : to[j]);
  }
}

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t*, int32_t* out, int64_t ldo) {
  const int64_t groups = groups_of(p.k);
  int64_t block = 65535 / (kGroup * ((1 << p.abits) - 1) * ((1 << p.wbits) - 1));
  block = block < 100 ? block : 100;
  // Tables are larger than what they were made of: those of a tile stay in the first-level cache
  // while all columns pass.
  for (int64_t g = 0; g < groups; g += block) {
    const int64_t some = groups - g < block ? groups - g : block;
    for (int64_t top = 0; top < p.m; top += kRows) {
      const int64_t rows = p.m - top < kRows ? p.m - top : kRows;
      const uint8_t* t = activations + (top * groups + g * rows) * 64;
      for (int64_t j = first_column; j < last_column; j += kPanel) {
        const int64_t count = last_column - j < kPanel ? last_column - j : kPanel;
        const uint8_t* w = weights + (j / kPanel * p.wbits * groups + g) * kPanel;
        int32_t* to = out + top * ldo + j - first_column;
        if (rows == 4) tile<4>(p, t, w, some, groups, count, g == 0, to, ldo);
        if (rows == 3) tile<3>(p, t, w, some, groups, count, g == 0, to, ldo);
        if (rows == 2) tile<2>(p, t, w, some, groups, count, g == 0, to, ldo);
        if (rows == 1) tile<1>(p, t, w, some, groups, count, g == 0, to, ldo);
      }
    }
  }
}

}  // namespace

extern const Kernel word_table_avx512bw = {
    "word_table",
    "avx512bw",
    SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512,
    kPanel,
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
