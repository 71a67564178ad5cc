// Table look-up with byte shuffles (see byte_table.h), for AVX2.

#include "lowbit/byte_table.h"

#include "lowbit/vector_avx2.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = ByteTable<Vector>;

}  // namespace

extern const Kernel byte_table_avx2 =
    kernel_of<Scheme>("byte_table", "avx2", SLIPSTREAM_CPU_AVX2, Scheme::kPanel);

}  // namespace lowbit
}  // namespace slipstream
