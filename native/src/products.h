// Products of two vectors, added up in float64 over 16 lanes: lane l takes the numbers l, l + 16, ...
// in order, at every level alike. In an anonymous namespace: see registers.h.

#pragma once

#include <cstdint>

namespace {

template <typename T>
inline void add_products(const T* a, const T* b, int64_t count, double* sums) {
  constexpr int64_t kSums = 16;
  double lanes[kSums];
  for (int64_t lane = 0; lane < kSums; ++lane) lanes[lane] = sums[lane];
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums)
    for (int64_t lane = 0; lane < kSums; ++lane)
      lanes[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
  for (int64_t lane = 0; i + lane < count; ++lane)
    lanes[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
  for (int64_t lane = 0; lane < kSums; ++lane) sums[lane] = lanes[lane];
}

}  // namespace
