// The tiles of AMX in plain C++, for processors that lack them.
//
// Included before everything else (g++ -include). Shapes that the processor would refuse end the
// program.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

#ifndef __AMX_INT8__
struct Tile {
  int rows, row_bytes;
  uint8_t bytes[16][64];
};

inline Tile* tiles() {
  static thread_local Tile all[8];
  return all;
}

inline void need(bool holds) {
  if (!holds) std::abort();
}

inline Tile& shaped(int tile) {
  Tile& one = tiles()[tile];
  need(one.rows > 0 && one.row_bytes > 0);
  return one;
}

inline void load_config(const void* from) {
  const uint8_t* config = static_cast<const uint8_t*>(from);
  need(config[0] == 1 && config[1] == 0);
  for (int tile = 0; tile < 8; ++tile) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * tile, 2);
    need(row_bytes <= 64 && config[48 + tile] <= 16);
    need((row_bytes == 0) == (config[48 + tile] == 0));
    tiles()[tile] = {config[48 + tile], row_bytes, {}};
  }
}

inline void release() { std::memset(tiles(), 0, 8 * sizeof(Tile)); }

inline void zero(int tile) {
  Tile& one = shaped(tile);
  std::memset(one.bytes, 0, sizeof one.bytes);
}

inline void load(int tile, const void* from, int64_t stride) {
  Tile& one = shaped(tile);
  std::memset(one.bytes, 0, sizeof one.bytes);
  for (int i = 0; i < one.rows; ++i)
    std::memcpy(one.bytes[i], static_cast<const uint8_t*>(from) + i * stride,
                static_cast<std::size_t>(one.row_bytes));
}

inline void store(int tile, void* to, int64_t stride) {
  const Tile& one = shaped(tile);
  for (int i = 0; i < one.rows; ++i)
    std::memcpy(static_cast<uint8_t*>(to) + i * stride, one.bytes[i],
                static_cast<std::size_t>(one.row_bytes));
}

inline void dot(int sums, int unsigned_bytes, int signed_bytes) {
  Tile& sum = shaped(sums);
  const Tile &a = shaped(unsigned_bytes), &b = shaped(signed_bytes);
  need(sum.rows == a.rows && sum.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows);
  for (int i = 0; i < sum.rows; ++i)
    for (int j = 0; j < sum.row_bytes / 4; ++j) {
      uint32_t total;
      std::memcpy(&total, sum.bytes[i] + 4 * j, 4);
      for (int k = 0; k < a.row_bytes; ++k)
        total += static_cast<uint32_t>(a.bytes[i][k] *
                                       static_cast<int8_t>(b.bytes[k / 4][4 * j + k % 4]));
      std::memcpy(sum.bytes[i] + 4 * j, &total, 4);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbusd
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbusd emulated::dot
#endif

}  // namespace emulated
