#include "accelerator/streams.inc"

namespace slipstream {
namespace accelerator {
STREAMS(streams_scalar, "scalar")
}  // namespace accelerator
}  // namespace slipstream
