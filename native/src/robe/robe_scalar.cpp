// For any processor.

#include <cstdint>

namespace slipstream {
namespace robe {
namespace {

struct Floats {
  static constexpr int64_t kWidth = 4;
  float x[kWidth];

  static Floats load(const float* from) { return {{from[0], from[1], from[2], from[3]}}; }
  static Floats all(float x) { return {{x, x, x, x}}; }
  void store(float* to) const {
    for (int i = 0; i < kWidth; ++i) to[i] = x[i];
  }
  // Past the caches; to an address that is a multiple of the vector's size.
  void stream(float* to) const { store(to); }
  // Before other threads may read streamed data.
  static void streamed() {}
  Floats plus(Floats y) const {
    for (int i = 0; i < kWidth; ++i) y.x[i] = x[i] + y.x[i];
    return y;
  }
  Floats times(Floats y) const {
    for (int i = 0; i < kWidth; ++i) y.x[i] = x[i] * y.x[i];
    return y;
  }
  // Of the two the second only where it is larger.
  Floats larger(Floats y) const {
    for (int i = 0; i < kWidth; ++i) y.x[i] = y.x[i] > x[i] ? y.x[i] : x[i];
    return y;
  }
  Floats negated(uint64_t bits) const {
    Floats y;
    for (int i = 0; i < kWidth; ++i) y.x[i] = bits >> i & 1 ? -x[i] : x[i];
    return y;
  }
};

}  // namespace
}  // namespace robe
}  // namespace slipstream

#include "robe/rows.h"

namespace slipstream {
namespace robe {

extern const Kernel robe_scalar;
const Kernel robe_scalar = {"scalar", forward, backward, weight_gradient_of};

}  // namespace robe
}  // namespace slipstream
