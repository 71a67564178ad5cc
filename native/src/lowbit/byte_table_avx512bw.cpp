// Table look-up with byte shuffles (see byte_table.h), for AVX-512 BW.

#include "lowbit/byte_table.h"

#include "lowbit/vector_avx512bw.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = ByteTable<Vector>;

}  // namespace

extern const Kernel byte_table_avx512bw = kernel_of<Scheme>(
    "byte_table", "avx512bw", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512, Scheme::kPanel);

}  // namespace lowbit
}  // namespace slipstream
