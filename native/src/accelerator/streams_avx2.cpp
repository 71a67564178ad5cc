#include "accelerator/streams.inc"

namespace slipstream {
namespace accelerator {
STREAMS(streams_avx2, "avx2")
}  // namespace accelerator
}  // namespace slipstream
