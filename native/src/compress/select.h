// Numbers above a threshold, and whether all are finite. A level says which lanes are (`at_least`).

#pragma once

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

bool finite(const float* x, int64_t count) {
  Ints most = {};
  for (int64_t i = 0; i < count; i += kLanes)
    most = larger(bits_of(magnitude(load(x + i, count - i))), most);
  int32_t lanes[kLanes];
  std::memcpy(lanes, &most, sizeof most);
  for (int32_t lane : lanes)
    if (static_cast<uint32_t>(lane) >= kLargest) return false;
  return true;
}

int64_t above(const float* gradient, float* residual, int64_t count, float threshold,
              int64_t capacity, int32_t* indices, float* values) {
  const Floats least = all(threshold);
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    Floats value = load(residual + i, left);
    if (gradient) {
      value += load(gradient + i, left);
      store(value, residual + i, left);
    }
    uint32_t lanes = at_least(magnitude(value), least);
    if (left < kLanes) lanes &= (1u << left) - 1;
    for (; lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (found < capacity) {
        indices[found] = static_cast<int32_t>(i + lane);
        values[found] = residual[i + lane];
      }
      ++found;
    }
  }
  return found;
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
