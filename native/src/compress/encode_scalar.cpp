// For any processor: the compiler's vectors as its baseline has them.

#include "compress/choose.h"

namespace slipstream {
namespace compress {
namespace {

inline uint16_t bits_of(const Floats& value) {
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= uint32_t{value[lane] >= 0.0f} << lane;
  return static_cast<uint16_t>(bits);
}

inline uint32_t above_of(const Floats& size, const Floats& least) {
  const Ints found = size >= least;
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    lanes |= static_cast<uint32_t>(found[lane] & 1) << lane;
  return lanes;
}

}  // namespace
}  // namespace compress
}  // namespace slipstream

#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_scalar, "scalar")
