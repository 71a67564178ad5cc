// Which kernels this build has.

#include "lowbit/registry.h"

#include "slipstream/lowbit.h"

namespace slipstream {
namespace lowbit {

#define KERNELS "lowbit_kernels.inc"
#include "registry.inc"

const Kernel* find(int32_t index) {
  return known(index) ? kKernels[index] : nullptr;
}

}  // namespace lowbit
}  // namespace slipstream

using slipstream::lowbit::find;

extern "C" {

int32_t slipstream_lowbit_kernel_count(void) { return slipstream::lowbit::kCount; }

const char* slipstream_lowbit_scheme(int32_t kernel) {
  return find(kernel) == nullptr ? "" : find(kernel)->scheme;
}

const char* slipstream_lowbit_level(int32_t kernel) {
  return find(kernel) == nullptr ? "" : find(kernel)->level;
}

uint32_t slipstream_lowbit_features(int32_t kernel) {
  return find(kernel) == nullptr ? ~0u : find(kernel)->features;
}

int32_t slipstream_lowbit_supports(int32_t kernel, int32_t wbits, int32_t abits) {
  if (find(kernel) == nullptr || wbits < 1 || wbits > 8 || abits < 1 || abits > 8) return 0;
  return find(kernel)->supports(wbits, abits);
}

int64_t slipstream_lowbit_spin(int32_t kernel, int64_t rounds) {
  const auto* found = find(kernel);
  return found == nullptr || found->spin == nullptr ? 0 : found->spin(rounds);
}

}  // extern "C"
