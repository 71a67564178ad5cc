// Numbers above a threshold, and whether all are finite. A level says which lanes are (`above_of`).

#pragma once

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

bool finite(const float* x, int64_t count) {
  Ints most = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats value;
    count - i >= kLanes ? load(value, x + i) : load(value, x + i, count - i);
    magnitude(value);
    Ints bits;
    std::memcpy(&bits, &value, sizeof bits);
    most = bits > most ? bits : most;
  }
  int32_t lanes[kLanes];
  std::memcpy(lanes, &most, sizeof most);
  for (int32_t lane : lanes)
    if (static_cast<uint32_t>(lane) >= kLargest) return false;
  return true;
}

int64_t above(const float* gradient, float* residual, int64_t count, float threshold,
              int64_t capacity, int32_t* indices, float* values) {
  const Floats least = Floats{} + threshold;
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    Floats value, more, size;
    left >= kLanes ? load(value, residual + i) : load(value, residual + i, left);
    if (gradient) {
      left >= kLanes ? load(more, gradient + i) : load(more, gradient + i, left);
      value += more;
      left >= kLanes ? store(value, residual + i) : store(value, residual + i, left);
    }
    size = value;
    magnitude(size);
    uint32_t lanes = above_of(size, least);
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
