// What every kernel of the family is: cells and diagonal recurrences in two precisions.
//
// A worker takes a contiguous share of the batch (of the width, where nothing else depends on each
// other) and keeps what it adds up to itself.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "slipstream/scan.h"

namespace slipstream {
namespace scan {

using Cell = slipstream_scan_cell;
using Diagonal = slipstream_scan_diagonal;

// For one precision. The functions of cells return whether memory could be had.
struct Precision {
  bool (*forward)(const Cell&, int64_t first, int64_t last);
  bool (*backward)(const Cell&, int64_t first, int64_t last, int64_t worker);
  void (*diagonal_forward)(const Diagonal&, int64_t first, int64_t last);
  void (*diagonal_backward)(const Diagonal&, int64_t first, int64_t last);
  bool (*products)(int64_t count, int64_t width, const void* left, int64_t left_stride,
                   const void* right, int64_t right_stride, void* out, int64_t out_stride);
};

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)
  Precision float32, float64;
};

constexpr int64_t gates_of(int32_t kind) {
  return kind == SLIPSTREAM_SCAN_GRU ? 3 : kind == SLIPSTREAM_SCAN_LSTM ? 4 : 1;
}

}  // namespace scan
}  // namespace slipstream
