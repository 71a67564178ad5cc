// Weights of W bits stored densely (see dense_tiles.h), for AVX-512 BW.

#include "lowbit/byte_tiles_avx512bw.h"
#include "lowbit/byte_schemes.h"
#include "lowbit/dense_tiles.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = DenseTiles<BestBytes>;

}  // namespace

extern const Kernel dense_avx512bw = kernel_of<Scheme>(
    "dense", "avx512bw", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512, Scheme::kColumns, Scheme::spin);

}  // namespace lowbit
}  // namespace slipstream
