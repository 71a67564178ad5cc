// Which kernels this build has, and how their work is divided among threads.

#include "slipstream/robe.h"

#include "robe/kernel.h"
#include "slipstream/bags.h"
#include "threads.h"

namespace slipstream {
namespace robe {

#define KERNELS "robe_kernels.inc"
#include "registry.inc"

namespace {

// Some tens of microseconds of work for a thread.
constexpr int64_t kIds = 2048;
// Bags of one table before the next table: each change waits for the first few rows.
constexpr int64_t kTogether = 256;
// Numbers of a result that would push everything else out of most caches, and itself before it is
// read: 16 MiB.
constexpr int64_t kPast = int64_t{4} << 20;
// Slots of the gradient are divided at cache lines.
constexpr int64_t kLine = 16;

// Whether no kernel can leave its arrays.
bool consistent(const Lookup& lookup) {
  int64_t width = 0;
  for (int64_t table = 0; table < lookup.table_count; ++table) width += lookup.tables[table].dim;
  if (width != lookup.width || lookup.block < 1 || lookup.block > lookup.size) return false;
  if (lookup.id_bytes != 4 && lookup.id_bytes != 8) return false;
  if (lookup.bags == 0 || lookup.table_count == 0) return true;
  int64_t where = 0;
  return slipstream_bags_check(lookup.ids, lookup.id_bytes, lookup.count, lookup.offsets,
                               lookup.offset_count, &lookup.tables->rows,
                               sizeof(Table) / sizeof(int64_t), lookup.table_count, lookup.bags,
                               &where) == SLIPSTREAM_BAGS_FINE;
}

struct Task {
  const Kernel& kernel;
  const Lookup& lookup;
  int64_t pieces;  // of each table's bags, or of the gradient
  const float* array;
  const float* result_gradient;
  float scale;
  const float* result;
  float* made;
};

// Whole tables in sequence need no more than this.
template <typename Body>
void each_table(const Lookup& lookup, Body body) {
  int64_t column = 0;
  for (int64_t number = 0; number < lookup.table_count; ++number) {
    body(number, column);
    column += lookup.tables[number].dim;
  }
}

Part part_of(const Task& task, int64_t index) {
  const Lookup& lookup = task.lookup;
  const int64_t number = index % lookup.table_count, piece = index / lookup.table_count;
  int64_t column = 0;
  for (int64_t before = 0; before < number; ++before) column += lookup.tables[before].dim;
  return {lookup, lookup.tables[number], number, column, lookup.bags * piece / task.pieces,
          lookup.bags * (piece + 1) / task.pieces,
          lookup.bags * lookup.width >= kPast};
}

void forward(void* context, int64_t index) {
  const Task& task = *static_cast<const Task*>(context);
  task.kernel.forward(part_of(task, index), task.array, task.made);
}

void weight_gradient(void* context, int64_t index) {
  const Task& task = *static_cast<const Task*>(context);
  task.kernel.weight_gradient(part_of(task, index), task.result_gradient, task.array, task.made);
}

// Every thread goes through all ids and adds what falls into its own slots: no slot is added to by
// two, and each in the order of the ids, however many threads there are.
void backward(void* context, int64_t index) {
  const Task& task = *static_cast<const Task*>(context);
  const Lookup& lookup = task.lookup;
  const int64_t lines = (lookup.size + kLine - 1) / kLine;
  const int64_t begin = lines * index / task.pieces * kLine;
  const int64_t end = lines * (index + 1) / task.pieces * kLine;
  each_table(lookup, [&](int64_t number, int64_t column) {
    task.kernel.backward({lookup, lookup.tables[number], number, column, 0, lookup.bags, false},
                         task.result_gradient, task.scale, task.array, task.result, task.made,
                         begin, end < lookup.size ? end : lookup.size);
  });
}

int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

int32_t run_in_bags(const Lookup& lookup, Task task, void (*body)(void*, int64_t)) {
  if (lookup.bags == 0 || lookup.table_count == 0) return SLIPSTREAM_OK;
  const int64_t pieces = lookup.table_count > 1
                             ? lookup.bags / kTogether
                             : at_most(lookup.count / kIds, lookup.bags);
  task.pieces = pieces > 0 ? pieces : 1;
  const int threads = lookup.count < 2 * kIds ? 1 : lookup.threads;
  parallel_for(lookup.table_count * task.pieces, threads, body, &task);
  return SLIPSTREAM_OK;
}

}  // namespace
}  // namespace robe
}  // namespace slipstream

using namespace slipstream::robe;

extern "C" {

int32_t slipstream_robe_kernel_count(void) { return kCount; }

const char* slipstream_robe_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_robe_forward(int32_t kernel, const slipstream_robe_lookup* lookup,
                                const float* array, float* result) {
  if (!known(kernel) || !consistent(*lookup)) return SLIPSTREAM_INVALID;
  return run_in_bags(*lookup,
                     {*kKernels[kernel], *lookup, 1, array, nullptr, 1, nullptr, result}, forward);
}

int32_t slipstream_robe_backward(int32_t kernel, const slipstream_robe_lookup* lookup,
                                 const float* result_gradient, float scale, const float* array,
                                 const float* result, float* gradient) {
  if (!known(kernel) || !consistent(*lookup)) return SLIPSTREAM_INVALID;
  const int64_t lines = (lookup->size + kLine - 1) / kLine;
  const int64_t pieces = lookup->count < 2 * kIds ? 1 : at_most(lookup->threads, lines);
  Task task = {*kKernels[kernel], *lookup, pieces > 0 ? pieces : 1, array, result_gradient, scale,
               result, gradient};
  slipstream::parallel_for(task.pieces, lookup->threads, backward, &task);
  return SLIPSTREAM_OK;
}

int32_t slipstream_robe_weight_gradient(int32_t kernel, const slipstream_robe_lookup* lookup,
                                        const float* result_gradient, const float* array,
                                        float* weight_gradient_) {
  if (!known(kernel) || !consistent(*lookup)) return SLIPSTREAM_INVALID;
  return run_in_bags(
      *lookup,
      {*kKernels[kernel], *lookup, 1, array, result_gradient, 1, nullptr, weight_gradient_},
      weight_gradient);
}

}  // extern "C"
