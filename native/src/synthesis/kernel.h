// Functions of the list language, which src/slipstream/synthesis/language.py describes.

#pragma once

#include <cstdint>

#include "slipstream/synthesis.h"

namespace slipstream {
namespace synthesis {

constexpr int kFunctions = 41, kNumbers = 11;  // the first functions return numbers
constexpr int kMax = SLIPSTREAM_SYNTHESIS_LIST, kLanes = 32;
constexpr int kExamples = SLIPSTREAM_SYNTHESIS_EXAMPLES;
constexpr int kLow = -256, kHigh = 255;

// A value for each example. Lists are zero beyond their count.
struct alignas(64) Frame {
  int16_t list[kExamples][kLanes];
  int16_t count[kExamples];
  int16_t number[kExamples];
};

struct Arguments {
  const Frame *number, *last, *before;
};

// Writes the result for examples [begin, end); returns bits of those outside the range, whose
// result is 0 or empty.
using Function = uint32_t (*)(const Arguments&, Frame& to, int begin, int end);

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)
  Function functions[kFunctions];
};

}  // namespace synthesis
}  // namespace slipstream
