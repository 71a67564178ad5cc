// Blocks of signs, bytes and nibbles. A level says how signs go to bits and back (`bits_of`,
// `choose`), which the compiler's vectors cannot.

#pragma once

#include "compress/vectors.h"

namespace slipstream {
namespace compress {
namespace {

// residual += gradient; `each` sees the sum's magnitudes.
template <typename Each>
inline void accumulate(const Block& block, Each each) {
  const int64_t whole = block.length / kLanes * kLanes, rest = block.length - whole;
  Floats gradient, sum;
  for (int64_t i = 0; i < whole; i += kLanes) {
    load(gradient, block.gradient + i);
    load(sum, block.residual + i);
    sum += gradient;
    store(sum, block.residual + i);
    magnitude(sum);
    each(sum);
  }
  if (rest == 0) return;
  load(gradient, block.gradient + whole, rest);
  load(sum, block.residual + whole, rest);
  sum += gradient;
  store(sum, block.residual + whole, rest);
  magnitude(sum);
  each(sum);
}

float encode_signs(const Block& block) {
  Floats total = {};
  accumulate(block, [&](const Floats& sizes) { total += sizes; });
  const float scale = sum_of<Floats, float>(total) / static_cast<float>(block.length);
  const Floats plus = Floats{} + scale, minus = -plus;
  for (int64_t i = 0; i < block.length; i += kLanes) {
    const int64_t left = block.length - i;
    Floats value, sent;
    left >= kLanes ? load(value, block.residual + i) : load(value, block.residual + i, left);
    const uint16_t bits = bits_of(value);
    std::memcpy(block.codes + i / 8, &bits, sizeof bits);
    choose(sent, bits, plus, minus);
    value -= sent;
    left >= kLanes ? store(value, block.residual + i) : store(value, block.residual + i, left);
  }
  // Codes come in whole groups; the last half of one may be empty.
  if ((block.length + kLanes - 1) / kLanes % 2)
    std::memset(block.codes + (block.length + kLanes - 1) / kLanes * 2, 0, 2);
  return scale;
}

template <typename Decode>
inline void decode(int64_t length, bool add, float* out, Decode at) {
  for (int64_t i = 0; i < length; i += kLanes) {
    const int64_t left = length - i;
    Floats value, before;
    at(i, value);
    if (add) {
      left >= kLanes ? load(before, out + i) : load(before, out + i, left);
      value += before;
    }
    left >= kLanes ? store(value, out + i) : store(value, out + i, left);
  }
}

void decode_signs(const uint8_t* codes, float scale, int64_t length, bool add, float* out) {
  const Floats plus = Floats{} + scale, minus = -plus;
  decode(length, add, out, [&](int64_t i, Floats& value) {
    uint16_t bits;
    std::memcpy(&bits, codes + i / 8, sizeof bits);
    choose(value, bits, plus, minus);
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
  void operator()(Floats& value, Ints& codes) const {
    const Floats rounded = value * inverse + kMagic;
    std::memcpy(&codes, &rounded, sizeof codes);
    value -= (rounded - kMagic) * scale;
  }
};

template <typename Put>
inline float encode_codes(const Block& block, float largest, Put put) {
  Floats most = {};
  accumulate(block, [&](const Floats& sizes) { most = sizes > most ? sizes : most; });
  const float scale = scale_of(largest_of(most), largest);
  // A scale whose inverse is infinite belongs to numbers that are as good as zero.
  const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
  const Rounding rounding = {inverse > 0.0f ? scale : 0.0f, inverse};
  for (int64_t i = 0; i < block.length; i += kGroup) {
    Floats value;
    Ints codes[2] = {};
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = i + half * kLanes, left = block.length - at;
      if (left <= 0) break;
      left >= kLanes ? load(value, block.residual + at) : load(value, block.residual + at, left);
      rounding(value, codes[half]);
      left >= kLanes ? store(value, block.residual + at) : store(value, block.residual + at, left);
    }
    put(i, codes);
  }
  return rounding.scale;
}

float encode_bytes(const Block& block) {
  return encode_codes(block, 127.0f, [&](int64_t i, const Ints* codes) {
    const Bytes low = __builtin_convertvector(codes[0], Bytes);
    const Bytes high = __builtin_convertvector(codes[1], Bytes);
    std::memcpy(block.codes + i, &low, sizeof low);
    std::memcpy(block.codes + i + kLanes, &high, sizeof high);
  });
}

// Of a group, the first half in the low nibbles of its bytes, the second in the high ones.
float encode_nibbles(const Block& block) {
  return encode_codes(block, 7.0f, [&](int64_t i, const Ints* codes) {
    const Ints nibbles = (codes[0] & 15) | (codes[1] << 4);
    const Bytes both = __builtin_convertvector(nibbles, Bytes);
    std::memcpy(block.codes + i / 2, &both, sizeof both);
  });
}

void decode_bytes(const uint8_t* codes, float scale, int64_t length, bool add, float* out) {
  decode(length, add, out, [&](int64_t i, Floats& value) {
    Bytes whole;
    std::memcpy(&whole, codes + i, sizeof whole);
    value = __builtin_convertvector(__builtin_convertvector(whole, Ints), Floats) * scale;
  });
}

void decode_nibbles(const uint8_t* codes, float scale, int64_t length, bool add, float* out) {
  decode(length, add, out, [&](int64_t i, Floats& value) {
    Bytes both;
    std::memcpy(&both, codes + i / kGroup * kLanes, sizeof both);
    const Ints wide = __builtin_convertvector(both, Ints);
    value = __builtin_convertvector(i % kGroup ? wide >> 4 : (wide << 28) >> 28, Floats) * scale;
  });
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
