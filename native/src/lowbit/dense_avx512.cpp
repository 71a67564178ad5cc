// Dense W-bit weights on AVX-512 with VNNI and VBMI.
//
// 64 weights (16 columns x 4 k) lie without gaps in 8 W bytes. Three instructions unpack any W up to
// 7: vpermb spreads W bytes into each 8-byte lane, vpmultishiftqb takes eight W-bit fields out of
// each lane, vpand clears what is above them. vpdpbusd multiplies unsigned activations by signed
// weights; from those of 8 bits 128 is taken.
//
// Few rows are bound by reading weights: they are multiplied straight from registers. For more rows
// a panel is expanded to bytes once and multiplied by tiles of 12 x 32, both operands packed.

#include <immintrin.h>

#include "lowbit/dense_groups.h"
#include "lowbit/kernel.h"
#include "lowbit/tiling.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kColumns = 16;      // of a panel: the 32-bit lanes of one register
constexpr int64_t kGroupsAtOnce = 4;  // panels are filled up to a multiple of it
constexpr int64_t kVector = 64;
constexpr int kFewRows = 8;
constexpr int kTileRows = 12;        // x 2 panels = 24 accumulators of 32 registers
constexpr int kLeastTileRows = 6;    // 13 = 7 + 6
constexpr int64_t kBlock = 128;      // groups expanded at once: 2 panels x 8 KiB, for the L1 cache

int64_t groups_of(const Problem& p) {
  return round_up(divide_up(p.k, kGroup), kGroupsAtOnce);
}

int64_t panel_bytes(const Problem& p) { return groups_of(p) * 8 * p.wbits; }

bool supports(int, int) { return true; }

int32_t weight_offset(const Problem& p) { return p.wbits == 8 ? 128 : p.center; }

int64_t weight_bytes(const Problem& p) { return divide_up(p.n, kColumns) * panel_bytes(p); }

void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  pack_weight_groups(p, kColumns, groups_of(p), p.wbits == 8 ? 128 : 0, w, ldw, packed);
}

// Sixteen groups of up to sixteen rows: row i in x[i] before, group i of all rows after.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  // Within each quarter of 16 bytes: groups 0 to 3 of four rows.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

// A block of rows as [group][row][4 k].
inline void pack_rows(const Problem& p, int64_t rows, const uint8_t* a, int64_t lda,
                      uint8_t* packed) {
  const auto held = static_cast<__mmask16>((1u << rows) - 1);
  const int64_t end = groups_of(p) * kGroup;
  if (rows == 1) {
    std::memcpy(packed, a, static_cast<size_t>(p.k));
    std::memset(packed + p.k, 0, static_cast<size_t>(end - p.k));
    return;
  }
  for (int64_t k = 0; k < end; k += kVector) {
    const int64_t left = p.k - k;
    const __mmask64 there = left >= kVector ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
    __m512i x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      x[i] = i < rows ? _mm512_maskz_loadu_epi8(there, a + i * lda + k) : _mm512_setzero_si512();
    transpose(x);
    const int64_t groups = end - k >= kVector ? kVector / kGroup : (end - k) / kGroup;
    for (int64_t group = 0; group < groups; ++group, packed += rows * kGroup)
      _mm512_mask_storeu_epi32(packed, held, x[group]);
  }
}

int64_t activation_bytes(const Problem& p) { return p.m * groups_of(p) * kGroup; }

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  const RowBlocks blocks(p.m, kTileRows);
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t first = blocks.first(block);
    pack_rows(p, blocks.rows(block), a + first * lda, lda, packed + first * groups_of(p) * kGroup);
  }
}

template <int W>
class Unpack {
 public:
  explicit Unpack(int32_t center) : center_(_mm512_set1_epi8(static_cast<char>(center))) {
    alignas(64) uint8_t spread[64], shifts[64];
    for (int lane = 0; lane < 8; ++lane) {
      for (int i = 0; i < 8; ++i) {
        spread[lane * 8 + i] = static_cast<uint8_t>(i < W ? lane * W + i : 0);
        shifts[lane * 8 + i] = static_cast<uint8_t>(W * i);
      }
    }
    spread_ = _mm512_loadu_si512(spread);
    shifts_ = _mm512_loadu_si512(shifts);
    mask_ = _mm512_set1_epi8(static_cast<char>((1 << W) - 1));
  }

