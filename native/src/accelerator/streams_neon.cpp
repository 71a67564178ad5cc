#include "accelerator/streams.inc"

namespace slipstream {
namespace accelerator {
STREAMS(streams_neon, "neon")
}  // namespace accelerator
}  // namespace slipstream
