// Blocks of signs, bytes and nibbles. A level says how lanes go to bits and back (`at_least`,
// `choose`) and to bytes and back (`put_bytes`, `from_bytes`), which the compiler's vectors cannot.

#pragma once

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

// residual += gradient; `each` sees the sum's magnitudes.
template <typename Each>
SLIPSTREAM_INLINE void accumulate(const Block block, Each each) {
  for (int64_t i = 0; i < block.length; i += kLanes) {
    const int64_t left = block.length - i;
    const Floats sum = load(block.residual + i, left) + load(block.gradient + i, left);
    store(sum, block.residual + i, left);
    each(magnitude(sum));
  }
}

float encode_signs(Block block) {
  Floats total = {};
  accumulate(block, [&](const Floats& sizes) { total += sizes; });
  const float scale = sum_of(total) / static_cast<float>(block.length);
  const Floats plus = all(scale), minus = all(-scale);
  for (int64_t i = 0; i < block.length; i += kLanes) {
    const int64_t left = block.length - i;
    const Floats value = load(block.residual + i, left);
    const uint16_t bits = at_least(value, Floats{});
    std::memcpy(block.codes + i / 8, &bits, sizeof bits);
    store(value - choose(bits, plus, minus), block.residual + i, left);
  }
  // Codes come in whole groups; the last half of one may be empty.
  if ((block.length + kLanes - 1) / kLanes % 2)
    std::memset(block.codes + (block.length + kLanes - 1) / kLanes * 2, 0, 2);
  return scale;
}

// `at(i)` are the numbers from i on.
template <typename At>
SLIPSTREAM_INLINE void decode(int64_t length, bool add, float* out, At at) {
  for (int64_t i = 0; i < length; i += kLanes) {
    const int64_t left = length - i;
    const Floats value = at(i);
    store(add ? value + load(out + i, left) : value, out + i, left);
  }
}

void decode_signs(const uint8_t* codes, float scale, int64_t length, bool add, float* out) {
  const Floats plus = all(scale), minus = all(-scale);
  decode(length, add, out, [&](int64_t i) {
    uint16_t bits;
    std::memcpy(&bits, codes + i / 8, sizeof bits);
    return choose(bits, plus, minus);
  });
}

// The next bfloat16 at or above: no code exceeds its largest by more than a rounding.
inline float scale_of(float most, float largest) {
  const float exact = most / largest;
  uint32_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  bits = (bits + 0xFFFF) & 0xFFFF0000;
  float scale;
  std::memcpy(&scale, &bits, sizeof bits);
  return scale;
}

struct Rounding {
  // Added, it rounds to the nearest whole number, ties to even, which the low bits then are.
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  float scale, inverse;

  // The codes of `value`, which becomes what they leave of it. None exceeds the largest, since the
  // scale is not below the largest magnitude's.
  SLIPSTREAM_INLINE Ints operator()(Floats& value) const {
    const Floats rounded = value * inverse + kMagic;
    value -= (rounded - kMagic) * scale;
    return bits_of(rounded);
  }
};

template <typename Put>
SLIPSTREAM_INLINE float encode_codes(const Block block, float largest, Put put) {
  Floats most = {};
  accumulate(block, [&](const Floats& sizes) { most = larger(sizes, most); });
  const float scale = scale_of(largest_of(most), largest);
  // A scale whose inverse is infinite belongs to numbers that are as good as zero.
  const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
  const Rounding rounding = {inverse > 0.0f ? scale : 0.0f, inverse};
  const auto codes = [&](int64_t from) __attribute__((always_inline)) -> Ints {
    const int64_t left = block.length - from;
    if (left <= 0) return Ints{};
    Floats value = load(block.residual + from, left);
    const Ints found = rounding(value);
    store(value, block.residual + from, left);
    return found;
  };
  for (int64_t i = 0; i < block.length; i += kGroup) {
    const Ints low = codes(i);
    put(i, low, codes(i + kLanes));
  }
  return rounding.scale;
}

float encode_bytes(Block block) {
  return encode_codes(block, 127.0f, [&](int64_t i, const Ints& low, const Ints& high) {
    put_bytes(low, block.codes + i);
    put_bytes(high, block.codes + i + kLanes);
  });
}

// Of a group, the first half in the low nibbles of its bytes, the second in the high ones.
float encode_nibbles(Block block) {
  return encode_codes(block, 7.0f, [&](int64_t i, const Ints& low, const Ints& high) {
    put_bytes((low & 15) | (high << 4), block.codes + i / 2);
  });
}

void decode_bytes(const uint8_t* codes, float scale, int64_t length, bool add, float* out) {
  decode(length, add, out,
         [&](int64_t i) { return to_floats(from_bytes(codes + i)) * scale; });
}

void decode_nibbles(const uint8_t* codes, float scale, int64_t length, bool add, float* out) {
  decode(length, add, out, [&](int64_t i) {
    const Ints both = from_bytes(codes + i / kGroup * kLanes);
    return to_floats(i % kGroup ? both >> 4 : (both << 28) >> 28) * scale;
  });
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
