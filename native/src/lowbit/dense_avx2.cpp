// Weights of W bits stored densely (see dense_tiles.h), for AVX2.

#include "lowbit/byte_tiles_avx2.h"
#include "lowbit/byte_schemes.h"
#include "lowbit/dense_tiles.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = DenseTiles<BestBytes>;

}  // namespace

extern const Kernel dense_avx2 = kernel_of<Scheme>(
    "dense", "avx2", SLIPSTREAM_CPU_AVX2, Scheme::kColumns, Scheme::spin);

}  // namespace lowbit
}  // namespace slipstream
