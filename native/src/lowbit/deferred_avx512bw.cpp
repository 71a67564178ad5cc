// Products of bytes added up in 16 bits while they fit (see byte_schemes.h), for AVX-512 BW.

#include "lowbit/byte_tiles_avx512bw.h"
#include "lowbit/byte_schemes.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = Bytes<Deferred>;

}  // namespace

extern const Kernel deferred_avx512bw = kernel_of<Scheme>(
    "deferred", "avx512bw", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512, Scheme::kColumns);

}  // namespace lowbit
}  // namespace slipstream
