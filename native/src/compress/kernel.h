// What a kernel of compressed gradients is; see include/slipstream/compress.h for what each does.
//
// Sums run over 16 lanes, lane l taking the numbers l, l + 16, ... in order; lanes are added in
// halves: l and l + 8, then l and l + 4, ... No product is fused with a sum. So every level gives
// the same bits, and so do replicas on unlike processors.

#pragma once

#include <cstdint>

namespace slipstream {
namespace compress {

constexpr int64_t kLanes = 16;
// Codes are stored for whole groups of this many numbers.
constexpr int64_t kGroup = 32;
// Bits of 2^100: sums of 2^27 numbers below it, and their scales, stay finite.
constexpr uint32_t kLargest = 227u << 23;

struct Block {
  int64_t length;
  const float* gradient;
  float* residual;
  uint8_t* codes;
};

struct Kernel {
  const char* level;  // a value of InstructionSet (slipstream/native/instruction_set.py)

  bool (*finite)(const float* x, int64_t count);

  // Encodes one block and returns its scale.
  float (*encode_signs)(Block block);
  float (*encode_bytes)(Block block);
  float (*encode_nibbles)(Block block);
  void (*decode_signs)(const uint8_t* codes, float scale, int64_t length, bool add, float* out);
  void (*decode_bytes)(const uint8_t* codes, float scale, int64_t length, bool add, float* out);
  void (*decode_nibbles)(const uint8_t* codes, float scale, int64_t length, bool add, float* out);

  // residual += gradient (where there is one), and what is at least `threshold` in magnitude, up to
  // `capacity` of it: how many there are.
  int64_t (*above)(const float* gradient, float* residual, int64_t count, float threshold,
                   int64_t capacity, int32_t* indices, float* values);

  void (*project)(const float* gradient, float* residual, int64_t rows, int64_t columns,
                  int32_t rank, const float* q, float* p);
  void (*orthonormalise)(float* p, int64_t rows, int32_t rank);
  void (*project_back)(const float* residual, int64_t rows, int64_t columns, int32_t rank,
                       const float* p, float* q);
  void (*reconstruct)(const float* p, const float* q, int64_t rows, int64_t columns, int32_t rank,
                      float* residual, float* out);
};

}  // namespace compress
}  // namespace slipstream
