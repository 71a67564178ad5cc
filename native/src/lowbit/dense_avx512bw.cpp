// Weights of W bits stored densely (see dense_bytes.h), for AVX-512 BW.

#include "lowbit/byte_tiles_avx512bw.h"
#include "lowbit/vector_avx512bw.h"
#include "lowbit/dense_bytes.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = DenseBytes;

}  // namespace

extern const Kernel dense_avx512bw = kernel_of<Scheme>(
    "dense", "avx512bw", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512, Scheme::kColumns, Scheme::spin);

}  // namespace lowbit
}  // namespace slipstream
