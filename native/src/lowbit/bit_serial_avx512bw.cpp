// Bit planes (see bit_serial.h), for AVX-512 BW.

#include "lowbit/bit_serial.h"

#include "lowbit/vector_avx512bw.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = BitSerial<Vector>;

}  // namespace

extern const Kernel bit_serial_avx512bw = kernel_of<Scheme>(
    "bit_serial", "avx512bw", SLIPSTREAM_CPU_AVX2 | SLIPSTREAM_CPU_AVX512, Scheme::kColumns);

}  // namespace lowbit
}  // namespace slipstream
