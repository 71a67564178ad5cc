// Weights of W bits stored densely (see dense_tiles.h), for AVX-VNNI: vectors of 256 bits with dot
// products, as client processors have them.

#include "lowbit/dots_avxvnni.h"
#include "lowbit/dot_tiles.h"
#include "lowbit/dense_tiles.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = DenseTiles<Dots>;

}  // namespace

extern const Kernel dense_avxvnni = kernel_of<Scheme>(
    "dense", "avxvnni", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX_VNNI, Scheme::kColumns,
    Scheme::spin);

}  // namespace lowbit
}  // namespace slipstream
