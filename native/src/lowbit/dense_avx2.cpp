// Weights of W bits stored densely (see dense_bytes.h), for AVX2.

#include "lowbit/byte_tiles_avx2.h"
#include "lowbit/vector_avx2.h"
#include "lowbit/dense_bytes.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = DenseBytes;

}  // namespace

extern const Kernel dense_avx2 = kernel_of<Scheme>(
    "dense", "avx2", SLIPSTREAM_CPU_AVX2, Scheme::kColumns, Scheme::spin);

}  // namespace lowbit
}  // namespace slipstream
