// Which kernels this build has, and how a batch is divided among workers.

#include "slipstream/scan.h"

#include <atomic>

#include "scan/kernel.h"
#include "threads.h"

namespace slipstream {
namespace scan {

#define KERNELS "scan_kernels.inc"
#include "registry.inc"

namespace {

// Widths are divided at whole cache lines of either precision.
constexpr int64_t kLine = 16;

struct Work {
  const Precision& precision;
  const Cell* cell;
  const Diagonal* diagonal;
  bool backward;
  std::atomic<bool> failed{false};
};

int64_t share(int64_t total, int64_t worker, int64_t workers) { return total * worker / workers; }

void cells(void* context, int64_t worker) {
  Work& work = *static_cast<Work*>(context);
  const Cell& cell = *work.cell;
  const int64_t first = share(cell.batch, worker, cell.workers);
  const int64_t last = share(cell.batch, worker + 1, cell.workers);
  const bool fine = work.backward ? work.precision.backward(cell, first, last, worker)
                                  : work.precision.forward(cell, first, last);
  if (!fine) work.failed = true;
}

void diagonals(void* context, int64_t worker) {
  const Work& work = *static_cast<Work*>(context);
  const Diagonal& one = *work.diagonal;
  const int64_t lines = (one.width + kLine - 1) / kLine;
  const int64_t first = share(lines, worker, one.workers) * kLine;
  const int64_t end = share(lines, worker + 1, one.workers) * kLine;
  const int64_t last = end < one.width ? end : one.width;
  (work.backward ? work.precision.diagonal_backward : work.precision.diagonal_forward)(one, first,
                                                                                       last);
}

const Precision& precision_of(int32_t kernel, int32_t dtype) {
  return dtype == SLIPSTREAM_SCAN_FLOAT32 ? kKernels[kernel]->float32 : kKernels[kernel]->float64;
}

bool known(int32_t kernel, int32_t dtype) {
  return known(kernel) && (dtype == SLIPSTREAM_SCAN_FLOAT32 || dtype == SLIPSTREAM_SCAN_FLOAT64);
}

int32_t run(int32_t kernel, int32_t dtype, const Cell* cell, bool backward) {
  if (!known(kernel, dtype) || cell->steps < 1 || cell->batch < 1 || cell->hidden < 1 ||
      cell->kind < SLIPSTREAM_SCAN_TANH || cell->kind > SLIPSTREAM_SCAN_LSTM || cell->workers < 1 ||
      cell->workers > cell->batch)
    return SLIPSTREAM_INVALID;
  Work work{precision_of(kernel, dtype), cell, nullptr, backward};
  parallel_for(cell->workers, cell->workers, cells, &work);
  return work.failed ? SLIPSTREAM_NO_MEMORY : SLIPSTREAM_OK;
}

int32_t run(int32_t kernel, int32_t dtype, const Diagonal* one, bool backward) {
  if (!known(kernel, dtype) || one->steps < 1 || one->width < 1 || one->workers < 1)
    return SLIPSTREAM_INVALID;
  Work work{precision_of(kernel, dtype), nullptr, one, backward};
  parallel_for(one->workers, one->workers, diagonals, &work);
  return SLIPSTREAM_OK;
}

}  // namespace
}  // namespace scan
}  // namespace slipstream

using namespace slipstream::scan;

extern "C" {

int32_t slipstream_scan_kernel_count(void) { return kCount; }

const char* slipstream_scan_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_scan_forward(int32_t kernel, int32_t dtype, const Cell* cell) {
  return run(kernel, dtype, cell, false);
}

int32_t slipstream_scan_backward(int32_t kernel, int32_t dtype, const Cell* cell) {
  return run(kernel, dtype, cell, true);
}

int32_t slipstream_scan_diagonal_forward(int32_t kernel, int32_t dtype, const Diagonal* one) {
  return run(kernel, dtype, one, false);
}

int32_t slipstream_scan_diagonal_backward(int32_t kernel, int32_t dtype, const Diagonal* one) {
  return run(kernel, dtype, one, true);
}

int32_t slipstream_scan_products(int32_t kernel, int32_t dtype, int64_t count, int64_t width,
                                 const void* left, int64_t left_stride, const void* right,
                                 int64_t right_stride, void* out, int64_t out_stride) {
  if (!known(kernel, dtype) || count < 0 || width < 1) return SLIPSTREAM_INVALID;
  return precision_of(kernel, dtype)
                 .products(count, width, left, left_stride, right, right_stride, out, out_stride)
             ? SLIPSTREAM_OK
             : SLIPSTREAM_NO_MEMORY;
}

}  // extern "C"
