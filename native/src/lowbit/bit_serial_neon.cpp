// Bit-serial products on NEON: sum a w = sum over bits (b, c) of 2^(b+c) * popcount(plane b of a &
// plane c of w), sixteen bytes of a plane at a time.
//
// Byte t of a word holds k = t, 16 + t, ... 112 + t of 128 consecutive k: both operands are laid out
// so, which makes planes cheap to extract. cnt gives at most 8 a byte, so that 31 words fit before
// they are added up.

#include <arm_neon.h>

#include <cstring>

#include "lowbit/kernel.h"
#include "lowbit/tiling.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kColumns = 4;
constexpr int kTileRows = 4;  // x 4 columns = 16 accumulators
constexpr int64_t kWord = 128;
constexpr int64_t kWordBytes = 16;
constexpr int64_t kDepth = 255 / 8;

int64_t words_of(const Problem& p) { return divide_up(p.k, kWord); }

bool supports(int, int) { return true; }

int32_t weight_offset(const Problem&) { return 0; }

// The words of a row's planes: `step` bytes from one word to the next, planes after each other.
void store_planes(const uint8_t* row, int64_t k, int bits, int64_t step, uint8_t* to) {
  const int64_t words = divide_up(k, kWord);
  for (int64_t word = 0; word < words; ++word) {
    uint8_t values[kWord] = {};
    const int64_t left = k - word * kWord;
    std::memcpy(values, row + word * kWord, static_cast<size_t>(left < kWord ? left : kWord));
    for (int bit = 0; bit < bits; ++bit) {
      uint8_t plane[kWordBytes] = {};
      for (int s = 0; s < 8; ++s)
        for (int t = 0; t < kWordBytes; ++t)
          plane[t] = static_cast<uint8_t>(plane[t] | (values[kWordBytes * s + t] >> bit & 1) << s);
      std::memcpy(to + (bit * words + word) * step, plane, kWordBytes);
    }
  }
}

// Panels of [bit][word][column].
int64_t weight_bytes(const Problem& p) {
  return round_up(p.n, kColumns) * p.wbits * words_of(p) * kWordBytes;
}

void pack_weights(const Problem& p, const uint8_t* w, int64_t ldw, uint8_t* packed) {
  const int64_t panel = kColumns * p.wbits * words_of(p) * kWordBytes;
  std::memset(packed, 0, static_cast<size_t>(weight_bytes(p)));
  for (int64_t j = 0; j < p.n; ++j)
    store_planes(w + j * ldw, p.k, p.wbits, kColumns * kWordBytes,
                 packed + j / kColumns * panel + j % kColumns * kWordBytes);
}

// Blocks of rows, each [bit][word][row].
int64_t activation_bytes(const Problem& p) { return p.m * p.abits * words_of(p) * kWordBytes; }

void pack_activations(const Problem& p, const uint8_t* a, int64_t lda, uint8_t* packed) {
  const int64_t row_bytes = p.abits * words_of(p) * kWordBytes;
  const RowBlocks blocks(p.m, kTileRows);
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t rows = blocks.rows(block), first = blocks.first(block);
    for (int64_t i = 0; i < rows; ++i)
      store_planes(a + (first + i) * lda, p.k, p.abits, rows * kWordBytes,
                   packed + first * row_bytes + i * kWordBytes);
  }
}

// What a pair of planes adds to the sums, 2^shift for each bit they share.
template <int Rows>
void add_planes(const uint8_t* w, const uint8_t* a, int64_t words, int shift,
                uint32_t (&sums)[Rows][kColumns]) {
  for (int64_t from = 0; from < words; from += kDepth) {
    const int64_t end = words - from < kDepth ? words : from + kDepth;
    uint8x16_t counts[Rows][kColumns];
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) counts[i][j] = vdupq_n_u8(0);
    for (int64_t word = from; word < end; ++word, w += kColumns * kWordBytes) {
      uint8x16_t columns[kColumns];
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) columns[j] = vld1q_u8(w + j * kWordBytes);
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i, a += kWordBytes) {
        const uint8x16_t row = vld1q_u8(a);
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; ++j)
          counts[i][j] = vaddq_u8(counts[i][j], vcntq_u8(vandq_u8(row, columns[j])));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j)
        sums[i][j] += static_cast<uint32_t>(vaddlvq_u8(counts[i][j])) << shift;
  }
}

template <int Rows>
void multiply_tile(const Problem& p, const uint8_t* w, const uint8_t* a, int64_t columns,
                   int32_t* out, int64_t ldo) {
  const int64_t words = words_of(p);
  uint32_t sums[Rows][kColumns] = {};
  for (int wbit = 0; wbit < p.wbits; ++wbit)
    for (int abit = 0; abit < p.abits; ++abit)
      add_planes<Rows>(w + wbit * words * kColumns * kWordBytes,
                       a + abit * words * Rows * kWordBytes, words, wbit + abit, sums);
  for (int i = 0; i < Rows; ++i)
    for (int64_t j = 0; j < kColumns && j < columns; ++j)
      out[i * ldo + j] = static_cast<int32_t>(sums[i][j]);
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
        multiply_tile<rows()>(p, weights + j * p.wbits * words * kWordBytes,
                              activations + first * p.abits * words * kWordBytes, last_column - j,
                              out + first * ldo + j - first_column, ldo);
      });
    }
  }
}

}  // namespace

extern const Kernel bit_serial_neon = {
    "bit_serial", "neon",       SLIPSTREAM_CPU_NEON, kColumns,      supports, weight_offset,
    weight_bytes, pack_weights, activation_bytes,    pack_activations,
    scratch_bytes, multiply};

}  // namespace lowbit
}  // namespace slipstream