  __m512i operator()(const uint8_t* tile) const {
    const __m512i bytes = _mm512_loadu_si512(tile);
    if constexpr (W == 8) return bytes;
    const __m512i lanes = _mm512_permutexvar_epi8(spread_, bytes);
    const __m512i fields = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts_, lanes), mask_);
    return _mm512_sub_epi8(fields, center_);
  }

 private:
  __m512i spread_, shifts_, mask_, center_;
};

inline __m512i broadcast(const uint8_t* four) {
  int32_t value;
  std::memcpy(&value, four, 4);
  return _mm512_set1_epi32(value);
}

// One panel x all rows, from packed weights.
template <int W, int Rows>
void multiply_packed(const uint8_t* tile, const uint8_t* a, int64_t groups, int32_t center,
                     __mmask16 columns, int32_t* out, int64_t ldo) {
  constexpr int kAtOnce = Rows <= 2 ? kGroupsAtOnce : 2;  // vpdpbusd needs chains beside each other
  const Unpack<W> unpack(center);
  __m512i sums[kAtOnce][Rows];
#pragma GCC unroll 4
  for (int u = 0; u < kAtOnce; ++u)
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) sums[u][i] = _mm512_setzero_si512();
  for (int64_t group = 0; group < groups; group += kAtOnce) {
#pragma GCC unroll 4
    for (int line = 0; line < kAtOnce * 8 * W; line += kVector)
      _mm_prefetch(reinterpret_cast<const char*>(tile) + kPrefetch + line, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int u = 0; u < kAtOnce; ++u, tile += 8 * W) {
      const __m512i w = unpack(tile);
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i, a += kGroup)
        sums[u][i] = _mm512_dpbusd_epi32(sums[u][i], broadcast(a), w);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int u = 1; u < kAtOnce; ++u) sums[0][i] = _mm512_add_epi32(sums[0][i], sums[u][i]);
    _mm512_mask_storeu_epi32(out + i * ldo, columns, sums[0][i]);
  }
}

// Two panels beside each other, as bytes, 64 for each group.
struct Expanded {
  const uint8_t *left, *right;
  __mmask16 left_columns, right_columns;
};

