// For any processor.

#include <cstdint>

namespace slipstream {
namespace tt {
namespace {

struct Floats {
  static constexpr int64_t kWidth = 4;
  float x[kWidth];

  static Floats load(const float* from) { return {{from[0], from[1], from[2], from[3]}}; }
  static Floats all(float x) { return {{x, x, x, x}}; }
  void store(float* to) const {
    for (int i = 0; i < kWidth; ++i) to[i] = x[i];
  }
  Floats times_plus(Floats y, Floats z) const {
    for (int i = 0; i < kWidth; ++i) z.x[i] = __builtin_fmaf(x[i], y.x[i], z.x[i]);
    return z;
  }
  static void transpose(Floats* square) {
    for (int i = 0; i < kWidth; ++i)
      for (int j = 0; j < i; ++j) {
        const float x = square[i].x[j];
        square[i].x[j] = square[j].x[i];
        square[j].x[i] = x;
      }
  }
  // to[i * stride + c] = columns[c] at i.
  static void store_by_fours(const Floats* columns, float* to, int64_t stride) {
    for (int i = 0; i < kWidth; ++i)
      for (int c = 0; c < 4; ++c) to[i * stride + c] = columns[c].x[i];
  }
};

constexpr int kTileVectors = 2;

}  // namespace
}  // namespace tt
}  // namespace slipstream

#include "tt/products.h"

namespace slipstream {
namespace tt {

extern const Kernel tt_scalar;
const Kernel tt_scalar = {"scalar", forward, backward, transpose, add};

}  // namespace tt
}  // namespace slipstream
