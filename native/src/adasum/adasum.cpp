// Which kernels this build has, and the door to them.

#include "slipstream/adasum.h"

#include "adasum/kernel.h"

namespace slipstream {
namespace adasum {

#define KERNELS "adasum_kernels.inc"
#include "registry.inc"

namespace {

bool sensible(int32_t kernel, int32_t dtype, int64_t workers, int64_t layers) {
  return known(kernel) && workers > 0 && layers >= 0 &&
         (dtype == SLIPSTREAM_ADASUM_FLOAT32 || dtype == SLIPSTREAM_ADASUM_FLOAT64);
}

}  // namespace
}  // namespace adasum
}  // namespace slipstream

using namespace slipstream::adasum;

extern "C" {

int32_t slipstream_adasum_kernel_count(void) { return kCount; }

const char* slipstream_adasum_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_adasum_products(int32_t kernel, int32_t dtype, const void* const* rows,
                                   int64_t workers, const int64_t* starts, int64_t layers,
                                   double* products) {
  if (!sensible(kernel, dtype, workers, layers)) return 1;
  const Kernel& chosen = *kKernels[kernel];
  for (int64_t l = 0; l < layers; ++l) {
    double* out = products + l * workers * workers;
    if (dtype == SLIPSTREAM_ADASUM_FLOAT32)
      chosen.products32(reinterpret_cast<const float* const*>(rows), workers, starts[l],
                        starts[l + 1], out);
    else
      chosen.products64(reinterpret_cast<const double* const*>(rows), workers, starts[l],
                        starts[l + 1], out);
  }
  return 0;
}

int32_t slipstream_adasum_combine(int32_t kernel, int32_t dtype, const void* const* rows,
                                  int64_t workers, const int64_t* starts, int64_t layers,
                                  const double* weights, void* out) {
  if (!sensible(kernel, dtype, workers, layers)) return 1;
  const Kernel& chosen = *kKernels[kernel];
  for (int64_t l = 0; l < layers; ++l) {
    const double* weight = weights + l * workers;
    if (dtype == SLIPSTREAM_ADASUM_FLOAT32)
      chosen.combine32(reinterpret_cast<const float* const*>(rows), workers, starts[l],
                       starts[l + 1], weight, static_cast<float*>(out));
    else
      chosen.combine64(reinterpret_cast<const double* const*>(rows), workers, starts[l],
                       starts[l + 1], weight, static_cast<double*>(out));
  }
  return 0;
}

}  // extern "C"
