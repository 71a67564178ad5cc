// Philox 4x32 for one block, and the code that all kernels share. Included by each kernel file,
// which compiles its own copy for its instruction set.
//
// Seven rounds, the minimum that passes BigCrush, suffice for dropout.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

#pragma once

#include <cstring>

#include "dropout/kernel.h"

namespace slipstream {
namespace dropout {
namespace {

constexpr int kRounds = 7;
constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
// Of a block's number; set in the stream of the lower 16 bits.
constexpr uint64_t kLowerBits = uint64_t{1} << 63;

inline void philox(const Draw& draw, uint64_t block, uint32_t word[4]) {
  uint32_t key0 = draw.key[0], key1 = draw.key[1];
  word[0] = static_cast<uint32_t>(block);
  word[1] = static_cast<uint32_t>(block >> 32);
  word[2] = draw.counter[0];
  word[3] = draw.counter[1];
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * word[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * word[2];
    word[0] = static_cast<uint32_t>(product1 >> 32) ^ word[1] ^ key0;
    word[1] = static_cast<uint32_t>(product1);
    word[2] = static_cast<uint32_t>(product0 >> 32) ^ word[3] ^ key1;
    word[3] = static_cast<uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

// Of the elements of a batch whose upper bits are equal to the threshold's, those that are kept.
uint64_t kept_of_equal(const Draw& draw, int64_t batch, uint64_t equal) {
  uint64_t kept = 0;
  for (int element = 0; element < kBatch; ++element) {
    if ((equal >> element & 1) == 0) continue;
    const int place = element % 32;
    uint32_t word[4];
    philox(draw, kLowerBits | static_cast<uint64_t>(batch * kBlocks + place / 4), word);
    const uint32_t number = word[element / 32 * 2 + place % 4 / 2] >> (place % 2 * 16) & 0xFFFF;
    if (number >= (draw.threshold & 0xFFFF)) kept |= uint64_t{1} << element;
  }
  return kept;
}

// Asks for memory that is read and written soon. Drawing takes so long that a processor's own
// prefetching falls behind: without it, numbers from memory took three times as long on Zen 5.
template <typename T>
inline void fetch_ahead(const T* x, T* y) {
  constexpr uintptr_t kAhead = 4096;  // bytes; addresses beyond the arrays do no harm
  for (uintptr_t byte = 0; byte < kBatch * sizeof(T); byte += 64) {
    __builtin_prefetch(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(x) + kAhead + byte), 0);
    __builtin_prefetch(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(y) + kAhead + byte), 1);
  }
}

inline float widened(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// What is not a number stays so: products have no bits that a carry could start from.
inline uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// A kernel's loop over whole batches, and again for the remainder.
template <typename T, void (*kWhole)(const Draw&, int64_t first, int64_t batches, const T* x, T* y)>
void each_batch(const Draw& draw, int64_t first, int64_t count, const T* x, T* y) {
  const int64_t batches = count / kBatch, left = count % kBatch;
  kWhole(draw, first, batches, x, y);
  if (left == 0) return;
  T padded[kBatch] = {};
  std::memcpy(padded, x + batches * kBatch, static_cast<size_t>(left) * sizeof(T));
  kWhole(draw, first + batches, 1, padded, padded);
  std::memcpy(y + batches * kBatch, padded, static_cast<size_t>(left) * sizeof(T));
}

}  // namespace
}  // namespace dropout
}  // namespace slipstream
