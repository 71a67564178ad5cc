// Sixteen numbers at once, in the compiler's vectors: one register, two or four, as the level has.

#pragma once

#include <cstdint>
#include <cstring>

#include "compress/kernel.h"

namespace slipstream {
namespace compress {
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(128)));
typedef int8_t Bytes __attribute__((vector_size(16)));

// By reference: a vector wider than the level's registers has no agreed way to be passed by value.
inline void load(Floats& v, const float* x) { std::memcpy(&v, x, sizeof v); }
inline void store(const Floats& v, float* x) { std::memcpy(x, &v, sizeof v); }

inline void load(Floats& v, const float* x, int64_t count) {
  v = Floats{};
  std::memcpy(&v, x, static_cast<size_t>(count) * sizeof *x);
}
inline void store(const Floats& v, float* x, int64_t count) {
  std::memcpy(x, &v, static_cast<size_t>(count) * sizeof *x);
}

inline void magnitude(Floats& v) {
  Ints bits;
  std::memcpy(&bits, &v, sizeof v);
  bits &= 0x7FFFFFFF;
  std::memcpy(&v, &bits, sizeof v);
}

template <typename Vector, typename Number>
inline Number sum_of(const Vector& v) {
  Number lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline float largest_of(const Floats& v) {
  float lanes[kLanes], most = 0.0f;
  std::memcpy(lanes, &v, sizeof v);
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
