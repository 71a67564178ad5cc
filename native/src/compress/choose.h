// For levels without masks: a number for each bit, by comparing.

#pragma once

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

inline void choose(Floats& chosen, uint16_t bits, const Floats& plus, const Floats& minus) {
  const Ints place = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                      1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  chosen = ((Ints{} + bits) & place) != 0 ? plus : minus;
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
