// Which kernels this build has; the gathering of streams into blocks; single windows.

#include "slipstream/accelerator.h"

#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "accelerator/kernel.h"
#include "threads.h"

namespace slipstream {
namespace accelerator {

#define KERNELS "accelerator_kernels.inc"
#include "registry.inc"

namespace {

bool valid(const Frontend& front) {
  if (front.lanes < 4 || front.lanes > 64 || front.depth < 1 || front.depth > kDepth ||
      front.options < 1 || front.options > SLIPSTREAM_ACCELERATOR_OPTIONS || front.levels < 1 ||
      front.levels > 64)
    return false;
  for (int o = 0; o < front.options; ++o)
    if (front.row[o] < 0 || front.row[o] >= front.depth) return false;
  return true;
}

// Consecutive rows of a stream that are consecutive in memory.
struct Stretch {
  int64_t offset, count;
};

struct Task {
  const Kernel& kernel;
  const Frontend& front;
  const void* words;
  const int64_t* base;
  int64_t groups, length;
  int together, log_together;
  std::vector<Stretch> stretches;
  int64_t* out;
  std::atomic<bool> failed{false};

  template <class T>
  void block(int64_t number, Run<T> run) {
    const int per_block = kStreams / together;
    const int64_t first = number * per_block;
    const int64_t count = groups - first < per_block ? groups - first : per_block;
    const int64_t stride = (length + 2 * front.depth) * together;
    std::vector<T> rows(static_cast<size_t>(stride * per_block));
    int32_t cycles[kStreams];
    for (int64_t g = 0; g < count; ++g) {
      int64_t total = 0, most = 0;
      for (int s = 0; s < together; ++s) {
        const int64_t start = base[(first + g) * together + s];
        if (start < 0) continue;
        T* to = rows.data() + g * stride + s;
        int64_t nonzeros = 0;
        for (const Stretch& stretch : stretches) {
          const T* from = static_cast<const T*>(words) + start + stretch.offset;
          for (int64_t i = 0; i < stretch.count; ++i, to += together) {
            *to = from[i];
            nonzeros += __builtin_popcountll(from[i]);
          }
        }
        total += nonzeros;
        most = nonzeros > most ? nonzeros : most;
      }
      out[(first + g) * 3 + 1] = total;
      out[(first + g) * 3 + 2] = most;
    }
    run(front, rows.data(), length, cycles);
    for (int64_t g = 0; g < count; ++g) out[(first + g) * 3] = cycles[g];
  }
};

void block(void* context, int64_t number) {
  Task& task = *static_cast<Task*>(context);
  try {
    if (task.front.lanes <= 16)
      task.block(number, task.kernel.narrow[task.log_together]);
    else
      task.block(number, task.kernel.wide[task.log_together]);
  } catch (const std::bad_alloc&) {
    task.failed = true;
  }
}

}  // namespace
}  // namespace accelerator
}  // namespace slipstream

using namespace slipstream::accelerator;

extern "C" {

int32_t slipstream_accelerator_kernel_count(void) { return kCount; }

const char* slipstream_accelerator_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_accelerator_schedule(const Frontend* front, const uint64_t* window,
                                        int64_t count, uint8_t* selects, uint8_t* advance) {
  if (!valid(*front)) return SLIPSTREAM_INVALID;
  const int lanes = front->lanes;
  for (int64_t n = 0; n < count; ++n, window += front->depth, selects += lanes) {
    uint64_t z[kDepth] = {};
    std::memcpy(z, window, sizeof *window * static_cast<size_t>(front->depth));
    std::memset(selects, front->options, static_cast<size_t>(lanes));
    for (int level = 0; level < front->levels; ++level)
      for (int lane = 0; lane < lanes; ++lane) {
        if (!(front->level[level] >> lane & 1)) continue;
        for (int option = 0; option < front->options; ++option) {
          const int from = ((lane + front->shift[option]) % lanes + lanes) % lanes;
          uint64_t& row = z[front->row[option]];
          if (!(row >> from & 1)) continue;
          row &= ~(uint64_t{1} << from);
          selects[lane] = static_cast<uint8_t>(option);
          break;
        }
      }
    int by = 1;
    while (by < front->depth && z[by] == 0) ++by;
    advance[n] = static_cast<uint8_t>(by);
  }
  return SLIPSTREAM_OK;
}

int32_t slipstream_accelerator_cycles(int32_t kernel, const Frontend* front, const void* words,
                                      const int64_t* base, int64_t groups, int32_t together,
                                      const int64_t* offset, int64_t length, int64_t* out,
                                      int32_t threads) {
  int log_together = 0;
  while (log_together < 5 && 1 << log_together < together) ++log_together;
  if (!known(kernel) || !valid(*front) || groups < 0 || length < 0 ||
      length > INT32_MAX / kStreams || together != 1 << log_together)
    return SLIPSTREAM_INVALID;
  try {
    Task task{*kKernels[kernel], *front, words, base, groups, length, together, log_together, {},
              out};
    for (int64_t t = 0; t < length; ++t) {
      if (t > 0 && offset[t] == offset[t - 1] + 1)
        ++task.stretches.back().count;
      else
        task.stretches.push_back({offset[t], 1});
    }
    const int64_t per_block = kStreams / together;
    slipstream::parallel_for((groups + per_block - 1) / per_block, threads, block, &task);
    return task.failed ? SLIPSTREAM_NO_MEMORY : SLIPSTREAM_OK;
  } catch (const std::bad_alloc&) {
    return SLIPSTREAM_NO_MEMORY;
  }
}

}  // extern "C"
