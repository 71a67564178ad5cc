// Products of bytes added up in 16 bits while they fit (see byte_schemes.h), for AVX2.

#include "lowbit/byte_tiles_avx2.h"
#include "lowbit/byte_schemes.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = Bytes<Deferred>;

}  // namespace

extern const Kernel deferred_avx2 =
    kernel_of<Scheme>("deferred", "avx2", SLIPSTREAM_CPU_AVX2, Scheme::kColumns);

}  // namespace lowbit
}  // namespace slipstream
