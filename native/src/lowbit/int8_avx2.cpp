// Products of bytes, each widened immediately (see byte_schemes.h), for AVX2.

#include "lowbit/byte_tiles_avx2.h"
#include "lowbit/byte_schemes.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = Bytes<Int8>;

}  // namespace

extern const Kernel int8_avx2 =
    kernel_of<Scheme>("int8", "avx2", SLIPSTREAM_CPU_AVX2, Scheme::kColumns);

}  // namespace lowbit
}  // namespace slipstream
