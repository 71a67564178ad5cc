// One source for all instruction sets: loops over 16 numbers that a compiler makes vectors of.

#pragma once

#include <algorithm>
#include <vector>

#include "adasum/kernel.h"
#include "products.h"

namespace slipstream {
namespace adasum {
namespace {

// So many numbers of every row stay in the first-level cache while all pairs of rows pass by.
constexpr int64_t kBlock = 1024;

inline double total(double* sums) {
  for (int64_t step = 1; step < kLanes; step *= 2)
    for (int64_t lane = 0; lane < kLanes; lane += 2 * step) sums[lane] += sums[lane + step];
  return sums[0];
}

template <typename T>
void products(const T* const* rows, int64_t workers, int64_t begin, int64_t end, double* out) {
  std::vector<double> sums(static_cast<size_t>(workers * (workers + 1) / 2 * kLanes));
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    double* pair = sums.data();
    for (int64_t i = 0; i < workers; ++i)
      for (int64_t j = i; j < workers; ++j, pair += kLanes)
        add_products(rows[i] + at, rows[j] + at, count, pair);
  }
  double* pair = sums.data();
  for (int64_t i = 0; i < workers; ++i)
    for (int64_t j = i; j < workers; ++j, pair += kLanes)
      out[i * workers + j] = out[j * workers + i] = total(pair);
}

// Where two rows are combined, as in a tree's level, both are read once.
template <typename T>
void combine(const T* const* rows, int64_t workers, int64_t begin, int64_t end,
             const double* weights, T* out) {
  T sums[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    const T first = static_cast<T>(weights[0]);
    for (int64_t i = 0; i < count; ++i) sums[i] = first * rows[0][at + i];
    for (int64_t w = 1; w < workers; ++w) {
      const T weight = static_cast<T>(weights[w]);
      const T* row = rows[w] + at;
      for (int64_t i = 0; i < count; ++i) sums[i] += weight * row[i];
    }
    std::copy(sums, sums + count, out + at);
  }
}

}  // namespace
}  // namespace adasum
}  // namespace slipstream

#define ADASUM_KERNEL(name, level)                                          \
  namespace slipstream {                                                    \
  namespace adasum {                                                        \
  extern const Kernel name;                                                 \
  const Kernel name = {level, products<float>, products<double>, combine<float>, \
                       combine<double>};                                    \
  }                                                                         \
  }
