// Lanes that skip zeros, as in TensorDash (Mahmoud et al., MICRO 2020, arXiv 2009.00748).
//
// Bit i of a row is set if the pair in lane i is effectual. The window holds `depth` rows. In each
// cycle the lanes of one level after the other take their first available option from the window;
// lanes of one level never compete. Row 0 always drains, as option 0 of each lane is its own pair
// there. Then the window advances by its empty leading rows; streams of a group advance together,
// by the minimum over the group.

#pragma once

#include <cstdint>

#include "slipstream/accelerator.h"

namespace slipstream {
namespace accelerator {

using Frontend = slipstream_accelerator_frontend;

constexpr int kStreams = 32;  // that a kernel schedules at a time
constexpr int kDepth = SLIPSTREAM_ACCELERATOR_DEPTH;

// Rows of 32 / R groups of R streams, rows[group][t][stream]; each group has `length` rows and 2
// depth rows of zeros. Writes the cycles of each group.
template <class T>
using Run = void (*)(const Frontend&, const T* rows, int64_t length, int32_t* cycles);

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)
  // By the binary logarithm of R.
  Run<uint16_t> narrow[6];
  Run<uint64_t> wide[6];
};

}  // namespace accelerator
}  // namespace slipstream
