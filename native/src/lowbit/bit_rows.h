// Values of `bits` bits, consecutive and without gaps: value k takes bits k * bits and on of a
// row, counted from the low end of the first byte.
#pragma once

#include <cstdint>

namespace slipstream {
namespace lowbit {
namespace {

inline int64_t bit_row_bytes(int64_t k, int bits) { return (k * bits + 7) / 8; }

inline void write_bit_row(const uint8_t* values, int64_t k, int bits, uint8_t* row) {
  uint32_t held = 0;
  int count = 0;
  for (int64_t i = 0; i < k; ++i) {
    held |= static_cast<uint32_t>(values[i]) << count;
    count += bits;
    if (count >= 8) {
      *row++ = static_cast<uint8_t>(held);
      held >>= 8;
      count -= 8;
    }
  }
  if (count > 0) *row = static_cast<uint8_t>(held);
}

inline void read_bit_row(const uint8_t* row, int64_t k, int bits, uint8_t* values) {
  const uint32_t mask = (1u << bits) - 1;
  uint32_t held = 0;
  int count = 0;
  for (int64_t i = 0; i < k; ++i) {
    if (count < bits) {
      held |= static_cast<uint32_t>(*row++) << count;
      count += 8;
    }
    values[i] = static_cast<uint8_t>(held & mask);
    held >>= bits;
    count -= bits;
  }
}

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
