// Sixteen numbers in one, two or four registers of the instruction set.
//
// The compiler's own vectors of 64 bytes would do where a register has as many. Where it has fewer,
// compilers take comparisons and choices apart, number by number: twenty times slower.

#pragma once

#include <cstdint>
#include <cstring>

#include "compress/kernel.h"
#include "registers.h"

namespace slipstream {
namespace compress {
namespace {

constexpr int kParts = kLanes * 4 / kVectorBytes;

typedef float FloatPart __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntPart __attribute__((vector_size(kVectorBytes)));
typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

template <typename Part>
struct Wide {
  Part part[kParts];
};
typedef Wide<FloatPart> Floats;
typedef Wide<IntPart> Ints;

#define SLIPSTREAM_INLINE inline __attribute__((always_inline))

// `at(p)` is part p of the result.
template <typename Result, typename At>
SLIPSTREAM_INLINE Result parts(At at) {
  Result made;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) made.part[p] = at(p);
  return made;
}

#define SLIPSTREAM_WIDE(sign)                                                   \
  template <typename P>                                                         \
  SLIPSTREAM_INLINE Wide<P> operator sign(const Wide<P>& a, const Wide<P>& b) { \
    return parts<Wide<P>>([&](int p) { return a.part[p] sign b.part[p]; });     \
  }                                                                             \
  template <typename P, typename Number>                                        \
  SLIPSTREAM_INLINE Wide<P> operator sign(const Wide<P>& a, Number b) {         \
    return parts<Wide<P>>([&](int p) { return a.part[p] sign b; });             \
  }                                                                             \
  template <typename P, typename Other>                                         \
  SLIPSTREAM_INLINE Wide<P>& operator sign##=(Wide<P>& a, const Other& b) {     \
    return a = a sign b;                                                        \
  }
SLIPSTREAM_WIDE(+)
SLIPSTREAM_WIDE(-)
SLIPSTREAM_WIDE(*)
SLIPSTREAM_WIDE(&)
SLIPSTREAM_WIDE(|)
SLIPSTREAM_WIDE(<<)
SLIPSTREAM_WIDE(>>)
#undef SLIPSTREAM_WIDE

template <typename Part>
SLIPSTREAM_INLINE Wide<Part> larger(const Wide<Part>& a, const Wide<Part>& b) {
  return parts<Wide<Part>>(
      [&](int p) { return a.part[p] > b.part[p] ? a.part[p] : b.part[p]; });
}

SLIPSTREAM_INLINE Floats load(const float* x) {
  return parts<Floats>(
      [&](int p) -> FloatPart { return reinterpret_cast<const Unaligned*>(x)[p]; });
}
SLIPSTREAM_INLINE void store(const Floats& v, float* x) {
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) reinterpret_cast<Unaligned*>(x)[p] = v.part[p];
}

// The first `count` of 16; what is not loaded is 0. Through memory of its own: what a whole vector
// shared with it would have to go there, too.
SLIPSTREAM_INLINE Floats load(const float* x, int64_t count) {
  if (count >= kLanes) return load(x);
  float lanes[kLanes] = {};
  std::memcpy(lanes, x, static_cast<size_t>(count) * sizeof *x);
  return load(lanes);
}
SLIPSTREAM_INLINE void store(const Floats& v, float* x, int64_t count) {
  if (count >= kLanes) return store(v, x);
  float lanes[kLanes];
  store(v, lanes);
  std::memcpy(x, lanes, static_cast<size_t>(count) * sizeof *x);
}

// x - 0 is x, -0 too.
SLIPSTREAM_INLINE Floats all(float number) {
  return parts<Floats>([&](int) { return number - FloatPart{}; });
}

SLIPSTREAM_INLINE Ints bits_of(const Floats& v) {
  return parts<Ints>([&](int p) { return reinterpret_cast<IntPart>(v.part[p]); });
}
SLIPSTREAM_INLINE Floats magnitude(const Floats& v) {
  const Ints bits = bits_of(v) & 0x7FFFFFFF;
  return parts<Floats>([&](int p) { return reinterpret_cast<FloatPart>(bits.part[p]); });
}
SLIPSTREAM_INLINE Floats to_floats(const Ints& v) {
  return parts<Floats>([&](int p) { return __builtin_convertvector(v.part[p], FloatPart); });
}

// Of 16 lanes.
template <typename Number>
inline Number sum_of(Number* lanes) {
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}
inline float sum_of(const Floats& v) {
  float lanes[kLanes];
  store(v, lanes);
  return sum_of(lanes);
}

// In pairs, not sequentially: a small block would wait for 16 consecutive comparisons.
SLIPSTREAM_INLINE float largest_of(const Floats& v) {
  constexpr int kWidth = kLanes / kParts;
  FloatPart most = v.part[0];
  for (int p = 1; p < kParts; ++p) most = v.part[p] > most ? v.part[p] : most;
  float lanes[kWidth];
  std::memcpy(lanes, &most, sizeof lanes);
#pragma GCC unroll 4
  for (int half = kWidth / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int lane = 0; lane < half; ++lane)
      lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
  return lanes[0];
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
