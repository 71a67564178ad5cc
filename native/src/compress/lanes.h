// Lanes to bits and bytes and back, for levels without instructions for it.

#pragma once

#include "compress/choose.h"

namespace slipstream {
namespace compress {
namespace {

SLIPSTREAM_INLINE uint16_t at_least(const Floats& a, const Floats& b) {
  const Ints place = places();
  int32_t lanes[kLanes], bits = 0;
  const Ints found = parts<Ints>([&](int p) { return (a.part[p] >= b.part[p]) & place.part[p]; });
  std::memcpy(lanes, &found, sizeof lanes);
  for (int32_t lane : lanes) bits |= lane;
  return static_cast<uint16_t>(bits);
}

SLIPSTREAM_INLINE void put_bytes(const Ints& v, uint8_t* out) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = static_cast<uint8_t>(lanes[lane]);
}

SLIPSTREAM_INLINE Ints from_bytes(const uint8_t* bytes) {
  int32_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<int8_t>(bytes[lane]);
  Ints made;
  std::memcpy(&made, lanes, sizeof made);
  return made;
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
