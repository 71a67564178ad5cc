// What every kernel of this family is.

#pragma once

#include <cstdint>

#include "robe/hash.h"

namespace slipstream {
namespace robe {

// Bags [first, last) of a table, whose columns begin at `column`.
struct Part {
  const Lookup& lookup;
  const Table& table;
  int64_t number;  // of the table
  int64_t column;
  int64_t first, last;
  bool past_caches;  // whether the result is better written so
};

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)

  void (*forward)(const Part&, const float* array, float* result);
  // Only slots [begin, end) of the gradient, in the order of the ids.
  void (*backward)(const Part&, const float* result_gradient, float scale, const float* array,
                   const float* result, float* gradient, int64_t begin, int64_t end);
  void (*weight_gradient)(const Part&, const float* result_gradient, const float* array,
                          float* weight_gradient);
};

}  // namespace robe
}  // namespace slipstream
