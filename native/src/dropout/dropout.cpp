// Which kernels this build has, and the loop over threads.

#include "slipstream/dropout.h"

#include "dropout/kernel.h"
#include "threads.h"

namespace slipstream {
namespace dropout {

#define KERNELS "dropout_kernels.inc"
#include "registry.inc"

namespace {

// Elements that a thread takes at a time: a few microseconds of work.
constexpr int64_t kChunk = 1 << 16;

struct Task {
  const Kernel& kernel;
  const Draw& draw;
  int32_t dtype;
  int64_t count;
  const void* x;
  void* y;
};

void chunk(void* context, int64_t index) {
  const Task& task = *static_cast<const Task*>(context);
  const int64_t begin = index * kChunk;
  const int64_t count = task.count - begin < kChunk ? task.count - begin : kChunk;
  if (task.dtype == SLIPSTREAM_FLOAT32)
    task.kernel.float32(task.draw, begin / kBatch, count, static_cast<const float*>(task.x) + begin,
                        static_cast<float*>(task.y) + begin);
  else
    task.kernel.bfloat16(task.draw, begin / kBatch, count,
                         static_cast<const uint16_t*>(task.x) + begin,
                         static_cast<uint16_t*>(task.y) + begin);
}

}  // namespace
}  // namespace dropout
}  // namespace slipstream

using namespace slipstream::dropout;

extern "C" {

int32_t slipstream_dropout_kernel_count(void) { return kCount; }

const char* slipstream_dropout_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_dropout(int32_t kernel, int32_t dtype, const void* x, void* y, int64_t count,
                           const uint64_t* seed, uint32_t threshold, float scale,
                           int32_t threads) {
  if (!known(kernel) || count < 0 || (dtype != SLIPSTREAM_FLOAT32 && dtype != SLIPSTREAM_BFLOAT16))
    return SLIPSTREAM_INVALID;
  const Draw draw = {{static_cast<uint32_t>(seed[0]), static_cast<uint32_t>(seed[0] >> 32)},
                     {static_cast<uint32_t>(seed[1]), static_cast<uint32_t>(seed[1] >> 32)},
                     threshold,
                     scale};
  Task task = {*kKernels[kernel], draw, dtype, count, x, y};
  slipstream::parallel_for((count + kChunk - 1) / kChunk, threads, chunk, &task);
  return SLIPSTREAM_OK;
}

}  // extern "C"