template <int Rows>
void multiply_expanded(const Expanded& w, const uint8_t* a, int64_t groups, bool more, int32_t* out,
                       int64_t ldo) {
  const __mmask16 left_held = more ? w.left_columns : 0, right_held = more ? w.right_columns : 0;
  __m512i left[Rows], right[Rows];
#pragma GCC unroll 12
  for (int i = 0; i < Rows; ++i) {
    left[i] = _mm512_maskz_loadu_epi32(left_held, out + i * ldo);
    right[i] = _mm512_maskz_loadu_epi32(right_held, out + i * ldo + kColumns);
  }
  for (int64_t group = 0; group < groups; ++group, a += Rows * kGroup) {
    const __m512i w0 = _mm512_loadu_si512(w.left + group * kVector);
    const __m512i w1 = _mm512_loadu_si512(w.right + group * kVector);
#pragma GCC unroll 12
    for (int i = 0; i < Rows; ++i) {
      const __m512i x = broadcast(a + i * kGroup);
      left[i] = _mm512_dpbusd_epi32(left[i], x, w0);
      right[i] = _mm512_dpbusd_epi32(right[i], x, w1);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < Rows; ++i) {
    _mm512_mask_storeu_epi32(out + i * ldo, w.left_columns, left[i]);
    _mm512_mask_storeu_epi32(out + i * ldo + kColumns, w.right_columns, right[i]);
  }
}

template <int W>
void expand(const uint8_t* tiles, int64_t groups, int32_t center, uint8_t* bytes) {
  const Unpack<W> unpack(center);
  for (int64_t group = 0; group < groups; ++group)
    _mm512_storeu_si512(bytes + group * kVector, unpack(tiles + group * 8 * W));
}

__mmask16 columns_of(int64_t left) {
  return static_cast<__mmask16>(left >= kColumns ? 0xffff : left > 0 ? (1 << left) - 1 : 0);
}

template <int W, int Rows>
void multiply_few_rows(const Problem& p, const uint8_t* activations, const uint8_t* panel,
                       int64_t columns, int32_t* out, int64_t ldo) {
  for (int64_t j = 0; j < columns; j += kColumns, panel += panel_bytes(p))
    multiply_packed<W, Rows>(panel, activations, groups_of(p), p.center, columns_of(columns - j),
                             out + j, ldo);
}

template <int W>
void multiply_many_rows(const Problem& p, const uint8_t* activations, const uint8_t* panel,
                        int64_t columns, uint8_t* scratch, int32_t* out, int64_t ldo) {
  const RowBlocks blocks(p.m, kTileRows);
  const int64_t groups = divide_up(p.k, kGroup);
  for (int64_t j = 0; j < columns; j += 2 * kColumns, panel += 2 * panel_bytes(p)) {
    const uint8_t* other = j + kColumns < columns ? panel + panel_bytes(p) : panel;
    for (int64_t from = 0; from < groups; from += kBlock) {
      const int64_t count = groups - from < kBlock ? groups - from : kBlock;
      Expanded w{panel + from * 8 * W, other + from * 8 * W, columns_of(columns - j),
                 columns_of(columns - j - kColumns)};
      if constexpr (W < 8) {
        expand<W>(w.left, count, p.center, scratch);
        expand<W>(w.right, count, p.center, scratch + kBlock * kVector);
        w.left = scratch;
        w.right = scratch + kBlock * kVector;
      }
      for (int64_t block = 0; block < blocks.count(); ++block) {
        const int64_t rows = blocks.rows(block), first = blocks.first(block);
        const uint8_t* a = activations + (first * groups_of(p) + from * rows) * kGroup;
        with_constant<kLeastTileRows, kTileRows>(rows, [&](auto height) {
          multiply_expanded<height()>(w, a, count, from > 0, out + first * ldo + j, ldo);
        });
      }
    }
  }
}

int64_t scratch_bytes(const Problem& p) {
  return p.m > kFewRows && p.wbits < 8 ? 2 * kBlock * kVector : 0;
}

void multiply(const Problem& p, const uint8_t* activations, const uint8_t* weights,
              int64_t first_column, int64_t last_column, uint8_t* scratch, int32_t* out,
              int64_t ldo) {
  const uint8_t* panel = weights + first_column / kColumns * panel_bytes(p);
  const int64_t columns = last_column - first_column;
  with_constant<1, 8>(p.wbits, [&](auto bits) {
    if (p.m > kFewRows)
      return multiply_many_rows<bits()>(p, activations, panel, columns, scratch, out, ldo);
    with_constant<1, kFewRows>(p.m, [&](auto rows) {
      multiply_few_rows<bits(), rows()>(p, activations, panel, columns, out, ldo);
    });
  });
}

int64_t spin(int64_t rounds) {
  constexpr int kChains = 24;
  __m512i sums[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_epi32(i);
  const __m512i x = _mm512_set1_epi8(static_cast<char>(rounds)), w = _mm512_set1_epi8(3);
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], x, w);
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  alignas(64) int32_t kept[16];
  _mm512_mask_storeu_epi32(kept, 0xffff, sums[0]);
  asm volatile("" : : "r"(kept) : "memory");  // prevents removal of the computation
  return rounds * kChains * kVector;
}

}  // namespace

extern const Kernel dense_avx512 = {"dense",
                                    "avx512",
                                    SLIPSTREAM_CPU_AVX512 | SLIPSTREAM_CPU_AVX512_VNNI |
                                        SLIPSTREAM_CPU_AVX512_VBMI |
                                        SLIPSTREAM_CPU_AVX512_VPOPCNTDQ,
                                    2 * kColumns,
                                    supports,
                                    weight_offset,
                                    weight_bytes,
                                    pack_weights,
                                    activation_bytes,
                                    pack_activations,
                                    scratch_bytes,
                                    multiply,
                                    spin};

}  // namespace lowbit
}  // namespace slipstream
