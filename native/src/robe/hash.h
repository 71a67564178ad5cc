// Where the numbers of a row lie. Part of every checkpoint: never to be changed, only added to.
//
// A row of `dim` numbers is read in blocks of Z. With Z <= dim, block c of row x holds its elements
// c Z to c Z + Z - 1. With Z > dim, several rows share a block: the table's numbers, row after row,
// are cut into blocks of Z. A block starts at
//
//     start = high 64 bits of mix(key + x K1 + c K2) * size        (x = 0 when Z > dim)
//
// and goes round the end of the array: the array is a circle, so every place is read equally often.
// The sign of element i of row x is bit i mod 64 of mix((key ^ kSigns) + x K1 + (i div 64) K2).
//
// mix is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014, with Stafford's constants); the
// range reduction is Lemire's ("Fast random integer generation in an interval", 2019).

#pragma once

#include <cstdint>

#include "slipstream/robe.h"

namespace slipstream {
namespace robe {

using Lookup = slipstream_robe_lookup;
using Table = slipstream_robe_table;

namespace {

constexpr uint64_t kRow = 0x9E3779B97F4A7C15;    // K1
constexpr uint64_t kBlock = 0xC2B2AE3D27D4EB4F;  // K2
constexpr uint64_t kSigns = 0xD6E8FEB86659FD93;

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

__extension__ typedef unsigned __int128 Wide;

inline int64_t start_of(const Lookup& lookup, uint64_t row_key, uint64_t block) {
  return static_cast<int64_t>(
      static_cast<Wide>(mix(row_key + block * kBlock)) * static_cast<uint64_t>(lookup.size) >> 64);
}

inline uint64_t row_key(const Table& table, int64_t row) {
  return table.key + static_cast<uint64_t>(row) * kRow;
}

inline uint64_t sign_word(const Table& table, int64_t row, int64_t word) {
  return mix((table.key ^ kSigns) + static_cast<uint64_t>(row) * kRow +
             static_cast<uint64_t>(word) * kBlock);
}

}  // namespace
}  // namespace robe
}  // namespace slipstream
