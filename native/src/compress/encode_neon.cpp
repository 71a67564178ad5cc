// AArch64 with NEON, which its baseline has: four registers of four.

#include "compress/choose.h"

namespace slipstream {
namespace compress {
namespace {

inline uint32_t lanes_of(const Ints& found) {
  const Ints place = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                      1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return static_cast<uint32_t>(sum_of<Ints, int32_t>(found & place));
}

inline uint16_t bits_of(const Floats& value) {
  return static_cast<uint16_t>(lanes_of(value >= Floats{}));
}
inline uint32_t above_of(const Floats& size, const Floats& least) {
  return lanes_of(size >= least);
}
}  // namespace
}  // namespace compress
}  // namespace slipstream

#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_neon, "neon")
