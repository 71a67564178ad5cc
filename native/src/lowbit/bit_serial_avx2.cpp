// Bit planes (see bit_serial.h), for AVX2.

#include "lowbit/bit_serial.h"

#include "lowbit/vector_avx2.h"
#include "slipstream/engine.h"

namespace slipstream {
namespace lowbit {
namespace {

using Scheme = BitSerial<Vector>;

}  // namespace

extern const Kernel bit_serial_avx2 =
    kernel_of<Scheme>("bit_serial", "avx2", SLIPSTREAM_CPU_AVX2, Scheme::kColumns);

}  // namespace lowbit
}  // namespace slipstream
