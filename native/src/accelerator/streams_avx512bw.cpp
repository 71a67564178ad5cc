#include "accelerator/streams.inc"

namespace slipstream {
namespace accelerator {
STREAMS(streams_avx512bw, "avx512bw")
}  // namespace accelerator
}  // namespace slipstream
