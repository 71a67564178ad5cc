// Operands of the dot-product instructions: four consecutive k of a row or column beside each other.
//
// In an unnamed namespace for the reason given in tiling.h.

#pragma once

#include <cstring>

#include "lowbit/kernel.h"
#include "lowbit/tiling.h"

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t kGroup = 4;

// Panels of `columns` columns, each [group][column][4 k], W bits a weight without gaps; `sign` is
// exclusive-ored to every weight. Columns and k beyond the end are 0.
inline void pack_weight_groups(const Problem& p, int64_t columns, int64_t groups, int sign,
                               const uint8_t* w, int64_t ldw, uint8_t* packed) {
  for (int64_t first = 0; first < p.n; first += columns) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t pair = 0; pair < columns; pair += 2, packed += p.wbits) {
        uint64_t fields = 0;
        for (int field = 0; field < 8; ++field) {
          const int64_t j = first + pair + field / kGroup;
          const int64_t k = group * kGroup + field % kGroup;
          if (j < p.n && k < p.k)
            fields |= static_cast<uint64_t>(w[j * ldw + k] ^ sign) << (p.wbits * field);
        }
        std::memcpy(packed, &fields, static_cast<size_t>(p.wbits));
      }
    }
  }
}

// Blocks of rows (RowBlocks of at most `tile_rows`), each [group][row][4 k].
inline void pack_activation_groups(const Problem& p, int64_t tile_rows, int64_t groups,
                                   const uint8_t* a, int64_t lda, uint8_t* packed) {
  const int64_t whole = p.k / kGroup;
  const RowBlocks blocks(p.m, tile_rows);
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t rows = blocks.rows(block), first = blocks.first(block);
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t* row = a + (first + i) * lda;
      uint8_t* to = packed + (first * groups + i) * kGroup;
      int64_t group = 0;
#pragma GCC unroll 4
      for (; group < whole; ++group, to += rows * kGroup)
        std::memcpy(to, row + group * kGroup, kGroup);
      for (; group < groups; ++group, to += rows * kGroup) {
        uint32_t rest = 0;
        if (group == whole)
          std::memcpy(&rest, row + group * kGroup, static_cast<size_t>(p.k % kGroup));
        std::memcpy(to, &rest, kGroup);
      }
    }
  }
}

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
