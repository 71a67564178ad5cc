// For levels without masks: a number for each bit, by comparing.

#pragma once

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

// Bit l of lane l.
SLIPSTREAM_INLINE Ints places() {
  int32_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = 1 << lane;
  Ints made;
  std::memcpy(&made, lanes, sizeof made);
  return made;
}

SLIPSTREAM_INLINE Floats choose(uint16_t bits, const Floats& plus, const Floats& minus) {
  const Ints found = (Ints{} + int32_t{bits}) & places();
  return parts<Floats>([&](int p) { return found.part[p] != 0 ? plus.part[p] : minus.part[p]; });
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
