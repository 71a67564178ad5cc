// What every kernel of this family is.

#pragma once

#include <cstdint>

#include "slipstream/tt.h"

namespace slipstream {
namespace tt {

using Lookup = slipstream_tt_lookup;

// Prefixes whose products are made together: their rows of the first core.
constexpr int64_t kTogetherRows = 64;

// Sizes of the products that make a row.
struct Sizes {
  int64_t q1, q2, q3, r1, r2;
  int64_t dim;      // q1 q2 q3
  int64_t left;     // q1 q2: rows of the product of the first two slices, r2 columns each
  int64_t first;    // numbers in a slice of the first core: q1 r1
  int64_t middle;   // r1 q2 r2
  int64_t last;     // r2 q3
  int64_t together; // prefixes at a time

  explicit Sizes(const Lookup& lookup)
      : q1(lookup.columns[0]), q2(lookup.columns[1]), q3(lookup.columns[2]), r1(lookup.ranks[0]),
        r2(lookup.ranks[1]), dim(q1 * q2 * q3), left(q1 * q2), first(q1 * r1),
        middle(r1 * q2 * r2), last(r2 * q3),
        together(q1 >= kTogetherRows ? 1 : kTogetherRows / q1) {}
};

// Digits of an id.
struct Digits {
  int64_t first, middle, last;
};

// Floats of scratch a call of a kernel needs.
inline int64_t scratch_floats(const Sizes& sizes) {
  constexpr int64_t kRoundedUp = 64;
  return sizes.together * (2 * sizes.first + 2 * sizes.left * sizes.r2) + sizes.middle +
         sizes.r2 * (sizes.left + kRoundedUp) + 8 * kRoundedUp;
}

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)

  // rows[u * dim] for first <= u < last; `digits` rise by middle, first and last digit.
  void (*forward)(const Lookup&, const Sizes&, const Digits* digits, int64_t first, int64_t last,
                  float* rows, float* scratch);
  // Adds to gradients of slices. Slices of the last core, [q3, r2], and their gradients are transposed.
  void (*backward)(const Lookup&, const Sizes&, const Digits* digits, int64_t first, int64_t last,
                   const float* last_turned, const float* row_gradients, float* first_gradient,
                   float* middle_gradient, float* last_gradient, float* scratch);
  // to[columns, to_row] of from[rows, from_row].
  void (*transpose)(int64_t rows, int64_t columns, const float* from, int64_t from_row, float* to,
                    int64_t to_row);
  // y += factor * x.
  void (*add)(int64_t dim, float factor, const float* x, float* y);
};

}  // namespace tt
}  // namespace slipstream
