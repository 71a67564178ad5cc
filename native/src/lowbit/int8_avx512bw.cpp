// Products of bytes, each widened immediately (see byte_schemes.h), for AVX-512 BW.

#include "lowbit/byte_tiles_avx512bw.h"
#include "lowbit/byte_schemes.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = Bytes<Int8>;

}  // namespace

extern const Kernel int8_avx512bw = kernel_of<Scheme>(
    "int8", "avx512bw", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512, Scheme::kColumns);

}  // namespace lowbit
}  // namespace slipstream
