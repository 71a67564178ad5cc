// What every dropout kernel is: y = keep ? scale * x : 0, with `keep` made from the seed alone.
//
// Elements are numbered in memory order. Batch b is elements 64 b to 64 b + 63 and draws the eight
// Philox blocks 8 b to 8 b + 7 (see philox.h): 64 numbers of 16 bits. Elements 0 to 31 of the batch
// take words 0 and 1 of each block, the low half of each word first; elements 32 to 63 words 2 and
// 3. An element is dropped where its number is below the threshold's upper 16 bits. Where the two
// are equal, once in 65,536 elements, 16 more bits from the same place of another stream are
// compared with the lower 16: the probability is exact to 2^-32 at half the price of 32-bit numbers.

#pragma once

#include <cstdint>

namespace slipstream {
namespace dropout {

constexpr int64_t kBatch = 64;
constexpr int64_t kBlocks = 8;

struct Draw {
  uint32_t key[2];
  uint32_t counter[2];  // upper half of every block's counter
  uint32_t threshold;   // of 2^32, how many numbers drop
  float scale;
};

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)

  // `count` elements from batch `first` on; x may be y, else the two do not overlap.
  void (*float32)(const Draw&, int64_t first, int64_t count, const float* x, float* y);
  // Numbers are widened to float32, scaled, and rounded to nearest, ties to even.
  void (*bfloat16)(const Draw&, int64_t first, int64_t count, const uint16_t* x, uint16_t* y);
};

}  // namespace dropout
}  // namespace slipstream
