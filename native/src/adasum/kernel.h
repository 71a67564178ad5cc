// What every kernel is: scalar products and weighted sums of a piece of several rows.
//
// The k-th number of a piece is added to partial sum k mod 16, in order; the partial sums are added
// up pairwise: neighbours, then neighbours of those. Products of two float32 are exact in float64,
// and nothing is contracted, so that all kernels and the Python reference give the same bits.

#pragma once

#include <cstdint>

namespace slipstream {
namespace adasum {

constexpr int64_t kLanes = 16;

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)

  // The products of `workers` rows' numbers `begin` to `end`, [workers][workers].
  void (*products32)(const float* const* rows, int64_t workers, int64_t begin, int64_t end,
                     double* products);
  void (*products64)(const double* const* rows, int64_t workers, int64_t begin, int64_t end,
                     double* products);
  void (*combine32)(const float* const* rows, int64_t workers, int64_t begin, int64_t end,
                    const double* weights, float* out);
  void (*combine64)(const double* const* rows, int64_t workers, int64_t begin, int64_t end,
                    const double* weights, double* out);
};

}  // namespace adasum
}  // namespace slipstream
