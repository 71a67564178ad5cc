// Weights of W bits stored densely (see dense_tiles.h), for AVX-512 with VNNI but without the byte
// permutes of VBMI (Cascade Lake, Cooper Lake): unpacked by shifts and masks.

#include "lowbit/dots_avx512vnni.h"
#include "lowbit/dot_tiles.h"
#include "lowbit/dense_tiles.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = DenseTiles<Dots>;

}  // namespace

extern const Kernel dense_avx512vnni = kernel_of<Scheme>(
    "dense", "avx512vnni",
    SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512 | SLIPSTREAM_CPU_AVX512_VNNI, Scheme::kColumns,
    Scheme::spin);

}  // namespace lowbit
}  // namespace slipstream
