// For any processor.

#include "dropout/philox.h"

namespace slipstream {
namespace dropout {
namespace {

uint64_t kept(const Draw& draw, int64_t batch) {
  const uint32_t upper = draw.threshold >> 16;
  uint64_t above = 0, equal = 0;
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t word[4];
    philox(draw, static_cast<uint64_t>(batch * kBlocks + block), word);
    for (int half = 0; half < 8; ++half) {
      const uint32_t number = word[half / 2] >> (half % 2 * 16) & 0xFFFF;
      const int element = half / 4 * 32 + block * 4 + half % 4;
      above |= uint64_t{number > upper} << element;
      equal |= uint64_t{number == upper} << element;
    }
  }
  return equal == 0 ? above : above | kept_of_equal(draw, batch, equal);
}

inline float scaled(float x, float scale) { return x * scale; }
inline uint16_t scaled(uint16_t x, float scale) { return rounded(widened(x) * scale); }

template <typename T>
void whole(const Draw& draw, int64_t first, int64_t batches, const T* x, T* y) {
  for (int64_t i = 0; i < batches; ++i, x += kBatch, y += kBatch) {
    const uint64_t keep = kept(draw, first + i);
    for (int element = 0; element < kBatch; ++element)
      y[element] = keep >> element & 1 ? scaled(x[element], draw.scale) : T{0};
  }
}

}  // namespace

extern const Kernel dropout_scalar;
const Kernel dropout_scalar = {"scalar", each_batch<float, whole<float>>,
                               each_batch<uint16_t, whole<uint16_t>>};

}  // namespace dropout
}  // namespace slipstream
