// What a step allocates and frees, in the order it does so, and what that does to the heap.

#include <algorithm>

#include "internal.h"
#include "slipstream/heap_of_step.h"

namespace {

// Where the changes at the start and at the end of each task begin: [2 * tasks + 1].
std::vector<int64_t> places(const int32_t *producer, const int32_t *release, int64_t count,
                            int64_t tasks) {
  std::vector<int64_t> begin(static_cast<std::size_t>(2 * tasks + 2), 0);
  for (int64_t i = 0; i < count; ++i) {
    if (producer[i] >= 0) ++begin[2 * int64_t{producer[i]} + 2];
    if (release[i] >= 0) ++begin[2 * int64_t{release[i]} + 3];
  }
  for (std::size_t k = 1; k < begin.size(); ++k) begin[k] += begin[k - 1];
  return begin;
}

}  // namespace

extern "C" int32_t slipstream_changes_in_turn(const int64_t *nbytes, const int32_t *producer,
                                              const int32_t *release, int64_t count, int64_t tasks,
                                              int64_t *out_change) {
  return slipstream::guarded(nullptr, [&]() -> int {
    for (int64_t i = 0; i < count; ++i)
      if (producer[i] >= tasks || release[i] >= tasks) return SLIPSTREAM_INVALID;
    // While they are filled, each entry is the end of its list so far: one entry too early.
    std::vector<int64_t> end = places(producer, release, count, tasks);
    int64_t *next = end.data() + 1;
    for (int64_t i = 0; i < count; ++i) {
      if (producer[i] >= 0) out_change[next[2 * int64_t{producer[i]}]++] = nbytes[i];
      if (release[i] >= 0) out_change[next[2 * int64_t{release[i]} + 1]++] = -nbytes[i];
    }
    for (int64_t k = 0; k < 2 * tasks; ++k)
      if (end[k + 1] - end[k] > 1) std::sort(out_change + end[k], out_change + end[k + 1]);
    return SLIPSTREAM_OK;
  });
}

extern "C" int64_t slipstream_heap_growth(const int64_t *change, int64_t count, int64_t begin,
                                          double kept, int32_t cycles) {
  const int64_t most = static_cast<int64_t>(kept);  // bytes are whole
  int64_t top = begin, grown = 0;
  for (int32_t cycle = 0; cycle < cycles; ++cycle) {
    const int64_t before = top;
    int64_t alive = begin;
    grown = 0;
    for (int64_t i = 0; i < count; ++i) {
      alive += change[i];
      // Without branches: which way they go is as good as random.
      const int64_t rise = std::max(alive - top, int64_t{0});
      grown += rise;
      top += rise;
      top = top - alive > most ? alive : top;
    }
    if (top == before) break;  // the next one would be the same
  }
  return grown;
}
